"""Optimizers of whole parameters in fits of Lightning: with all that may come together, as under ddp."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from callbacks.test_ema import make_average
from helpers import models, whole
from helpers.ranks import RankPool, slow_unless
from strategy.fits import DDP, Fitted, Lit, Recipe, assert_close, assert_same, fit, reference
from strategy.test_fabric import run as run_fabric

CLIP = 0.3
PAIRS = [
    *itertools.product(("zero3", "zero2_offload"), ("adafactor", "shampoo", "muon_and_adamw")),
    *(("zero2_offload", "lamb"), ("zero1", "shampoo")),
    *itertools.product(("zero0", "zero3_offload"), ("muon_and_adamw",)),
]


class Grows(Lit):
    """One parameter is frozen, one is used by turns; vectors join the optimizer after the first step."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model.blocks[0].up.weight.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        matrices, rest = whole.groups_of(self.recipe.optimizer, self.model)
        self.rest = {key: value for key, value in rest.items() if key != "params"} | {"params": list(rest["params"])}
        optimizer, options = whole.WHOLE[self.recipe.optimizer]
        return optimizer([matrices], **options)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.trainer.global_step == 1 and len(self.trainer.optimizers[0].param_groups) == 1:
            self.trainer.optimizers[0].add_param_group(self.rest)


def fit_all(strategy: str, recipe: Recipe) -> Fitted:
    average = make_average(strategy)
    return fit(strategy, recipe, Grows, gradient_clip_val=CLIP, callbacks=[average])


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("zero3", "lamb"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS)],
)
def test_a_fit_with_everything_is_that_of_ddp(pool2: RankPool, name: str, optimizer: str) -> None:
    recipe = Recipe("optional", optimizer, steps=4, micro=2, dtype=torch.float64, flagged=models.by_turns)
    expected, actual = (pool2.run(fit_all, strategy, recipe)[0] for strategy in (DDP, name))
    assert_close(actual.weights, expected.weights)
    start = recipe.make_model().state_dict()
    moved = {key for key, value in actual.weights.items() if key in start and not torch.equal(value, start[key])}
    assert start.keys() - moved == {"blocks.0.up.weight"}


def with_warnings(name: str, recipe: Recipe, path: str, **options: Any) -> tuple[Fitted, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = run_fabric(name, recipe, path, **options)
    return fitted, [str(each.message) for each in caught]


def late(name: str, recipe: Recipe, path: str) -> str:
    with pytest.raises(ValueError, match="needs whole parameters") as raised:
        run_fabric(name, recipe, path, apart=True)
    return str(raised.value)


@pytest.mark.parametrize("name", slow_unless(("zero3",), ("zero3", "zero1")))
def test_fabric_takes_them_with_their_module(pool2: RankPool, name: str, tmp_path: Path) -> None:
    recipe = Recipe("wide" if name == "zero3" else "transformer", "lamb", micro=2, scheduled=True)
    (fitted, warned), *_ = pool2.run(with_warnings, name, recipe, str(tmp_path / "saved.ckpt"), clip_norm=CLIP)
    assert_same(fitted.weights, reference(name, recipe, 2, clip_norm=CLIP).weights)
    uneven = [message for message in warned if "they lie unevenly: the fullest shards hold" in message]
    assert len(uneven) == (1 if name == "zero3" else 0)
    (message, *_) = pool2.run(late, name, recipe, str(tmp_path / "late.ckpt"))
    assert "fabric.setup(module, optimizer)" in message
