"""`EMA` under the strategy: Lightning's average, from shards."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoint.resuming import Global, Resumable, SaveAfter
from helpers import models
from helpers.ranks import RankPool, ranks
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateFinder
from lightning.pytorch.plugins.io import TorchCheckpointIO
from strategy.fits import (
    DDP,
    MOMENTUM,
    Fitted,
    Lit,
    Recipe,
    StrategyArgument,
    assert_close,
    assert_same,
    fit,
    make_trainer,
    observe,
    state_of,
)
from torch import Tensor, nn
from torch.optim import SGD

from lightning_zero.callbacks import EMA
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.tools.contents import read_checkpoint

Weights = dict[str, Tensor]
# Where the average is kept is a matter of the engine's own tests; the first test and the checkpoints' go round.
names = pytest.mark.parametrize("name", ["zero3"])
EACH_STEP = {"limit_val_batches": 1, "val_check_interval": 1}  # validation after every one


def make_average(strategy: StrategyArgument, **options: Any) -> EMAWeightAveraging:
    """Lightning's own callback without our strategy."""
    return (EMAWeightAveraging if strategy == DDP else EMA)(decay=0.75, **options)


def fit_averaged(
    strategy: StrategyArgument, recipe: Recipe, module: Callable[[Recipe], Lit], options: dict[str, Any], **flags: Any
) -> Fitted:
    return fit(strategy, recipe, module, callbacks=[make_average(strategy, **options)], **flags)


# ------------------------------------------------------------------------------------------------------------- values


class Various(Lit):
    """With frozen and tied parameters, one that no optimizer has, and a BatchNorm; notes its losses in validation."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.norm = nn.BatchNorm1d(models.VOCAB)
        self.spare = nn.Parameter(torch.linspace(0.9, 1.1, models.VOCAB))

    def loss(self, batch: Tensor) -> Tensor:
        logits = self.norm(self.model(batch[:, :-1]).flatten(0, 1)) * self.spare
        return nn.functional.cross_entropy(logits, batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.notes.append(self.loss(batch).item())


class Read(Various):
    """Notes what a hook before validation reads, too; at stage 3 that is an error."""

    def on_validation_epoch_start(self) -> None:
        self.notes.append([parameter.sum().item() for parameter in self.parameters()])


SELDOM = {"update_every_n_steps": 2, "update_starting_at_step": 1}
NO_BUFFERS = {"use_buffers": False, "device": "cpu"}


@ranks(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("zero1", {}),
        pytest.param("zero3", {}, marks=pytest.mark.slow),
        pytest.param("zero2_offload", NO_BUFFERS, marks=pytest.mark.slow),
        pytest.param("zero3_offload", SELDOM, marks=pytest.mark.slow),
    ],
)
def test_it_is_lightnings_average(pool: RankPool, name: str, options: dict[str, Any]) -> None:
    """Bit for bit, the buffers of rank 0 too, before training and after every step from the first update on."""
    recipe = Recipe(model="frozen", optimizer="momentum", steps=5)
    flags = {**EACH_STEP, "num_sanity_val_steps": 1}
    module, last = (Various, 3) if name.startswith("zero3") else (Read, 6)  # of three steps, and all have an average
    expected = pool.run(fit_averaged, DDP, recipe, module, options, **flags)[0]
    actual = pool.run(fit_averaged, name, recipe, module, options, **flags)
    assert_same(floating(actual[0].weights), floating(expected.weights))
    assert actual[0].notes[-last:] == expected.notes[-last:]
    assert len({*map(str, expected.notes)}) >= last
    assert expected.weights["norm.running_mean"].any()


def floating(weights: Weights) -> Weights:
    return {key: value for key, value in weights.items() if value.is_floating_point()}


class Counts(Lit):
    """With indices of positions, a count of steps, and a buffer that the first forward makes."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.register_buffer("positions", torch.arange(512))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("cache", None, persistent=False)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.count += 1
        self.cache = torch.ones(2) if self.cache is None else torch.cat([self.cache, torch.ones(1)])
        return super().training_step(batch, index)


def fit_often(name: str) -> Weights:
    average = EMA(decay=0.9)  # 0.9 of an integer and 0.1 of it are less, rounded down
    return fit(name, MOMENTUM, Counts, callbacks=[average], **EACH_STEP).weights


@ranks(2)
@names
def test_indices_and_counts_are_copied(pool: RankPool, name: str) -> None:
    weights = pool.run(fit_often, name)[0]
    assert torch.equal(weights["positions"], torch.arange(512))
    assert weights["count"] == MOMENTUM.steps


def fit_without_update(name: str) -> tuple[Fitted, Fitted, list[str]]:
    """A fit that ends before the average begins, one without, and what the first one warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        early = fit_averaged(name, MOMENTUM, Various, {"update_starting_at_step": 100}, **EACH_STEP)
    return early, fit(name, MOMENTUM, Various, **EACH_STEP), [str(warning.message) for warning in caught]


@ranks(2)
@names
def test_without_an_update_the_weights_stay(pool: RankPool, name: str) -> None:
    early, without, said = pool.run(fit_without_update, name)[0]
    assert_same(early.weights, without.weights)
    assert early.notes == without.notes
    assert any("was never updated (update_every_n_steps=1, update_starting_at_step=100)" in text for text in said)


class Recorder(Callback):
    """Keeps the full-precision weights after every optimizer step."""

    def __init__(self) -> None:
        self.weights: list[Weights] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step > len(self.weights):
            self.weights.append(state_of(trainer))


def fit_and_record(strategy: StrategyArgument, recipe: Recipe, module: type[Lit] = Lit, **flags: Any) -> list[Weights]:
    recorder = Recorder()
    fit(strategy, recipe, module, callbacks=[recorder], **flags)
    return recorder.weights


@ranks(2)
def test_steps_of_several_batches(pool: RankPool) -> None:
    recipe = Recipe(optimizer="momentum", steps=5, micro=2)
    result = pool.run(fit_averaged, "zero3", recipe, Lit, SELDOM, precision="bf16-true")[0]
    recorded = pool.run(fit_and_record, "zero3", recipe, precision="bf16-true")[0]
    mean = {key: 0.75 * value + 0.25 * recorded[4][key] for key, value in recorded[2].items()}
    assert_same(result.weights, mean)


class Overflows(Lit):
    """In the third batch, on one rank."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = models.next_token_loss(self.model, batch)
        return loss * math.inf if index == 2 and self.global_rank == 1 else loss


@ranks(2)
@names
def test_a_skipped_step_leaves_it_alone(pool: RankPool, name: str) -> None:
    average = pool.run(fit_averaged, name, MOMENTUM, Overflows, {})[0].weights
    first, second, third, fourth = pool.run(fit_and_record, name, MOMENTUM, Overflows)[0]
    assert_same(third, second)
    mean = {key: 0.75 * value + 0.25 * second[key] for key, value in first.items()}
    assert_same(average, {key: 0.75 * value + 0.25 * fourth[key] for key, value in mean.items()})


class TwoOptimizers(Lit):
    """The matrices and the vectors, each with an optimizer."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(models.next_token_loss(self.model, batch))
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [SGD([p for p in self.parameters() if (p.dim() >= 2) is wide], lr=0.1) for wide in (True, False)]


@ranks(2)
@names
def test_several_optimizers(pool: RankPool, name: str) -> None:
    results = [pool.run(fit_averaged, each, MOMENTUM, TwoOptimizers, {}, **EACH_STEP)[0] for each in (DDP, name)]
    assert_same(results[1].weights, results[0].weights)


@ranks(2)
def test_steps_that_come_two_at_a_time(pool: RankPool) -> None:
    """Each batch has a multiple of two among its steps."""
    runs = [pool.run(fit_averaged, "zero3", MOMENTUM, TwoOptimizers, {"update_every_n_steps": n})[0] for n in (1, 2)]
    assert_same(runs[1].weights, runs[0].weights)


def fit_elsewhere() -> tuple[Weights, Weights, Weights]:
    """Ours under another strategy: updated every two steps; never; and a fit without it."""
    seldom, never = EMA(decay=0.75, update_every_n_steps=2), EMA(update_starting_at_step=100)
    fits = (fit(DDP, MOMENTUM, TwoOptimizers, callbacks=some) for some in ([seldom], [never], []))
    first, second, third = (fitted.weights for fitted in fits)
    return first, second, third


@ranks(2)
@pytest.mark.filterwarnings("ignore:.*was never updated")
def test_under_another_strategy_it_is_lightnings(pool: RankPool) -> None:
    """But that several optimizers step several at a time, and that weights stay where it was never updated."""
    seldom, never, without = pool.run(fit_elsewhere)[0]
    assert_same(seldom, pool.run(fit_averaged, DDP, MOMENTUM, TwoOptimizers, {})[0].weights)
    assert_same(never, without)


def fit_with_a_used_average(name: str) -> Weights:
    average = make_average(name)
    for _ in range(2):
        fitted = fit(name, MOMENTUM, callbacks=[average])
    return fitted.weights


@ranks(2)
@names
def test_another_trainer_begins_anew(pool: RankPool, name: str) -> None:
    assert_same(pool.run(fit_with_a_used_average, name)[0], pool.run(fit_averaged, name, MOMENTUM, Lit, {})[0].weights)


class Configured(Lit):
    """Makes its model when a strategy can shard it."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        del self.model

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = self.recipe.make_model()


@ranks(2)
def test_a_module_initialized_in_shards(pool: RankPool) -> None:
    results = [pool.run(fit_averaged, "zero3", MOMENTUM, module, {}, **EACH_STEP)[0] for module in (Lit, Configured)]
    assert_same(results[1].weights, results[0].weights)


def fit_with_finder(strategy: StrategyArgument, found: bool) -> Weights:
    """The finder trains, with all callbacks, before their `on_fit_start`, and restores what it has saved."""
    finder = [LearningRateFinder(num_training_steps=3, update_attr=False)] if found else []
    lit = Lit(MOMENTUM)
    lit.lr = 0.1
    trainer = make_trainer(strategy, callbacks=[*finder, make_average(strategy)], **EACH_STEP)
    trainer.fit(lit)
    return state_of(trainer)


@ranks(2)
@names
def test_a_fit_inside_a_fit(pool: RankPool, name: str) -> None:
    results = [pool.run(fit_with_finder, name, found)[0] for found in (True, False)]
    assert_same(*results)


# -------------------------------------------------------------------------------------------------------- checkpoints

# Epochs of three steps of two micro-batches.
GLOBAL = Recipe(optimizer="momentum", steps=3, dtype=torch.float64)
SAVED, STEPS = 2, 5


class Twice(Global):
    """Each batch is two micro-batches: one of them follows the save without a step of its own."""

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        loader.batches = [half for batch in loader.batches for half in batch.chunk(2)]
        return loader


class Place(NamedTuple):
    """Where a run is, and in which container it saves."""

    name: str
    ranks: int
    container: str = "full"

    def __str__(self) -> str:
        return f"{self.name}-{self.ranks}-{self.container}"

    @property
    def strategy(self) -> StrategyArgument:
        return DDP if self.name == "ddp" else {**STRATEGIES[self.name], "checkpoint_format": self.container}


class Run(NamedTuple):
    """What rank 0 has at the end."""

    weights: Weights
    updates: int


class TwiceWithASkip(Twice):
    """The step after which the run saves is skipped."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = models.next_token_loss(self.model, batch)
        return loss * math.inf if self.trainer.global_step == SAVED - 1 else loss


def run(
    strategy: StrategyArgument, module: type[Twice] = Twice, *, save: str | None = None, resume: str | None = None
) -> Run:
    """Train to the last step, and save on the way, or resume with a module whose weights are others."""
    average = make_average(strategy)
    callbacks = [average, *([SaveAfter(SAVED, save)] if save else [])]
    trainer = make_trainer(strategy, callbacks=callbacks, max_epochs=-1, max_steps=STEPS, accumulate_grad_batches=2)
    lit = module(GLOBAL if resume is None else Recipe(**{**vars(GLOBAL), "seed": 7}))
    trainer.fit(lit, ckpt_path=resume)
    return Run(observe(trainer, lit).weights, int(average._average_model.n_averaged))


CROSSINGS = [
    (Place("zero3", 2, "sharded"), Place("zero2_offload", 1)),
    (Place("ddp", 2), Place("zero3", 2)),
    (Place("zero3", 2), Place("ddp", 1)),
    (Place("zero1", 4, "sharded"), Place("zero3_offload", 2)),
    (Place("zero3_offload", 1), Place("zero1", 4)),
    (Place("zero0", 2), Place("zero3", 2)),
]


@pytest.mark.parametrize(
    ("writer", "reader"),
    [pytest.param(w, r, id=f"{w}->{r}", marks=[] if n < 2 else pytest.mark.slow) for n, (w, r) in enumerate(CROSSINGS)],
)
def test_a_checkpoint_resumes_elsewhere(
    rank_pools: Callable[[int], RankPool], writer: Place, reader: Place, tmp_path: Path
) -> None:
    path = str(tmp_path / "a.ckpt")
    whole = rank_pools(writer.ranks).run(run, writer.strategy, save=path)[0]
    resumed = rank_pools(reader.ranks).run(run, reader.strategy, resume=path)[0]
    assert_close(resumed.weights, whole.weights)
    assert resumed.updates == whole.updates == STEPS


@ranks(2)
@names
def test_a_run_that_resumes_after_a_skipped_step_updates_after_its_first_own(
    pool: RankPool, name: str, tmp_path: Path
) -> None:
    """Not after the first micro-batch, with weights that the skipped step has not changed."""
    path = str(tmp_path / "a.ckpt")
    whole = pool.run(run, name, TwiceWithASkip, save=path)[0]
    resumed = pool.run(run, name, TwiceWithASkip, resume=path)[0]
    assert resumed.updates == whole.updates == STEPS - 1
    assert_same(resumed.weights, whole.weights)


class OwnIO(TorchCheckpointIO):
    """Rank 0 gathers what it writes."""


class SavesEverywhere(Callback):
    """Saves after the second step, in the validation that follows, and after it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def save(self, trainer: Trainer, name: str) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(f"{self.folder}/{name}")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.save(trainer, "before")

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.save(trainer, "within")

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.save(trainer, "after")


def fit_and_save(strategy: StrategyArgument, folder: str) -> list[Weights]:
    callbacks = [make_average(strategy), SavesEverywhere(folder)]
    recorder = Recorder()
    fit(strategy, MOMENTUM, callbacks=[*callbacks, recorder], precision="bf16-mixed", **EACH_STEP)
    return recorder.weights


@ranks(2)
@pytest.mark.parametrize(
    "strategy",
    [
        {"stage": 3, "checkpoint_format": "sharded"},
        pytest.param({"stage": 2, "offload_optimizer": "cpu", "async_save": True}, marks=pytest.mark.slow),
        pytest.param({"stage": 3, "checkpoint_io": OwnIO()}, marks=pytest.mark.slow),
    ],
    ids=["sharded", "offload and async", "gathered"],
)
def test_a_checkpoint_holds_both(pool: RankPool, strategy: dict[str, Any], tmp_path: Path) -> None:
    first, second, *_ = pool.run(fit_and_save, strategy, str(tmp_path))[0]
    mean = {key: 0.75 * value + 0.25 * second[key] for key, value in first.items()}
    for name in ("before", "within", "after"):
        saved, _ = read_checkpoint(tmp_path / name)
        assert_same(plain(saved["state_dict"]), mean)
        assert_same(plain(saved["current_model_state"]), second)
        assert saved["averaging_state"] == {"n_averaged": 2}
        assert saved["callbacks"]["EMAWeightAveraging"] == {"latest_update_step": 2}


def plain(state: Weights) -> Weights:
    return {key.removeprefix("model."): value.clone() for key, value in state.items()}


class CountsSaves(Callback):
    """Counts the collectives of a step and of a save after it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.calls: list[Counter[str]] = []

    def count(self, trainer: Trainer) -> None:
        mesh = trainer.strategy.engine.placement.mesh
        groups = list({id(group): group for group in (mesh.world, mesh.shard, mesh.replica)}.values())
        self.calls.append(sum((group.calls for group in groups), Counter()))
        for group in groups:
            group.reset_counters()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.count(trainer)
        trainer.save_checkpoint(self.path)
        self.count(trainer)


def count_save(path: str) -> list[Counter[str]]:
    counter = CountsSaves(path)
    fit("zero3", Recipe(steps=1), callbacks=[make_average("zero3"), counter])
    return counter.calls


@ranks(2)
def test_a_save_gathers_nothing(pool: RankPool, tmp_path: Path) -> None:
    for step, save in pool.run(count_save, str(tmp_path / "a.ckpt")):
        assert step["all_gather"]
        assert not save["all_gather"]


# ----------------------------------------------------------------------------------------------------- runs and errors


class FailedError(Exception):
    pass


class FailsInValidation(Resumable):
    def validation_step(self, batch: Tensor, index: int) -> None:
        if self.trainer.global_step == 3:
            raise FailedError


def fit_until_error(strategy: StrategyArgument, path: str) -> tuple[list[Weights], Weights, Weights]:
    """The weights after each step; those after the error; those after a fit that goes on from what was saved then."""
    recorder = Recorder()
    trainer = make_trainer(strategy, callbacks=[make_average(strategy), recorder], precision="bf16-true", **EACH_STEP)
    with pytest.raises(FailedError):
        trainer.fit(FailsInValidation(MOMENTUM))
    trainer.save_checkpoint(path)
    left = state_of(trainer)
    again = make_trainer(strategy, callbacks=[make_average(strategy)], precision="bf16-true", **EACH_STEP)
    lit = Resumable(MOMENTUM)
    again.fit(lit, ckpt_path=path)
    return recorder.weights, left, state_of(again)


@ranks(2)
@names
def test_an_error_in_validation_leaves_the_weights(pool: RankPool, name: str, tmp_path: Path) -> None:
    recorded, left, resumed = pool.run(fit_until_error, name, str(tmp_path / "a.ckpt"))[0]
    assert_same(left, recorded[-1])
    assert len(recorded) == 3
    flags = {"precision": "bf16-true", **EACH_STEP}
    assert_same(resumed, pool.run(fit_averaged, name, MOMENTUM, Resumable, {}, **flags)[0].weights)


def fit_and_evaluate(strategy: StrategyArgument, path: str) -> list[Weights]:
    """The weights after a fit, and after evaluations of what it has saved on its way."""
    average = make_average(strategy)
    trainer = make_trainer(strategy, callbacks=[average, SaveAfter(2, path)], **EACH_STEP)
    lit = Lit(MOMENTUM)
    trainer.fit(lit)
    seen = [state_of(trainer)]
    for evaluate in (trainer.validate, trainer.test):
        evaluate(lit, ckpt_path=path, verbose=False)
        seen.append(state_of(trainer))
    return seen


@ranks(2)
@names
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback, but loading")
def test_what_is_evaluated_is_the_average_that_was_saved(pool: RankPool, name: str, tmp_path: Path) -> None:
    """Not the weights beside it in the file, nor the average that the fit has ended with."""
    path = tmp_path / "a.ckpt"
    fitted, validated, tested = pool.run(fit_and_evaluate, name, str(path))[0]
    saved = plain(torch.load(path, weights_only=True)["state_dict"])
    assert_same(validated, saved)
    assert_same(tested, saved)
    assert not torch.equal(fitted["head.weight"], saved["head.weight"])


def resume_plain(strategy: StrategyArgument, path: str) -> list[Weights]:
    """A fit that saves without an average, and one with an average that resumes from it."""
    recorder = Recorder()
    fit(strategy, MOMENTUM, Resumable, callbacks=[recorder, SaveAfter(2, path)])
    average = fit_averaged(strategy, MOMENTUM, Resumable, {}, ckpt_path=path)
    return [*recorder.weights, average.weights]


@ranks(2)
@names
def test_an_average_begins_with_the_weights_of_a_checkpoint(pool: RankPool, name: str, tmp_path: Path) -> None:
    *_, third, fourth, average = pool.run(resume_plain, name, str(tmp_path / "a.ckpt"))[0]
    mean = {key: 0.75 * value + 0.25 * fourth[key] for key, value in third.items()}
    assert_same(average, mean)


def warnings_of(name: str, recipe: Recipe) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_averaged(name, recipe, Configured, {})
    return [str(warning.message) for warning in caught]


@ranks(1)
def test_nothing_is_said_of_full_copies(pool: RankPool) -> None:
    (said,) = pool.run(warnings_of, "zero3", MOMENTUM)
    assert not any("copy" in message or "sharding" in message for message in said)


class FailsInTest(Lit):
    fails = False

    def test_step(self, batch: Tensor, index: int) -> None:
        if self.fails:
            raise FailedError


def fit_and_save_at_the_end(name: str, folder: str) -> Weights:
    """The weights in training after the last step; what is saved then, and after evaluations, is in files."""
    recorder = Recorder()
    trainer = make_trainer(name, callbacks=[make_average(name), recorder], **EACH_STEP)
    trainer.fit(lit := FailsInTest(MOMENTUM))
    trainer.save_checkpoint(f"{folder}/fitted.ckpt")
    for evaluate in (trainer.validate, trainer.test):
        evaluate(lit, verbose=False)
    trainer.save_checkpoint(f"{folder}/evaluated.ckpt")
    lit.fails = True
    with pytest.raises(FailedError):
        trainer.test(lit, verbose=False)
    trainer.save_checkpoint(f"{folder}/failed.ckpt")
    trainer.validate(lit, ckpt_path=f"{folder}/fitted.ckpt", verbose=False)
    trainer.save_checkpoint(f"{folder}/loaded.ckpt")
    return recorder.weights[-1]


@ranks(2)
@names
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback, but loading")
def test_a_save_after_the_end_has_the_weights_in_training(pool: RankPool, name: str, tmp_path: Path) -> None:
    last = pool.run(fit_and_save_at_the_end, name, str(tmp_path))[0]
    average = pool.run(fit_averaged, name, MOMENTUM, Lit, {})[0].weights
    for when in ("fitted", "evaluated", "failed"):
        saved = torch.load(tmp_path / f"{when}.ckpt", weights_only=True)
        assert_same(plain(saved["current_model_state"]), last)
        assert_same(plain(saved["state_dict"]), average)
        assert saved["averaging_state"]["n_averaged"] == MOMENTUM.steps
    # The training weights are no longer those beside the weights that an evaluation has loaded.
    assert "current_model_state" not in torch.load(tmp_path / "loaded.ckpt", weights_only=True)


def test_impossible_averages_are_refused() -> None:
    impossible: list[tuple[str, Any]] = [("decay", 1.5), ("decay", -0.1)]
    impossible += [("update_every_n_steps", 0), ("update_starting_at_step", -1)]
    for name, value in impossible:
        with pytest.raises(ValueError, match=f"{name}={value} must"):
            EMA(**{name: value})
