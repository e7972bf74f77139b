"""The loss scale and the count of skipped steps go on where a checkpoint was saved; a new run's configuration wins."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint.resuming import Resumable, SaveAfter
from helpers.ranks import RankPool, ranks
from lightning.pytorch.plugins import MixedPrecision
from strategy.fits import (
    Fitted,
    Recipe,
    assert_same,
    assert_same_states,
    main_names,
    make_trainer,
    observe,
)
from torch import Tensor

from lightning_zero import DynamicLossScaler, StaticLossScaler, ZeroPrecision
from lightning_zero.update import LossScaler

START = 2.0**10
RULES: dict[str, Any] = {"init_scale": START, "window": 3, "hysteresis": 2}
OVERFLOWS = (1, 2, 3, 8)  # numbers of the steps
STEPS = 10
# The second and third overflow lower the scale; three clean steps raise it and refill; the last one is free.
TRACE = [2.0**10, 2.0**10, 2.0**9, 2.0**8, 2.0**8, 2.0**8, 2.0**9, 2.0**9, 2.0**9, 2.0**9]
SAVED = 3  # steps: the scale has fallen once and is about to fall again
RECIPE = Recipe(steps=4, scheduled=True, options={"lr": 0.05})
OTHER = dataclasses.replace(RECIPE, seed=7)


class Planted(Resumable):
    """Overflows on the last rank in some steps; notes the scale and the skipped steps after every step."""

    overflows: tuple[int, ...] = OVERFLOWS

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if self.trainer.global_step in self.overflows and dist.get_rank() == dist.get_world_size() - 1:
            loss = loss + (self.model.norm.weight * math.inf).sum()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        strategy = self.trainer.strategy
        if isinstance(self.trainer.precision_plugin, ZeroPrecision):
            self.notes.append((strategy.loss_scale, strategy.skipped_steps))
        else:
            self.notes.append(self.trainer.precision_plugin.scaler.get_scale())


class Clean(Planted):
    overflows = ()


def fp16(scaler: LossScaler | None = None, **changed: Any) -> ZeroPrecision:
    return ZeroPrecision("16-mixed", scaler=scaler or DynamicLossScaler(**(RULES | changed)))


def stock(growth_interval: int = 2000) -> MixedPrecision:
    """Lightning's own, with torch's scaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11, growth_interval=growth_interval)
    return MixedPrecision("16-mixed", "cpu", scaler)


def run(
    strategy: str,
    recipe: Recipe,
    precision: ZeroPrecision | Callable[[], Any],
    module: type[Planted] = Planted,
    *,
    steps: int = STEPS,
    save: tuple[int, str] | None = None,
    resume: str | None = None,
) -> Fitted:
    """Train to `steps` steps in all."""
    plugin = precision if isinstance(precision, ZeroPrecision) else precision()
    callbacks = [SaveAfter(*save)] if save else []
    trainer = make_trainer(strategy, plugins=[plugin], callbacks=callbacks, max_epochs=-1, max_steps=steps)
    lit = module(recipe)
    trainer.fit(lit, ckpt_path=resume)
    return observe(trainer, lit)


def scales(fitted: Fitted) -> list[float]:
    return [scale for scale, _ in fitted.notes]


def plain_state(path: str) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, weights_only=True)["ZeroPrecision"]
    return state


@ranks(2)
@main_names
def test_a_run_saved_while_its_scale_falls_goes_on_as_if_never_stopped(
    pool: RankPool, name: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "a.ckpt")
    whole = pool.run(run, name, RECIPE, fp16(), save=(SAVED, path))
    state = plain_state(path)
    assert state == {"skipped_steps": 2, "scaler": {"scale": 2.0**9, "clean_steps": 0, "overflows": 2}}
    assert {type(value) for value in (state["skipped_steps"], *state["scaler"].values())} == {int, float}
    resumed = pool.run(run, name, OTHER, fp16(), resume=path)
    for one in whole:
        assert scales(one) == TRACE
    skipped = [sum(step <= n for step in OVERFLOWS) for n in range(STEPS)]
    for one in resumed:
        assert one.notes == list(zip(TRACE, skipped, strict=True))[SAVED:]
        assert one.steps == STEPS
    assert_same(resumed[0].weights, whole[0].weights)
    assert_same_states(resumed[0].optimizer_states[0], whole[0].optimizer_states[0])


@ranks(2)
def test_a_changed_configuration_wins_and_the_running_scale_goes_on(pool: RankPool, tmp_path: Path) -> None:
    """What each change comes to is in the tests of the scaler; the scale that a run begins with is the saved one."""
    path, name = str(tmp_path / "a.ckpt"), "zero2_offload"
    pool.run(run, name, RECIPE, fp16(), save=(SAVED, path), steps=SAVED)
    changed = fp16(window=2, init_scale=4.0)
    resumed = pool.run(run, name, OTHER, changed, Clean, resume=path, steps=SAVED + 3)
    assert scales(resumed[0]) == [2.0**9, 2.0**10, 2.0**10]


@ranks(1)
def test_static_and_dynamic_scalers_take_turns(pool: RankPool, tmp_path: Path) -> None:
    name = "zero2_offload"
    dynamic, static = str(tmp_path / "dynamic.ckpt"), str(tmp_path / "static.ckpt")
    pool.run(run, name, RECIPE, fp16(), save=(SAVED, dynamic), steps=SAVED)
    plugin = fp16(StaticLossScaler(64.0))
    (one,) = pool.run(run, name, OTHER, plugin, resume=dynamic, save=(6, static), steps=6)
    assert one.notes == [(64.0, 3), (64.0, 3), (64.0, 3)]  # the third overflow changes nothing
    assert plain_state(static) == {"skipped_steps": 3, "scaler": {}}
    # What was not saved starts as configured.
    (two,) = pool.run(run, name, OTHER, fp16(), resume=static, steps=10)
    assert two.notes == [(START, 3), (START, 3), (START, 4), (START, 4)]


@ranks(1)
@pytest.mark.parametrize(("first", "second"), [("32-true", "16-mixed"), ("16-mixed", "bf16-mixed")])
def test_precisions_with_and_without_a_scaler_take_turns(
    pool: RankPool, first: str, second: str, tmp_path: Path
) -> None:
    """Skipped steps are counted whatever the precision."""
    path = str(tmp_path / "a.ckpt")
    plugins = {
        name: ZeroPrecision(name, scaler=DynamicLossScaler(**RULES) if name == "16-mixed" else None)
        for name in (first, second)
    }
    pool.run(run, "zero2", RECIPE, plugins[first], save=(SAVED, path), steps=SAVED)
    (resumed,) = pool.run(run, "zero2", OTHER, plugins[second], resume=path, steps=SAVED + 2)
    scale = START if second == "16-mixed" else 1.0
    assert resumed.notes == [(scale, 3), (scale, 3)]


# ------------------------------------------------------------------------------------------------- Lightning's own AMP


@ranks(1)
def test_the_scale_of_lightnings_own_mixed_precision_goes_on(pool: RankPool, tmp_path: Path) -> None:
    name = "zero3"
    path = str(tmp_path / "ddp.ckpt")
    (theirs,) = pool.run(run, "ddp", RECIPE, stock, save=(6, path), steps=6)
    assert theirs.notes == [2.0**11, 2.0**10, 2.0**9, 2.0**8, 2.0**8, 2.0**8]  # torch has no hysteresis
    # Two steps without overflow have passed: the third of our window comes at once.
    (ours,) = pool.run(run, name, OTHER, fp16(), Clean, resume=path, steps=8)
    assert ours.notes == [(2.0**9, 0), (2.0**9, 0)]
    (at_once,) = pool.run(run, name, OTHER, fp16(), Clean, resume=path, steps=6)
    assert_same(at_once.weights, theirs.weights)


@ranks(1)
def test_ddp_goes_on_from_ours(pool: RankPool, tmp_path: Path) -> None:
    name = "zero2_offload"
    path = str(tmp_path / "zero.ckpt")
    (ours,) = pool.run(run, name, RECIPE, fp16(), save=(SAVED, path), steps=SAVED)
    (at_once,) = pool.run(run, "ddp", OTHER, stock, Clean, resume=path, steps=SAVED)
    assert_same(at_once.weights, ours.weights)
    (theirs,) = pool.run(run, "ddp", OTHER, stock, Clean, resume=path, steps=SAVED + 2)
    assert theirs.steps == SAVED + 2
    assert all(bool(value.isfinite().all()) for value in theirs.weights.values())
    assert theirs.notes == [2.0**11, 2.0**11]  # its scaler knows nothing of ours


# ---------------------------------------------------------------------------------------------------------- second fit


def fit_twice(name: str) -> list[Any]:
    """Two fits of one Trainer, with a plain module in between."""
    trainer = make_trainer(name, plugins=[fp16()], max_epochs=-1, max_steps=4)
    lit = Planted(RECIPE)
    trainer.fit(lit)
    trainer.strategy.release()
    trainer.fit_loop.epoch_loop.max_steps = STEPS
    trainer.fit(lit)
    return lit.notes


@ranks(1)
def test_scale_and_count_go_on_in_a_second_fit(pool: RankPool) -> None:
    (notes,) = pool.run(fit_twice, "zero3")
    assert [scale for scale, _ in notes] == TRACE
    assert [skipped for _, skipped in notes] == [sum(step <= n for step in OVERFLOWS) for n in range(STEPS)]
