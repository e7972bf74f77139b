"""State of parameters of one element, which is on the device where masters are, after a checkpoint was loaded, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.resuming import run
from device.where import DevicePool
from strategy.fits import Fitted, Lit, Recipe
from torch import Tensor, nn

from lightning_zero import Muon


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
        return torch.optim.Adafactor(self.model.parameters(), lr=0.02)


def train(optimizer: str, accelerator: str, **more: Any) -> Fitted:
    strategy = {"stage": 2, "persistence_numel": 0}
    return run(strategy, Recipe(optimizer=optimizer), Regression, steps=5, accelerator=accelerator, **more)


@pytest.mark.device("lazy")
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_a_run_goes_on(device_pool1: DevicePool, optimizer: str, tmp_path: Path) -> None:
    path, accelerator = str(tmp_path / "a.ckpt"), device_pool1.where.accelerator
    (whole,) = device_pool1.run(train, optimizer, accelerator, save=(3, path))
    (resumed,) = device_pool1.run(train, optimizer, accelerator, resume=path)
    for name, value in whole.weights.items():
        assert torch.equal(resumed.weights[name], value), name
