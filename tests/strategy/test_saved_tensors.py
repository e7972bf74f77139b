"""What autograd saves for backward where something else decides how: hooks, recomputation, memory formats."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import models
from helpers.ranks import RankPool
from helpers.third_party import Batch
from strategy import third_party_fits
from strategy.fits import (
    Lit,
    Recipe,
    assert_close,
    assert_same,
    fit,
    fit_each,
    make_trainer,
    reference,
    state_of,
)
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from lightning_zero import ZeroPrecision

WORLD = 2
STAGES = ["zero2", "zero3"]


def clones() -> contextlib.AbstractContextManager[None]:
    """Every saved tensor is a copy, as where activations move to another device and back."""
    return saved_tensors_hooks(torch.clone, lambda saved: saved)


def as_they_are() -> contextlib.AbstractContextManager[None]:
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class Saves(Lit):
    """A step inside of what decides how tensors are saved."""

    def __init__(self, recipe: Recipe, how: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        super().__init__(recipe)
        self.how = how

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        with self.how():
            return models.next_token_loss(self.model, batch)


@pytest.mark.parametrize("name", STAGES)
def test_saved_tensors_hooks(pool2: RankPool, name: str) -> None:
    recipe = Recipe(optimizer="momentum", micro=2)
    ways = (save_on_cpu, clones, as_they_are)
    fitted = pool2.run(fit_each, name, recipe, [functools.partial(Saves, how=how) for how in ways])[0]
    expected = reference(name, recipe, WORLD).weights
    differing = [
        how.__name__
        for how, one in zip(ways, fitted, strict=True)
        if any(not torch.equal(one.weights[name], value) for name, value in expected.items())
    ]
    assert not differing


class Recomputes(Lit):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        blocks: Any = self.model.blocks
        for i, block in enumerate(blocks):
            blocks[i] = models.Recomputed(block)


@pytest.mark.parametrize("param_dtype", [None, pytest.param("float32", marks=pytest.mark.slow)])
def test_recomputation_under_autocast(pool2: RankPool, param_dtype: Any) -> None:
    """Also where autocast casts the parameters, and keeps what it has cast."""
    precision = ZeroPrecision("bf16-mixed", param_dtype=param_dtype)
    plain = pool2.run(fit, "zero2", Recipe(), plugins=[precision])[0].weights
    for name in ("zero2", "zero3"):
        weights = pool2.run(fit, name, Recipe(), Recomputes, plugins=[precision])[0].weights
        assert_same({n.replace(".block.", "."): value for n, value in weights.items()}, plain)


class ChannelsLast(third_party_fits.Lit):
    """Images and kernels with channels last in memory, as they are fastest on GPUs."""

    def __init__(self) -> None:
        super().__init__("resnet", dtype=torch.float64, steps=4)
        self.model.to(memory_format=torch.channels_last)

    def training_step(self, batch: Batch, index: int) -> Any:
        return self.model(batch["pixel_values"].to(memory_format=torch.channels_last), batch["labels"])


def fit_channels_last(name: str) -> dict[str, Tensor]:
    trainer = make_trainer(name)
    trainer.fit(ChannelsLast())
    return state_of(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_channels_last(pool2: RankPool, name: str) -> None:
    _, plain = next(third_party_fits.fits("resnet", WORLD, steps=4, dtype=torch.float64))
    assert_close(pool2.run(fit_channels_last, name)[0], plain.weights)
