"""`validate`, `test` and `predict` before any `fit`: shards alone, and what a later `fit` may start from."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import RankError, RankPool, slow_unless
from lightning import Trainer
from strategy.fits import (
    FEW,
    MOMENTUM,
    NAMES,
    Fitted,
    Lit,
    Recipe,
    assert_same,
    fit,
    make_trainer,
    observe,
)
from torch import Tensor

from lightning_zero import ZeroStrategy
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.planning.memory import held_by, planned_parts
from lightning_zero.sharding import BucketState

EVALUATIONS = ("validate", "test", "predict")


class Observed(Lit):
    """Notes before each step what the strategy holds, and what it plans to."""

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        strategy = self.trainer.strategy
        assert isinstance(strategy, ZeroStrategy)
        assert strategy.memory is not None
        self.notes.append((held_by(strategy.engine), planned_parts(strategy.memory.plan)))
        return batch


def trainer_for(name: str, precision: str = "32-true", **options: Any) -> Trainer:
    arguments = STRATEGIES[name] | options
    return make_trainer(arguments, precision=precision, limit_val_batches=None)


def evaluate(trainer: Trainer, how: str, lit: Lit, **arguments: Any) -> Any:
    return getattr(trainer, how)(lit, **(arguments if how == "predict" else {"verbose": False, **arguments}))


def held_alone(name: str, how: str, precision: str) -> list[str]:
    """Checks one evaluation; returns what is wrong with it."""
    recipe = Recipe(steps=2)
    lit, trainer = Observed(recipe), trainer_for(name, precision)
    strategy: Any = trainer.strategy
    ahead: list[BucketState] = []  # of the second block's parameters while the first one computes

    def see(*_: Any) -> None:
        ahead.append(next(b.state for b in strategy.engine.buckets if b.shards_params and "blocks.1" in b.name))

    sharded = strategy.stage == 3
    if sharded:
        lit.model.blocks[0].register_forward_pre_hook(see)
    predictions = evaluate(trainer, how, lit)
    held, planned = lit.notes[-1]
    values = sum(p.numel() * p.dtype.itemsize for p in lit.parameters()) // (dist.get_world_size() if sharded else 1)
    padding = 128 * len([*lit.parameters()])
    right = {
        "held as planned": held == planned,
        "nothing but parameters": not any(
            held[part].total for part in ("masters", "optimizer_state", "sharded_gradient")
        ),
        "their shards": values <= (held["parameters"] + held["param_shards"]).total <= values + padding,
        "on the host": held["param_shards"].device == 0 or strategy.offload_params == "none",
        "gathered ahead": ahead == [BucketState.GATHERING] * len(lit.notes) if sharded else True,
    }
    if how == "predict":
        plain = recipe.make_model().to(next(lit.parameters()).dtype)
        with torch.inference_mode():
            right["values"] = all(map(torch.equal, predictions, [plain(batch[:, :-1]) for batch in lit.loader()]))
    return [f"{name} {how} {precision}: {what}: {held}, {ahead}" for what, is_right in right.items() if not is_right]


def check_all(name: str) -> list[str]:
    """Of three evaluations, in two precisions."""
    cases = itertools.product(EVALUATIONS, ("32-true", "bf16-true"))
    return [wrong for how, flag in cases for wrong in held_alone(name, how, flag)]


@pytest.mark.parametrize("name", slow_unless(("zero2_offload", "zero3_offload"), NAMES))
def test_evaluation_holds_the_shards_alone(pool2: RankPool, name: str) -> None:
    for wrong in pool2.run(check_all, name):
        assert wrong == []


# ------------------------------------------------------------------------------------------------------ and then a fit


def evaluated_then_fitted(
    name: str, precision: str, ckpt_path: str | None = None, *, other: bool = False, **options: Any
) -> Fitted:
    """With one Trainer, or with an `other` one for the fit."""
    lit, trainer = Lit(MOMENTUM), trainer_for(name, precision, **options)
    evaluate(trainer, "validate", lit)
    trainer = trainer_for(name, precision, **options) if other else trainer
    trainer.fit_loop.max_epochs = 1 if ckpt_path is None else 2
    trainer.fit(lit, ckpt_path=ckpt_path)
    return observe(trainer, lit)


def save(path: str) -> None:
    lit, trainer = Lit(MOMENTUM), trainer_for("zero2", "bf16-mixed")
    trainer.fit(lit)
    trainer.save_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "other"), [("zero3_offload", False), *(pytest.param(n, True, marks=pytest.mark.slow) for n in FEW)]
)
def test_a_fit_starts_from_full_precision_or_not_at_all(pool2: RankPool, name: str, other: bool) -> None:
    with pytest.raises(RankError, match=r"was cast to torch\.bfloat16 for evaluation.*evaluation_masters=True"):
        pool2.run(evaluated_then_fitted, name, "bf16-mixed", other=other)
    expected, *_ = pool2.run(fit, {**STRATEGIES[name]}, MOMENTUM, precision="bf16-mixed")
    actual, *_ = pool2.run(evaluated_then_fitted, name, "bf16-mixed", other=other, evaluation_masters=True)
    assert_same(actual.weights, expected.weights)


def test_a_checkpoint_has_the_full_precision_that_evaluation_lacks(pool2: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    pool2.run(save, path)
    resumed: dict[str, Any] = {"ckpt_path": path, "max_epochs": 2, "precision": "bf16-mixed"}
    expected, *_ = pool2.run(fit, {**STRATEGIES["zero3_offload"]}, MOMENTUM, **resumed)
    actual, *_ = pool2.run(evaluated_then_fitted, "zero3_offload", "bf16-mixed", path)
    assert actual.steps == expected.steps == 2 * MOMENTUM.steps
    assert_same(actual.weights, expected.weights)


def evaluated_by_two(first: str, second: str, loaded: bool) -> float:
    """Two Trainers on one module, whose weights may be loaded in between."""
    lit = Lit(MOMENTUM)
    state = {key: value.clone() for key, value in lit.state_dict().items()}
    trainer = trainer_for("zero3", first)
    trainer.predict(lit)
    if loaded:
        trainer.strategy.release()  # type: ignore[attr-defined]
        lit.load_state_dict(state)
    (result,) = trainer_for("zero2", second).validate(lit, verbose=False)
    return result["val_loss"]


@pytest.mark.slow
def test_rounded_weights_pass_for_no_others(pool2: RankPool) -> None:
    with pytest.raises(RankError, match=r"cast to torch\.bfloat16 .* needed in torch\.float32"):
        pool2.run(evaluated_by_two, "bf16-true", "32-true", False)
    (exact, *_), (again, *_) = (pool2.run(evaluated_by_two, flag, "32-true", True) for flag in ("32-true", "bf16-true"))
    assert exact == again
    assert len({*pool2.run(evaluated_by_two, "bf16-true", "bf16-true", False)}) == 1


def save_after(path: str) -> None:
    lit, trainer = Lit(MOMENTUM), trainer_for("zero3", "bf16-true")
    trainer.predict(lit)
    with warnings.catch_warnings(record=True) as caught:
        trainer.save_checkpoint(path, weights_only=True)
    said = [w for w in caught if "will hold weights that were cast for evaluation ('bf16-true')" in str(w.message)]
    assert len(said) == trainer.is_global_zero
    trainer.strategy.release()  # type: ignore[attr-defined]
    assert {p.dtype for p in lit.parameters()} == {torch.float32}


def test_a_checkpoint_of_rounded_weights_says_so(pool2: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "rounded.ckpt"
    pool2.run(save_after, str(path))
    assert {value.dtype for value in torch.load(path)["state_dict"].values()} == {torch.bfloat16}
