"""Lightning trains on the simulated device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from device.sim import Schedule
from device.where import DevicePool
from helpers.ranks import RankPool
from strategy.fits import NAMES, Recipe, assert_same, fit

FEW_SEEDS, ALL_SEEDS = 4, 20  # all where the host has a part in a step


@pytest.mark.device("lazy", "random1")
@pytest.mark.parametrize("name", ["zero2_offload", "zero3"])
def test_training_gives_the_bits_of_cpu_ranks(
    device_pool2: DevicePool, rank_pools: Callable[..., RankPool], name: str
) -> None:
    recipe = Recipe(micro=2, scheduled=True)
    expected = rank_pools(2).run(fit, name, recipe, gradient_clip_val=0.3)
    actual = device_pool2.run(fit, name, recipe, accelerator=device_pool2.where.accelerator, gradient_clip_val=0.3)
    assert_same(actual[0].weights, expected[0].weights)


@pytest.mark.device
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_trains(device_pool1: DevicePool, precision: str) -> None:
    where = device_pool1.where
    (fitted,) = device_pool1.run(fit, "zero2_offload", Recipe(), accelerator=where.accelerator, precision=precision)
    assert fitted.steps == 3
    assert all(weight.isfinite().all() for weight in fitted.weights.values())


@pytest.mark.slow
@pytest.mark.device("eager")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_gives_the_same_bits(device_pool2: DevicePool, name: str, precision: str) -> None:
    if not device_pool2.where.simulated:
        pytest.skip("only the simulated device has schedules to choose")
    recipe = Recipe(micro=2)
    flags = {"accelerator": device_pool2.where.accelerator, "precision": precision, "gradient_clip_val": 0.3}
    expected = device_pool2.run(fit, name, recipe, **flags)
    seeds = ALL_SEEDS if name in ("zero2_offload", "zero3_offload") else FEW_SEEDS
    schedules = (Schedule("lazy"), *(Schedule("random", seed) for seed in range(seeds)))
    for schedule in schedules:
        actual = device_pool2.under(schedule).run(fit, name, recipe, **flags)
        assert_same(actual[0].weights, expected[0].weights)
