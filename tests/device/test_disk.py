"""Optimizer state on a disk beside a device that trains: in every schedule the bits of state in host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from device import sim
from device.sim import Schedule
from device.test_training import EAGER, LAZY, Digests, digests
from device.where import DevicePool
from strategy.fits import Recipe, fit

from lightning_zero.integration.names import STRATEGIES

RECIPE = Recipe(steps=3, micro=2, optimizer="adamw")
SEEDS = 10
BUFFER_GB = 2.0**-12  # tiles of 4096 elements, the smallest there are


def train(options: dict[str, Any], precision: str, optimizer: str, schedules: Sequence[Schedule]) -> list[Digests]:
    found, recipe = [], dataclasses.replace(RECIPE, optimizer=optimizer)
    for schedule in schedules:
        with sim.scheduled(schedule):
            flags: dict[str, Any] = {"precision": precision, "gradient_clip_val": 0.3}
            found.append(digests(fit(options, recipe, accelerator=sim.DEVICE, **flags)))
    return found


@pytest.mark.slow
@pytest.mark.device("eager")  # the test chooses its schedules itself
@pytest.mark.parametrize(
    ("precision", "world", "optimizer"),
    [("32-true", 1, "adamw"), ("bf16-true", 2, "adamw"), ("bf16-true", 1, "muon_and_adamw")],
)
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_state_on_a_disk_gives_the_bits_of_state_in_host_memory(
    device_pool1: DevicePool,
    device_pool2: DevicePool,
    tmp_path: Path,
    name: str,
    precision: str,
    world: int,
    optimizer: str,
) -> None:
    pool = (device_pool1, device_pool2)[world - 1]
    if not pool.where.simulated:
        pytest.skip("only the simulated device has schedules to choose")
    small = {"persistence_numel": 0}
    there = {"nvme_path": str(tmp_path), "nvme_buffer_gb": BUFFER_GB, "offload_gradients": "nvme"}
    disk = STRATEGIES[f"{name}_nvme"] | small | there
    (expected,) = pool.run(train, STRATEGIES[f"{name}_offload"] | small, precision, optimizer, [EAGER])[0]
    schedules = [LAZY, *(Schedule("random", seed) for seed in range(SEEDS))]
    found = pool.run(train, disk, precision, optimizer, schedules)[0]
    wrong = [str(schedule) for schedule, actual in zip(schedules, found, strict=True) if actual != expected]
    assert not wrong
