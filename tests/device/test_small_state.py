"""State of one element, which is on the device where optimizers want it, after a checkpoint was loaded, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.resuming import run
from device.test_overlap import Case, start
from device.where import DevicePool
from strategy.fits import Fitted, Lit, Recipe
from torch import Tensor, nn

from lightning_zero import Muon
from lightning_zero.storage import InlineExecutor
from lightning_zero.update.state import ShardState


class Regression(Lit):
    """Ends in one number, with a bias of one element, and has a matrix of one."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(1, 1))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        weights = [parameter.square().sum() for parameter in self.model.parameters()]
        return torch.stack(weights).sum() * (1 + batch.float().mean())

    def configure_optimizers(self) -> Any:
        if self.recipe.optimizer == "muon":
            return Muon(self.model.parameters(), lr=0.02)
        if self.recipe.optimizer == "asgd":  # its counters are on the device
            return torch.optim.ASGD(self.model.parameters(), lr=0.02)
        return torch.optim.Adafactor(self.model.parameters(), lr=0.02)


def train(optimizer: str, accelerator: str, **more: Any) -> Fitted:
    strategy = {"stage": 2, "persistence_numel": 0}
    return run(strategy, Recipe(optimizer=optimizer), Regression, steps=5, accelerator=accelerator, **more)


@pytest.mark.device("lazy")
@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "asgd"])
def test_a_run_goes_on(device_pool1: DevicePool, optimizer: str, tmp_path: Path) -> None:
    path, accelerator = str(tmp_path / "a.ckpt"), device_pool1.where.accelerator
    (whole,) = device_pool1.run(train, optimizer, accelerator, save=(3, path))
    torch.load(path)  # this process has no such device
    (resumed,) = device_pool1.run(train, optimizer, accelerator, resume=path)
    for name, value in whole.weights.items():
        assert torch.equal(resumed.weights[name], value), name


@pytest.mark.device("lazy")
def test_a_loaded_step_count_is_where_the_update_reads_it(device: torch.device) -> None:
    """On the host, unless a kernel on the device reads it, as a fused or capturable one does."""
    session = start(Case(2, host=False), InlineExecutor(), device)
    bucket, *_ = session.engine.buckets
    state = {"step": torch.tensor(7.0), "exp_avg": torch.ones(bucket.parameters[0].shape)}
    for capturable, place in ((False, "cpu"), (True, device.type)):
        session.optimizer.param_groups[0]["capturable"] = capturable
        session.updater.load(bucket, 0, state)
        (segment,) = (segment for segment in bucket.segments if segment.param == 0)
        shard = session.updater.state_of(bucket)
        assert isinstance(shard, ShardState)
        count = shard.scalars(segment)["step"]
        assert (count.device.type, count.item()) == (place, 7.0)
        assert shard.describe(segment).rest["step"].device.type == "cpu"
