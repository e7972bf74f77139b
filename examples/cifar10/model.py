"""Image classifiers for CIFAR-10: the tutorial's network and a ResNet-18, and their training and evaluation.

Shapes in comments: B images, C channels, K classes.
"""

import lightning as L
import torch
from data import CLASSES, IGNORED
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from lightning_zero.config import build_optimizers


class TutorialNet(nn.Module):
    """The network of PyTorch's and DeepSpeed's CIFAR-10 tutorials: 62,006 parameters."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)  # B 6 14 14
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # B 16 5 5
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        return self.fc3(x)  # B K


class ResidualBlock(nn.Module):
    """Two convolutions added to their input; if the shape changes, a 1x1 convolution adapts the input."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            adapt = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(adapt, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for 32 x 32 images: the first convolution is 3x3, and there is no pooling before the blocks."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(64)
        shapes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        pairs = [(ResidualBlock(i, c, stride), ResidualBlock(c, c, 1)) for i, c, stride in shapes]
        self.blocks = nn.Sequential(*(block for pair in pairs for block in pair))
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))  # B 64 32 32
        x = self.blocks(x)  # B 512 4 4
        return self.fc(x.mean(dim=(2, 3)))  # B K


NETWORKS = {"tutorial": TutorialNet, "resnet18": ResNet18}


class Classifier(L.LightningModule):
    """A network with its training and evaluation; accuracies count every image once, for any number of ranks.

    Args:
        network: A name of `NETWORKS`.
        optimizer: The `optimizer` group; needed to train.
        scheduler: The `scheduler` group; empty or None for a constant learning rate.
    """

    def __init__(self, network: str, optimizer: DictConfig | None = None, scheduler: DictConfig | None = None) -> None:
        super().__init__()
        if network not in NETWORKS:
            raise ValueError(f"model.network={network} must be one of {', '.join(NETWORKS)}.")
        self.save_hyperparameters("network")
        self.optimizer_config, self.scheduler_config = optimizer, scheduler
        self.network = NETWORKS[network](len(CLASSES))

        options = {"num_classes": len(CLASSES), "ignore_index": IGNORED}
        self.val_loss = MeanMetric(nan_strategy="disable")  # shows a loss of nan as nan
        self.val_accuracy = MulticlassAccuracy(average="micro", **options)
        self.test_loss = MeanMetric(nan_strategy="disable")
        self.test_accuracy = MulticlassAccuracy(average="micro", **options)
        self.class_accuracy = MulticlassAccuracy(average="none", **options)
        self.confusion = MulticlassConfusionMatrix(**options)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes: B 3 32 32 -> B K, at least fp32, since a 16-bit softmax is too imprecise."""
        logits = self.network(images)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)  # the mean of the global batch
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self._evaluate(batch, self.val_loss, self.val_accuracy)
        # Metrics that are logged as objects are reduced over the ranks at the end of the epoch.
        self.log_dict({"val_loss": self.val_loss, "val_accuracy": self.val_accuracy}, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the scores, for callbacks that show predictions."""
        logits = self._evaluate(batch, self.test_loss, self.test_accuracy)
        self.class_accuracy.update(logits, batch[1])
        self.confusion.update(logits, batch[1])
        self.log_dict({"test_loss": self.test_loss, "test_accuracy": self.test_accuracy})
        return logits

    def predict_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Probabilities of the classes for the images of all ranks, in the order of the data set: B K."""
        probabilities = self(batch[0]).softmax(dim=-1)
        return self.all_gather(probabilities).flatten(0, -2)

    def _evaluate(self, batch: tuple[Tensor, Tensor], loss: MeanMetric, accuracy: MulticlassAccuracy) -> Tensor:
        images, labels = batch
        logits = self(images)
        losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
        loss.update(losses[labels != IGNORED])
        accuracy.update(logits, labels)
        return logits

    def configure_optimizers(self):
        if self.optimizer_config is None:
            raise ValueError("Classifier(optimizer=None) cannot be trained: pass the `optimizer` group.")
        steps = self.trainer.estimated_stepping_batches
        return build_optimizers(self.optimizer_config, self.scheduler_config, self, steps)
