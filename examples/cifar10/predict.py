"""Predict the classes of the test images from a checkpoint, with any strategy and number of ranks.

    python examples/cifar10/predict.py ckpt_path=outputs/cifar10/.../checkpoints/last.ckpt

It writes `predictions.csv`, with one row per image, and `predictions.png` to the run folder.
"""

import csv
from pathlib import Path

import torch
from data import CLASSES
from hydra.utils import instantiate
from model import Classifier
from omegaconf import DictConfig
from pictures import draw_predictions
from torch import Tensor
from train import check_options, is_checkpoint

from lightning_zero import hydra_main, load_from_checkpoint
from lightning_zero.config import ConfigError, build_trainer
from lightning_zero.tools.contents import read_checkpoint


@hydra_main(config_name="predict", config_path="conf")
def main(cfg: DictConfig) -> None:
    """Predict, and write a table and a picture."""
    check_options(cfg)
    check_checkpoint(str(cfg.ckpt_path))
    data = instantiate(cfg.data)
    model = load_from_checkpoint(Classifier, cfg.ckpt_path)  # the checkpoint names its network
    trainer = build_trainer(cfg)
    batches = trainer.predict(model, data)
    if trainer.is_global_zero:
        probabilities = torch.cat(batches)[: len(data.test)].cpu()  # the rest only fills up the last batches
        pixels, labels = data.test.batch(torch.arange(len(probabilities)))  # fewer with limit_predict_batches
        write_table(labels, probabilities, Path(cfg.run_dir, "predictions.csv"))
        draw_predictions(pixels, labels, probabilities, Path(cfg.run_dir, "predictions.png"))
        print(f"{(probabilities.argmax(dim=1) == labels).float().mean():.1%} of {len(labels)} images are right.")
        print(f"\n{cfg.run_dir}")


def check_checkpoint(path: str) -> None:
    """Raise if a local checkpoint does not exist or names no network; remote ones are not checked."""
    if "://" in path:
        return
    if not is_checkpoint(Path(path)):
        raise ConfigError(f"ckpt_path={path} must be an existing file or sharded folder: change ckpt_path.")
    checkpoint, _ = read_checkpoint(Path(path))
    if "network" not in checkpoint.get("hyper_parameters", {}):
        raise ConfigError(f"ckpt_path={path} does not name a network: expected a checkpoint of train.py.")


def write_table(labels: Tensor, probabilities: Tensor, path: Path) -> None:
    """Write for each image its true class, its predicted class and the probability of the latter."""
    rows = zip(labels.tolist(), probabilities.argmax(dim=1).tolist(), probabilities.amax(dim=1).tolist(), strict=True)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "class", "predicted", "probability"])
        for image, (label, predicted, probability) in enumerate(rows):
            table.writerow([image, CLASSES[label], CLASSES[predicted], f"{probability:.4f}"])


if __name__ == "__main__":
    main()
