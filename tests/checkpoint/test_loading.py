"""Modules from checkpoints without a Trainer: as by the class's own method, also where it is overridden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningDataModule, LightningModule, __version__

from lightning_zero import load_from_checkpoint


class Scaled(LightningModule):
    def __init__(self, width: int = 4, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)


class Overriding(Scaled):
    @classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("scale", 7.0)
        return super().load_from_checkpoint(*args, **kwargs)


class Batches(LightningDataModule):
    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    module = Scaled(width=3)
    saved = {
        "pytorch-lightning_version": __version__,
        "state_dict": module.state_dict(),
        "hyper_parameters": dict(module.hparams),
        "datamodule_hyper_parameters": {"size": 5},
    }
    torch.save(saved, tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def test_hyperparameters_come_from_file_argument_or_override(path: Path) -> None:
    (path.parent / "hparams.yaml").write_text("width: 3\nscale: 3.0\n")
    found = [
        load_from_checkpoint(Scaled, path),
        load_from_checkpoint(Scaled, path, scale=9.0),
        load_from_checkpoint(Scaled, path, hparams_file=path.parent / "hparams.yaml"),
        load_from_checkpoint(Overriding, path),
    ]
    assert [module.hparams.scale for module in found] == [1.0, 9.0, 3.0, 7.0]
    weight = torch.load(path, weights_only=True)["state_dict"]["layer.weight"]
    assert all(torch.equal(module.layer.weight, weight) for module in found)


def test_a_data_module_has_its_hyperparameters(path: Path) -> None:
    assert load_from_checkpoint(Batches, path).hparams.size == 5


@pytest.mark.parametrize("cls", [torch.nn.Linear, Scaled()], ids=["another class", "an object"])
def test_what_is_no_class_of_lightnings_is_refused(cls: Any, path: Path) -> None:
    with pytest.raises(TypeError, match="must be a class"):
        load_from_checkpoint(cls, path)
