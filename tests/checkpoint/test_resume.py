"""Saving and resuming changes nothing, at one stage and across stages, world sizes, precisions and strategies."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.resuming import Global, Resumable, run, save_at_end
from helpers import models
from helpers.ranks import RankError, RankPool, ranks
from helpers.reference import train_reference
from lightning import Callback
from strategy.fits import (
    Fitted,
    Lit,
    Recipe,
    StrategyArgument,
    assert_same,
    assert_same_states,
    halving,
    main_names,
    make_trainer,
    observe,
)
from torch import Tensor, nn

# Three steps an epoch, an accumulation tail in some, another initialization for the run that resumes.
RECIPE = Recipe(steps=3, micro=2, scheduled=True, options={"lr": 0.05})


def assert_same_runs(resumed: list[Fitted], whole: list[Fitted]) -> None:
    assert_same(resumed[0].weights, whole[0].weights)
    assert_same_states(resumed[0].optimizer_states[0], whole[0].optimizer_states[0])
    assert [r.steps for r in resumed] == [w.steps for w in whole]
    assert [r.epochs for r in resumed] == [w.epochs for w in whole]


def check_resume(
    pool: RankPool, folder: Path, strategy: StrategyArgument, recipe: Recipe, saved: int, **flags: Any
) -> None:
    """A run that saves, and one that goes on from there with other initial weights, end the same."""
    path = str(folder / "middle.ckpt")
    whole = pool.run(run, strategy, recipe, steps=6, save=(saved, path), **flags)
    other = dataclasses.replace(recipe, seed=7)
    resumed = pool.run(run, strategy, other, steps=6, resume=path, **flags)
    assert_same_runs(resumed, whole)
    assert whole[0].steps == 6


def both_ranks_by_turns(step: int, micro: int, rank: int) -> bool:
    return (step + micro) % 3 == 0


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("pool", "name", "precision", "model", "optimizer", "saved"),
    [
        (2, "zero3", "64-true", "frozen", "adagrad", 2),
        (2, "zero2_offload", "bf16-mixed", "optional", "adamw", 2),
        (2, "zero1", "bf16-true", "mlp", "momentum", 3),  # at the end of an epoch
        pytest.param(1, "zero3_offload", "32-true", "optional", "nadam", 3, marks=SLOW),
        pytest.param(4, "zero2", "bf16-mixed", "transformer", "rmsprop", 2, marks=SLOW),
        pytest.param(4, "zero0", "32-true", "frozen", "amsgrad", 3, marks=SLOW),
        pytest.param(4, "zero1_offload", "64-true", "transformer", "adamw", 2, marks=SLOW),
    ],
    indirect=["pool"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    pool: RankPool, name: str, precision: str, model: str, optimizer: str, saved: int, tmp_path: Path
) -> None:
    recipe = dataclasses.replace(RECIPE, model=model, optimizer=optimizer, options={}, flagged=both_ranks_by_turns)
    check_resume(pool, tmp_path, name, recipe, saved, precision=precision, gradient_clip_val=0.5)


class Checkpointed(Callback):
    """What a stateful callback gets back."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.steps = state_dict["steps"]


def resume_with_callback(name: str, path: str) -> tuple[int, list[float]]:
    """Batches counted over both runs, and the rates of the last."""
    counter = Checkpointed()
    for steps, resume in ((2, None), (5, path)):
        trainer = make_trainer(name, max_epochs=-1, max_steps=steps, callbacks=[counter])
        lit = Resumable(Recipe(steps=3, scheduled=True, options={"lr": 1.0}))
        trainer.fit(lit, ckpt_path=resume)
        if resume is None:
            trainer.save_checkpoint(path)
            counter.steps = 100
    return counter.steps, [group["lr"] for group in trainer.optimizers[0].param_groups]


@ranks(2)
def test_schedulers_and_callbacks_go_on(pool: RankPool, tmp_path: Path) -> None:
    for result in pool.run(resume_with_callback, "zero3", str(tmp_path / "a.ckpt")):
        assert result == (5, [1 / 32, 1 / 32])


def resume_twice_in_one_process(name: str, path: str, recipe: Recipe) -> Fitted:
    """The Trainer that saved goes back to what it saved, and on from there."""
    trainer = make_trainer(name, max_epochs=-1, max_steps=2)
    lit = Resumable(recipe)
    trainer.fit(lit)
    trainer.save_checkpoint(path)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(lit)
    trainer.fit(lit, ckpt_path=path)
    return observe(trainer, lit)


@ranks(2)
def test_a_trainer_may_go_back_to_its_own_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    name = "zero3"
    recipe = dataclasses.replace(RECIPE, micro=1)
    whole = pool.run(run, name, recipe, steps=4)
    back = pool.run(resume_twice_in_one_process, name, str(tmp_path / "a.ckpt"), recipe)
    assert_same(back[0].weights, whole[0].weights)


class Mapped(Resumable):
    """Notes, once everything is restored and before the first step, what files are mapped."""

    def train_dataloader(self) -> Any:
        self.notes += [line for line in Path("/proc/self/maps").read_text().splitlines() if ".ckpt" in line]
        return super().train_dataloader()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@ranks(2)
@main_names
def test_a_file_is_let_go_when_all_is_restored(pool: RankPool, name: str, tmp_path: Path) -> None:
    """Mapped, it would keep its place on the disk when it is deleted, and whoever lets go of it would wait for that."""
    path = str(tmp_path / "a.ckpt")
    recipe = dataclasses.replace(RECIPE, options={"lr": torch.tensor(0.05)})
    pool.run(run, name, recipe, steps=2, save=(2, path))
    for resumed in pool.run(run, name, recipe, Mapped, steps=3, resume=path):
        assert resumed.notes == []


# --------------------------------------------------------------- ddp and other precisions; our names: test_matrix.py

DOUBLE = Recipe(steps=3, dtype=torch.float64, scheduled=True, optimizer="adamw", options={"lr": 0.05})


def global_reference(steps: int) -> dict[str, Tensor]:
    """One process on the global batches; the learning rate goes on where it was."""
    batches = [[[torch.cat(step[0])]] for step in DOUBLE.batches(4)]
    return train_reference(
        DOUBLE.make_model(),
        DOUBLE.make_optimizer,
        [batches[n % len(batches)] for n in range(steps)],
        models.next_token_loss,
        reduce_each=False,
        make_scheduler=halving,
    ).weights


@pytest.mark.parametrize(
    ("first", "world", "second", "other_world"),
    [
        ("ddp", 1, "zero3_offload", 2),
        ("zero3", 2, "ddp", 1),
        pytest.param("ddp", 2, "zero1", 4, marks=SLOW),
    ],
)
def test_ddp_and_ours_resume_from_each_other_on_other_ranks(
    rank_pools: Any, first: str, world: int, second: str, other_world: int, tmp_path: Path
) -> None:
    """Two of three steps of an epoch under the one, the rest and another epoch under the other."""
    path = str(tmp_path / "a.ckpt")
    rank_pools(world).run(run, first, DOUBLE, Global, steps=2, save=(2, path))
    other = dataclasses.replace(DOUBLE, seed=7)
    resumed = rank_pools(other_world).run(run, second, other, Global, steps=6, resume=path)
    torch.testing.assert_close(resumed[0].weights, global_reference(6), rtol=1e-9, atol=1e-12)
    assert all(int(state["step"]) == 6 for state in resumed[0].optimizer_states[0].values()) or second == "ddp"


@ranks(1)
@main_names
def test_ddp_resumes_bit_for_bit_from_ours_and_ours_from_its(pool: RankPool, name: str, tmp_path: Path) -> None:
    """On one rank nothing is summed: weights, Adam's state, the learning rate and the loader's place must all be right.

    The native kernel may round otherwise, hence torch's own.
    """
    ours = {"stage": int(name[4]), "native_optimizer": "off"}
    ours |= {"offload_optimizer": "cpu"} if "offload" in name else {}
    theirs_path, ours_path = str(tmp_path / "ddp.ckpt"), str(tmp_path / "zero.ckpt")
    whole = pool.run(run, "ddp", RECIPE, steps=6, save=(2, theirs_path))[0].weights
    other = dataclasses.replace(RECIPE, seed=7)
    assert_same(pool.run(run, ours, other, steps=6, resume=theirs_path, save=(4, ours_path))[0].weights, whole)
    assert_same(pool.run(run, "ddp", other, steps=6, resume=ours_path)[0].weights, whole)


@ranks(2)
@pytest.mark.parametrize(
    ("name", "first", "second", "dtype"),
    [
        ("zero3_offload", "bf16-mixed", "32-true", torch.float32),
        ("zero3", "bf16-true", "bf16-true", torch.bfloat16),
        pytest.param("zero2", "bf16-true", "bf16-true", torch.bfloat16, marks=SLOW),
        pytest.param("zero2", "32-true", "bf16-true", torch.float32, marks=SLOW),
    ],
)
def test_another_precision_starts_from_full_weights(
    pool: RankPool, name: str, first: str, second: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Resumed at once and stopped, a run holds the very values that were saved, also where the module has 16 bits."""
    path = str(tmp_path / "a.ckpt")
    recipe = dataclasses.replace(RECIPE, dtype=dtype)
    saved = pool.run(save_at_end, name, recipe, path, precision=first)
    steps = saved[0].steps
    loaded = pool.run(run, name, dataclasses.replace(recipe, seed=7), steps=steps, resume=path, precision=second)
    assert_same(loaded[0].weights, saved[0].weights)
    assert_same_states(loaded[0].optimizer_states[0], saved[0].optimizer_states[0])


# ------------------------------------------------------------------------------------------------------------- errors


class Larger(Resumable):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.extra = nn.Linear(2, 3)


class Wider(Resumable):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model.norm = nn.LayerNorm(models.WIDTH, bias=False)


class Reshaped(Resumable):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model.positions = nn.Embedding(models.LENGTH + 2, models.WIDTH)


@ranks(2)
@main_names
def test_a_module_that_does_not_fit_names_the_keys(pool: RankPool, name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    pool.run(save_at_end, name, RECIPE, path)
    misfits: dict[type[Lit], list[str]] = {
        Larger: ['Missing key(s) in state_dict: "extra.weight", "extra.bias"'],
        Wider: ["model.norm.bias"],
        Reshaped: ["model.positions.weight", "5, 6", "7, 6"],
    }
    for module, parts in misfits.items():
        with pytest.raises(RankError, match="RuntimeError") as caught:
            pool.run_within(10, run, name, RECIPE, module, steps=6, resume=path)
        assert all(part in str(caught.value) for part in parts), module
        assert len(caught.value.failures) == 2, module


class Relaxed(Larger):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.strict_loading = False

    def configure_optimizers(self) -> Any:
        return self.recipe.make_optimizer(self.model)


@ranks(2)
def test_loading_need_not_be_strict(pool: RankPool, tmp_path: Path) -> None:
    name = "zero3"
    path, recipe = str(tmp_path / "a.ckpt"), dataclasses.replace(RECIPE, scheduled=False)
    saved = pool.run(save_at_end, name, recipe, path)[0].weights
    loaded = pool.run(run, name, recipe, Relaxed, steps=3, resume=path)[0].weights
    assert {"extra.weight", "extra.bias"} == loaded.keys() - saved.keys()
    assert_same({key: loaded[key] for key in saved}, saved)
