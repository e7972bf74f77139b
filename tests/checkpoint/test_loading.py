"""Modules from checkpoints without a Trainer: as by the class's own method, also where it is overridden."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningDataModule, LightningModule, __version__
from torch import nn

from lightning_zero import load_from_checkpoint
from lightning_zero.checkpoint.state import load_module_state_dict
from lightning_zero.engine import Engine
from lightning_zero.sharding import BucketPlacement, Mesh, MixedPrecisionPolicy, ShardingPolicy
from lightning_zero.storage import DeviceStore


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


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_that_does_not_fit_is_told_in_torchs_words(strict: bool) -> None:
    """So that it reads alike where a module is sharded already, at stage 3, and where it is not yet."""
    plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    own, cpu = plain.state_dict(), DeviceStore(torch.device("cpu"))
    stage_3 = ShardingPolicy.from_stage(3), MixedPrecisionPolicy()
    engine = Engine(copy.deepcopy(plain), BucketPlacement(Mesh.single(), *stage_3, cpu.device, cpu, cpu))
    state = {name: value for name, value in own.items() if name != "1.bias"} | {"2.weight": torch.ones(2)}
    state |= {"0.weight": torch.ones(3, 4), "1.running_mean": torch.ones(4)}
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight") as theirs:
        plain.load_state_dict(state, strict)
    with pytest.raises(RuntimeError) as ours:
        load_module_state_dict(engine, state, strict)
    assert str(ours.value) == str(theirs.value)
