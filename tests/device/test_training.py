"""Lightning trains on the simulated device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from device.where import DevicePool
from helpers.ranks import RankPool
from strategy.fits import Recipe, assert_same, fit

NAMES = ("zero2_offload", "zero3")


@pytest.mark.device("lazy", "random1")
@pytest.mark.parametrize("name", NAMES)
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
