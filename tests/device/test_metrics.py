"""Metrics that contain a network, as those of generated images do, keep their state on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device import sim
from device.accelerator import SimAccelerator
from device.where import DevicePool
from helpers import models
from lightning.fabric import Fabric
from strategy.fits import Lit, Recipe, make_trainer
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_zero import ZeroFabricStrategy


class Distance(Metric):
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
        self.add_state("total", torch.zeros(4), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        self.total += self.network(values).sum(0)

    def compute(self) -> Tensor:
        return self.total.sum()

    def devices(self) -> set[str]:
        return {device.type for device in (self.total.device, self.device, self.network[1].running_mean.device)}


class Measuring(Lit):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.whole = Distance()

    def configure_model(self) -> None:
        self.in_shards = Distance()  # at stage 3

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for distance in (self.whole, self.in_shards):
            distance.update(torch.ones(2, 4, device=self.device))
            self.notes.append(distance.devices())
        return models.next_token_loss(self.model, batch)


def places_of_metrics(accelerator: str, stage: int) -> list[set[str]]:
    """Types of the devices of the state, in a fit and under Fabric."""
    lit = Measuring(Recipe(steps=1))
    make_trainer({"stage": stage}, accelerator=accelerator).fit(lit)
    known: Any = SimAccelerator() if accelerator == sim.DEVICE else accelerator  # Fabric has a registry of its own
    fabric = Fabric(accelerator=known, devices=2, strategy=ZeroFabricStrategy(stage))
    fabric.launch()
    inside = nn.ModuleDict({"model": nn.Linear(2, 2), "distance": Distance()})
    fabric.setup(inside)
    beside = fabric.to_device(Distance())
    beside.update(torch.ones(2, 4, device=fabric.device))
    return [*lit.notes, inside["distance"].devices(), beside.devices()]


@pytest.mark.device
@pytest.mark.parametrize("stage", [2, 3])
def test_metrics_with_a_network_keep_their_state_on_the_device(device_pool2: DevicePool, stage: int) -> None:
    for places in device_pool2.run(places_of_metrics, device_pool2.where.accelerator, stage):
        assert places == [{device_pool2.where.type}] * 4
