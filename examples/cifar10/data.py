"""Labelled images in memory, and loaders that split one global batch over the ranks.

Step t uses the same images at any world size, and evaluation uses every image once.
"""

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import lightning as L
import torch
from archive import TEST_FILE, TRAIN_FILES, prepare, read_records
from torch import Tensor

from lightning_zero.config import micro_batch_size

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IGNORED = -100  # label of an image that only fills up a batch; cross_entropy and the metrics ignore it


class Images(NamedTuple):
    """Images and their classes."""

    pixels: Tensor  # N 3 32 32, uint8
    labels: Tensor  # N, int64

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The input of a model: pixels as float32 from -1 to 1, and labels."""
        return self.pixels[indices].float() / 127.5 - 1, self.labels[indices]

    def part(self, start: int, stop: int) -> "Images":
        return Images(self.pixels[start:stop], self.labels[start:stop])

    def __len__(self) -> int:
        return len(self.labels)


class ShuffledBatches:
    """Training batches: each epoch is a permutation drawn from (seed, epoch); an incomplete last batch is left out.

    An iteration begins at the current position and yields as many batches as an epoch has. Lightning takes fewer if
    `limit_train_batches` is set or if it resumes within an epoch; it counts them itself.

    Args:
        images: The training images.
        batch_size: Images per optimizer step, over all ranks and micro-batches.
        seed: Determines the order, together with the epoch.
        rank: This rank, which gets its part of each batch.
        world_size: Number of ranks.
        accumulate: Micro-batches per optimizer step.
    """

    def __init__(
        self, images: Images, batch_size: int, seed: int, rank: int = 0, world_size: int = 1, accumulate: int = 1
    ) -> None:
        self.micro_batch = micro_batch_size(batch_size, world_size, accumulate)
        self.images, self.batch_size, self.seed = images, batch_size, seed
        self.rank, self.accumulate = rank, accumulate
        self.position = 0  # number of micro-batches yielded since the run began

    def __len__(self) -> int:
        """Micro-batches per epoch. Without a length Lightning would fetch one batch ahead of the state."""
        return len(self.images) // self.batch_size * self.accumulate

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order: list[int] = []
        for _ in range(len(self)):
            epoch, index = divmod(self.position, len(self))
            if index == 0 or not order:
                order = self._order(epoch)
            self.position += 1
            step, part = divmod(index, self.accumulate)
            first = step * self.batch_size + (self.rank * self.accumulate + part) * self.micro_batch
            yield self.images.batch(torch.tensor(order[first : first + self.micro_batch]))

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self.images)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def state_dict(self) -> dict[str, int]:
        step, part = divmod(self.position, self.accumulate)
        return {"step": step, "micro_batch": part}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["step"] * self.accumulate + state["micro_batch"]


class EvaluationBatches:
    """Evaluation batches: the images in order, dealt to the ranks batch by batch.

    Every rank gets the same number of batches of the same size, because at stage 3 each forward needs all ranks. Images
    with the label `IGNORED` fill up the last batches.

    Args:
        images: The images to evaluate.
        batch_size: Images per batch of one rank.
        rank: This rank, which gets every `world_size`-th batch.
        world_size: Number of ranks.
    """

    def __init__(self, images: Images, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.images, self.batch_size = images, batch_size
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return math.ceil(len(self.images) / (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(len(self)):
            first = (index * self.world_size + self.rank) * self.batch_size
            indices = torch.arange(first, first + self.batch_size)
            pixels, labels = self.images.batch(indices.clamp(max=len(self.images) - 1))
            yield pixels, labels.masked_fill(indices >= len(self.images), IGNORED)


class ImageData(L.LightningDataModule):
    """Training, validation and test images, and their loaders.

    Files are read when the object is made, so that a wrong path ends the program before ranks are started.

    Args:
        train: The images for training and validation.
        test: The images for test and prediction.
        batch_size: Images per optimizer step, over all ranks and micro-batches.
        eval_batch_size: Images per validation or test batch of a rank.
        val_fraction: Fraction of `train`, its last images, that is used for validation; 0 for none.
        seed: Seed of the order.
    """

    def __init__(
        self,
        train: Images,
        test: Images,
        *,
        batch_size: int,
        eval_batch_size: int = 250,
        val_fraction: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value in {"batch_size": batch_size, "eval_batch_size": eval_batch_size}.items():
            check_positive(name, value)
        if not 0 <= val_fraction < 1:
            raise ValueError(
                f"data.val_fraction={val_fraction} must be at least 0 and below 1, such as 0.1: change it."
            )
        split = len(train) - round(val_fraction * len(train))
        if batch_size > split:
            raise ValueError(f"data.batch_size={batch_size} must be at most {split}, the number of training images.")
        self.train, self.val, self.test = train.part(0, split), train.part(split, len(train)), test
        self.batch_size, self.eval_batch_size, self.seed = batch_size, eval_batch_size, seed

    def setup(self, stage: str) -> None:
        if not len(self.val):
            self.trainer.limit_val_batches = 0  # otherwise Lightning warns about an empty loader

    def train_dataloader(self) -> ShuffledBatches:
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        accumulate = self.trainer.accumulate_grad_batches
        return ShuffledBatches(self.train, self.batch_size, self.seed, rank, world_size, accumulate)

    def val_dataloader(self) -> EvaluationBatches:
        return self._evaluation_batches(self.val)

    def test_dataloader(self) -> EvaluationBatches:
        return self._evaluation_batches(self.test)

    def predict_dataloader(self) -> EvaluationBatches:
        return self._evaluation_batches(self.test)

    def _evaluation_batches(self, images: Images) -> EvaluationBatches:
        return EvaluationBatches(images, self.eval_batch_size, self.trainer.global_rank, self.trainer.world_size)


def check_positive(name: str, value: int) -> None:
    """Raise if a count is not positive; the message has the name of its option."""
    if value < 1:
        raise ValueError(f"data.{name}={value} must be at least 1: set data.{name} to a positive number.")


class CIFAR10(ImageData):
    """CIFAR-10 in the binary version, with any number of records per file.

    Args:
        root: Folder of the files; if it does not exist, they are downloaded.
        url: Address of the archive.
        md5: Checksum of the archive.
        options: Other arguments of `ImageData`.
    """

    def __init__(self, root: str, url: str, md5: str, **options) -> None:
        folder = Path(root).expanduser().resolve()  # a download must not replace a symbolic link
        prepare(folder, url, md5)
        parts = [read_records(folder / name) for name in TRAIN_FILES]
        train = Images(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
        super().__init__(train, Images(*read_records(folder / TEST_FILE)), **options)


class Synthetic(ImageData):
    """Ten coloured patterns with noise, for trying the example without files; `options` are those of `ImageData`."""

    def __init__(self, train_images: int, test_images: int, seed: int = 0, **options) -> None:
        for name, value in {"train_images": train_images, "test_images": test_images}.items():
            check_positive(name, value)
        generator = torch.Generator().manual_seed(seed)
        patterns = 255 * torch.rand(len(CLASSES), 3, 4, 4, generator=generator)
        patterns = patterns.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)  # 10 3 32 32

        def draw(count: int) -> Images:
            labels = torch.randint(len(CLASSES), (count,), generator=generator)
            noise = 128 * torch.randn(count, 3, 32, 32, generator=generator)
            return Images((patterns[labels] + noise).clamp(0, 255).byte(), labels)

        super().__init__(draw(train_images), draw(test_images), seed=seed, **options)
