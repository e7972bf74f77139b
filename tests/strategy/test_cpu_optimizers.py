"""Fits with the CPU optimizers: split masters and bf16 state, resumed, clipped and accumulated."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.resuming import Resumable, StatefulLoader, run
from helpers import models
from helpers.ranks import RankPool, ranks, slow_unless
from strategy.fits import (
    Fitted,
    Recipe,
    assert_same,
    assert_same_states,
    fit,
    full_batch_loss,
    halving,
    make_trainer,
    observe,
)
from torch.optim import Optimizer

from lightning_zero import CPUSGD, CPUAdagrad, CPUAdam, CPUAdamW, CPULion, DynamicLossScaler, ZeroPrecision

CLASSES: dict[str, Any] = {
    "adamw": CPUAdamW,
    "adam": CPUAdam,
    "adagrad": CPUAdagrad,
    "lion": CPULion,
    "sgd": CPUSGD,
    "torch": torch.optim.AdamW,
}
SMALL = {"master_layout": "split", "state_dtype": torch.bfloat16, "seed": 3}
RECIPE = Recipe(steps=3, micro=2, scheduled=True, options={"lr": 0.05, **SMALL})
OFFLOADED = ("zero2_offload", "zero3_offload")
CLIPPED = {"gradient_clip_val": 0.05}


class Lit(Resumable):
    """With a CPU optimizer."""

    optimizer = "adamw"

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer: Optimizer = CLASSES[self.optimizer](groups, **self.recipe.options)
        if not self.recipe.scheduled:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halving(optimizer), "interval": "step"}}


class Torchs(Lit):
    optimizer = "torch"


class Adam(Lit):
    optimizer = "adam"


class Adagrad(Lit):
    optimizer = "adagrad"


class Lion(Lit):
    optimizer = "lion"


class Sgd(Lit):
    optimizer = "sgd"


def flags_of(precision: str) -> dict[str, Any]:
    if precision != "fp16":
        return {"precision": precision}
    return {"plugins": [ZeroPrecision("16-mixed", scaler=DynamicLossScaler(init_scale=2.0**10))]}


def train(strategy: str, recipe: Recipe, module: type[Lit], precision: str, steps: int = 6, **options: Any) -> Fitted:
    """In a rank: plugins are made there."""
    return run(strategy, recipe, module, steps=steps, **flags_of(precision), **options)


def assert_same_fits(actual: list[Fitted], expected: list[Fitted]) -> None:
    assert_same(actual[0].weights, expected[0].weights)
    assert_same_states(actual[0].optimizer_states[0], expected[0].optimizer_states[0])
    assert [f.steps for f in actual] == [f.steps for f in expected]


@ranks(2)
@pytest.mark.parametrize(
    ("name", "precision"),
    [("zero3_offload", "fp16"), pytest.param("zero2_offload", "bf16-true", marks=pytest.mark.slow)],
)
def test_a_resumed_fit_has_the_same_bits(pool: RankPool, name: str, precision: str, tmp_path: Path) -> None:
    path = str(tmp_path / "middle.ckpt")
    whole = pool.run(train, name, RECIPE, Lit, precision, save=(4, path))
    resumed = pool.run(train, name, dataclasses.replace(RECIPE, seed=7), Lit, precision, resume=path)
    assert_same_fits(resumed, whole)
    assert whole[0].steps == 6
    for state in whole[0].optimizer_states[0].values():
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16


@ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize("module", [Adam, Adagrad, Lion, Sgd])
def test_a_resumed_fit_of_every_class_has_the_same_bits(pool: RankPool, module: type[Lit], tmp_path: Path) -> None:
    options = {"lr": 0.01, **SMALL} | ({"momentum": 0.9} if module is Sgd else {})
    recipe = dataclasses.replace(RECIPE, options=options)
    path = str(tmp_path / "middle.ckpt")
    whole = pool.run(train, "zero2_offload", recipe, module, "bf16-mixed", save=(4, path))
    resumed = pool.run(train, "zero2_offload", dataclasses.replace(recipe, seed=7), module, "bf16-mixed", resume=path)
    assert_same_fits(resumed, whole)


class Alike(Lit):
    """The same batches on all ranks."""

    def train_dataloader(self) -> StatefulLoader:
        return StatefulLoader(models.rank_batches(self.recipe.batches(1), 0))


def test_a_fit_in_blocks_has_the_bits_of_one_rank(pool1: RankPool, pool2: RankPool, tmp_path: Path) -> None:
    """8 bits an element; its checkpoint has fp32, from which one rank's fit resumes with the same bits."""
    options = {"lr": 0.05, "master_layout": "split", "state_dtype": "int8", "seed": 3}
    recipe = dataclasses.replace(RECIPE, model="wide", micro=1, steps=6, options=options)
    path = str(tmp_path / "middle.ckpt")
    several = pool2.run(train, "zero2_offload", recipe, Alike, "bf16-mixed", save=(4, path))
    single = pool1.run(train, "zero2_offload", recipe, Alike, "bf16-mixed")
    other = dataclasses.replace(recipe, seed=7)
    resumed = pool1.run(train, "zero2_offload", other, Alike, "bf16-mixed", resume=path)
    assert_same_fits(several[:1], single)
    assert_same_fits(resumed, single)
    for state in several[0].optimizer_states[0].values():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32


def fit_after(before: str, recipe: Recipe) -> Fitted:
    """In blocks, with a Trainer that has evaluated before, or trained with state in fp32."""
    lit, trainer = Alike(recipe), make_trainer("zero2_offload", limit_val_batches=1)
    if before == "validate":
        trainer.validate(lit, verbose=False)
    else:
        lit.optimizer, lit.recipe = "torch", dataclasses.replace(recipe, options={"lr": 0.05})
        trainer.fit(lit)
        lit.optimizer, lit.recipe = Alike.optimizer, recipe
        trainer.fit_loop.max_epochs = 2
    trainer.fit(lit)
    return observe(trainer, lit)


def test_what_ran_before_cuts_no_blocks(pool1: RankPool, pool2: RankPool) -> None:
    options = {"lr": 0.05, "state_dtype": "int8", "seed": 3}
    recipe = dataclasses.replace(RECIPE, model="wide", micro=1, steps=6, options=options)
    for before in ("validate", "fit"):
        assert_same_fits(pool2.run(fit_after, before, recipe)[:1], pool1.run(fit_after, before, recipe))


@ranks(2)
def test_a_fit_resumes_with_torchs_class(pool: RankPool, tmp_path: Path) -> None:
    """Which keeps its fp32 state."""
    recipe = dataclasses.replace(RECIPE, options={"lr": 0.05, "master_layout": "split"})
    path = str(tmp_path / "middle.ckpt")
    whole = pool.run(train, "zero2_offload", recipe, Lit, "bf16-mixed", save=(4, path))
    other = dataclasses.replace(recipe, options={"lr": 0.05}, seed=7)
    resumed = pool.run(train, "zero2_offload", other, Torchs, "bf16-mixed", resume=path)
    assert_same(resumed[0].weights, whole[0].weights)
    assert_same_states(resumed[0].optimizer_states[0], whole[0].optimizer_states[0])


@ranks(2)
def test_fp32_state_gives_the_bits_of_torchs_class(pool: RankPool) -> None:
    """Both run by the same kernels; two micro-batches a step."""
    recipe = dataclasses.replace(RECIPE, options={"lr": 0.05})
    split = dataclasses.replace(RECIPE, options={"lr": 0.05, "master_layout": "split"})
    expected, whole, parted, free = (
        pool.run(train, "zero3_offload", recipe, module, "bf16-mixed", 3, **flags)
        for recipe, module, flags in (
            (recipe, Torchs, CLIPPED),
            (recipe, Lit, CLIPPED),
            (split, Lit, CLIPPED),
            (split, Lit, {}),
        )
    )
    assert_same_fits(whole, expected)
    assert_same_fits(parted, expected)
    assert not torch.equal(free[0].weights["head.weight"], expected[0].weights["head.weight"])  # clipping counts


@ranks(2)
def test_stages_2_and_3_give_the_same_bits(pool: RankPool) -> None:
    first, second = (pool.run(train, name, RECIPE, Lit, "bf16-true", 3, **CLIPPED) for name in OFFLOADED)
    assert_same_fits(first, second)


@ranks(2)
@pytest.mark.parametrize(
    ("name", "precision"),
    [("zero2_offload", "bf16-true"), pytest.param("zero3_offload", "fp16", marks=pytest.mark.slow)],
)
def test_a_fit_learns(pool: RankPool, name: str, precision: str) -> None:
    """As torch's AdamW in fp32 does, with six bytes of master and state an element."""
    recipe = Recipe(steps=20, options={"lr": 0.02, **SMALL})
    batches = recipe.batches(2)
    trained = pool.run(train, name, recipe, Lit, precision, 20)[0]
    usual = pool.run(train, name, dataclasses.replace(recipe, options={"lr": 0.02}), Torchs, "32-true", 20)[0]
    before = full_batch_loss(recipe.make_model().state_dict(), recipe, batches)
    loss, expected = (full_batch_loss(fitted.weights, recipe, batches) for fitted in (trained, usual))
    assert loss < before - 0.5 * (before - expected)
    assert loss == pytest.approx(expected, rel=0.05)


@ranks(2)
@pytest.mark.parametrize("name", slow_unless(["zero1"], ["zero1", "zero3"]))
def test_without_offloading_the_cpu_is_the_device(pool: RankPool, name: str) -> None:
    trained, expected = (pool.run(train, each, RECIPE, Lit, "bf16-mixed", 3) for each in (name, "zero2_offload"))
    if name == "zero3":
        assert_same_fits(trained, expected)
    else:  # Micro-batches are summed before they are reduced; by Adam's step a sign that rounding decides counts whole.
        start = RECIPE.make_model().state_dict()
        apart = torch.cat([(trained[0].weights[n] - w).flatten() for n, w in expected[0].weights.items()])
        moved = torch.cat([(w - start[n]).flatten() for n, w in expected[0].weights.items()])
        assert apart.norm() < 0.1 * moved.norm()


@ranks(2)
def test_overflows_are_skipped(pool: RankPool) -> None:
    """Steps that the loss scale makes infinite change neither masters nor state."""
    results = pool.run(skipping)
    for skipped, fitted in results:
        assert 0 < skipped < 6
        assert all(w.isfinite().all() for w in fitted.weights.values())
    state = results[0][1].optimizer_states[0]
    assert {float(s["step"]) for s in state.values()} == {float(6 - results[0][0])}


def skipping() -> tuple[int, Fitted]:
    precision = ZeroPrecision("16-mixed", scaler=DynamicLossScaler(init_scale=2.0**19))
    recipe = dataclasses.replace(RECIPE, micro=1, steps=6)
    lit = Lit(recipe)
    trainer = make_trainer("zero2_offload", plugins=[precision])
    trainer.fit(lit)
    return precision.skipped_steps, observe(trainer, lit)


@ranks(2)
def test_a_float64_model_is_a_clear_error(pool: RankPool) -> None:
    with pytest.raises(Exception, match=r"CPUAdamW cannot update these shards: kernels need fp32 masters"):
        pool.run(fit, "zero2_offload", RECIPE, Lit, precision="64-true")
