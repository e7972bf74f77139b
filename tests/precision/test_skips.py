"""A step whose gradients are not finite is skipped on all ranks, and whatever follows the steps stands still."""

from __future__ import annotations

import csv
import functools
import math
import pickle
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import RankError, RankPool, ranks
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from strategy.fits import (
    Lit,
    Recipe,
    StrategyArgument,
    assert_same,
    assert_same_states,
    fit,
    main_names,
    main_names_and,
    make_trainer,
    optimizer_state,
    reference,
    state_of,
)
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import DataLoader

from lightning_zero import DynamicLossScaler, StaticLossScaler, ZeroPrecision
from lightning_zero.callbacks import GradientMonitor
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.schedulers import WarmupCosineLR
from lightning_zero.update import SkippedStepsError, StepOutcomes
from lightning_zero.update.gradient_scale import GradientScale

# How each kind of skip is asked for. The first overflow does not move the default scaler.
FP16 = {"plugins": "16-mixed"}
MODES: dict[str, dict[str, Any]] = {
    "16-mixed": FP16,
    "16-true": {"plugins": "16-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "32-true": {},
}
FALLS = "gradients overflowed"
SKIPPED = "skipped a step"
SUMMARY = "optimizer steps were skipped"


def flags_of(mode: str, **scaler: Any) -> dict[str, Any]:
    """Trainer flags for a mode; `scaler` holds arguments of a dynamic one."""
    flags = dict(MODES[mode])
    if "plugins" in flags:
        # The default of 2^16 is too large for these gradients.
        flags["plugins"] = [
            ZeroPrecision(flags["plugins"], scaler=DynamicLossScaler(**{"init_scale": 2.0**10} | scaler))
        ]
    return flags


class Planted(Lit):
    """Its loss makes one gradient infinite, that of `model.norm.weight`, in some batches of some ranks.

    Args:
        recipe: as usual.
        at: pairs of the batch's number and the rank.
        without: numbers of batches that are not loaded at all.
    """

    def __init__(self, recipe: Recipe, at: Iterable[tuple[int, int]] = (), without: Iterable[int] = ()) -> None:
        super().__init__(recipe)
        self.at = set(at)
        self.without = set(without)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if (index, dist.get_rank()) in self.at:
            loss = loss + (self.model.norm.weight * math.inf).sum()
        return loss

    def loader(self) -> DataLoader[Tensor]:
        kept = [batch for n, batch in enumerate(super().loader()) if n not in self.without]
        return DataLoader(kept, batch_size=None)  # type: ignore[arg-type]

    train_dataloader = loader


class Observer(Callback):
    """What there is after every batch, and the warnings until then. `rank` says who saw it."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.states: list[dict[str, dict[str, Tensor]]] = []
        self.scales: list[float] = []
        self.skipped: list[int] = []
        self.last: list[bool] = []
        self.rates: list[float] = []
        self.steps: list[int] = []
        self.norms: list[float | None] = []
        self.warned: list[str] = []
        self.summary: list[str] = []

    def __getstate__(self) -> dict[str, Any]:
        # Lightning gives every callback methods of the module.
        return {name: value for name, value in vars(self).items() if isinstance(value, list)}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        strategy, (optimizer, *_) = trainer.strategy, trainer.optimizers
        self.weights.append(state_of(trainer))
        self.states.append(
            {name: {k: v.clone() for k, v in s.items()} for name, s in optimizer_state(trainer, optimizer).items()}
        )
        self.scales.append(strategy.loss_scale)
        self.skipped.append(strategy.skipped_steps)
        self.last.append(strategy.last_step_skipped(optimizer))
        self.norms.append(strategy.last_grad_norm(optimizer))
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.steps.append(trainer.global_step)

    def watch(self, trainer: Trainer, lit: Lit, ckpt_path: str | None = None) -> None:
        """Fit, and keep our own warnings."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(lit, ckpt_path=ckpt_path)
        messages = [str(w.message) for w in caught]
        self.warned = [message for message in messages if FALLS in message or SKIPPED in message]
        self.summary = [message for message in messages if SUMMARY in message]


def observed(
    strategy: StrategyArgument, recipe: Recipe, module: Callable[[Recipe], Lit] = Planted, **flags: Any
) -> Observer:
    """Fit; what was seen on the way."""
    observer = Observer()
    observer.watch(make_trainer(strategy, callbacks=[observer], **flags), module(recipe))
    return observer


def observed_in_turn(
    strategy: StrategyArgument, recipe: Recipe, module: Callable[[Recipe], Lit], path: str
) -> list[Observer]:
    """Fit an epoch, and resume for a second one; what was seen in each."""
    observers = [Observer(), Observer()]
    for observer, ckpt_path in zip(observers, (None, path), strict=True):
        trainer = make_trainer(strategy, callbacks=[observer], max_epochs=2 if ckpt_path else 1)
        observer.watch(trainer, module(recipe), ckpt_path)
        trainer.save_checkpoint(path)
    return observers


# ------------------------------------------------------------------------------------------------- parameters, moments


def check_a_skip_changes_nothing(pool: RankPool, name: str, mode: str, optimizer: str = "adamw", **flags: Any) -> None:
    """A run with one overflow ends as the run that never saw that batch; the skipped step itself changes nothing."""
    recipe = Recipe(optimizer=optimizer, options={"lr": 1e-2}, steps=4, scheduled=True)
    flags |= flags_of(mode)
    planted = functools.partial(Planted, at=[(1, pool.world_size - 1)])
    runs = pool.run(observed, name, recipe, planted, **flags)
    for run in runs:
        assert run.last == [False, True, False, False]
        assert run.skipped == [0, 1, 1, 1]
        assert run.steps == [1, 2, 3, 4]
        assert run.rates == [0.5e-2, 0.5e-2, 0.25e-2, 0.125e-2]
        assert [math.isfinite(norm) for norm in run.norms] == [True, False, True, True]
    first = runs[0]
    assert_same(first.weights[1], first.weights[0])
    assert_same_states(first.states[1], first.states[0])
    assert not torch.equal(first.weights[2]["norm.weight"], first.weights[1]["norm.weight"])
    (without, *_) = pool.run(observed, name, recipe, functools.partial(Planted, without=[1]), **flags)
    assert_same(first.weights[-1], without.weights[-1])
    assert_same_states(first.states[-1], without.states[-1])


@ranks(2)
@pytest.mark.parametrize(
    ("name", "mode", "optimizer"),
    [
        ("zero3", "16-mixed", "adamw"),
        ("zero2_offload", "32-true", "adamw"),
        pytest.param("zero2_offload", "16-true", "adamw", marks=pytest.mark.slow),
        pytest.param("zero3", "bf16-mixed", "adamw", marks=pytest.mark.slow),
        pytest.param("zero3", "16-mixed", "lamb", marks=pytest.mark.slow),  # which counts steps in its groups
        pytest.param("zero2_offload", "16-true", "adafactor", marks=pytest.mark.slow),
    ],
)
def test_a_skipped_step_leaves_no_trace(pool: RankPool, mode: str, name: str, optimizer: str) -> None:
    check_a_skip_changes_nothing(pool, name, mode, optimizer)


@ranks(2)
@main_names
def test_clipping_does_not_hide_an_overflow(pool: RankPool, name: str) -> None:
    """By value; by norm the monitor's test clips."""
    check_a_skip_changes_nothing(pool, name, "16-mixed", gradient_clip_val=0.01, gradient_clip_algorithm="value")


@ranks(2)
@main_names
def test_without_masters_the_parameters_stand_still_too(pool: RankPool, name: str) -> None:
    recipe = Recipe(steps=3, optimizer="momentum")
    plugin = ZeroPrecision("16-true", master_weights=False)
    runs = pool.run(observed, name, recipe, functools.partial(Planted, at=[(1, 0)]), plugins=[plugin])
    assert_same(runs[0].weights[1], runs[0].weights[0])
    assert_same_states(runs[0].states[1], runs[0].states[0])
    assert {value.dtype for value in runs[0].weights[0].values()} == {torch.float16}


@ranks(2)
@main_names
def test_max_steps_counts_skipped_steps(pool: RankPool, name: str) -> None:
    recipe = Recipe(steps=6, optimizer="momentum")
    flags = flags_of("32-true") | {"max_steps": 3, "max_epochs": -1}
    runs = pool.run(observed, name, recipe, functools.partial(Planted, at=[(0, 0), (2, 1)]), **flags)
    assert runs[0].steps == [1, 2, 3]
    batches = recipe.batches(2)
    assert_same(runs[0].weights[-1], reference(name, recipe, 2, batches=batches[1:2]).weights)


class NeverCleared(Planted):
    """Manual optimization without `zero_grad`: gradients add up until a skip clears them. Notes their norms."""

    def __init__(self, recipe: Recipe, **options: Any) -> None:
        super().__init__(recipe, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()
        self.notes.append(self.trainer.strategy.grad_norm(optimizer))


@ranks(2)
@main_names_and("mode", "16-mixed", "32-true")
def test_a_skip_clears_the_gradients(pool: RankPool, name: str, mode: str) -> None:
    planted = functools.partial(NeverCleared, at=[(1, 1)])
    for result in pool.run(fit, name, Recipe(optimizer="momentum"), planted, **flags_of(mode)):
        first, second, third = result.notes
        assert first > 0
        assert second == 0
        assert third > 0
        assert math.isfinite(third)


# --------------------------------------------------------------------------------------------------- skip_nonfinite


@ranks(2)
def test_warnings_of_skips_that_no_scale_can_help_become_rare(pool: RankPool) -> None:
    """Each names the parameter; at the end one of them says how many of the steps there were."""
    planted = functools.partial(Planted, at=[(n, 0) for n in range(7)])
    runs = pool.run(observed, "zero3", Recipe(steps=8, optimizer="momentum"), planted)
    said = "skipped a step of SGD on all ranks: inf or nan in the gradient of model.norm.weight ("
    assert all(text.startswith(said) for text in runs[0].warned)
    assert [text.partition("so far: ")[2][0] for text in runs[0].warned] == ["1", "2", "4"]
    (summary,) = runs[0].summary
    assert "7 of 8 optimizer steps were skipped" in summary
    assert runs[0].skipped[-1] == 7
    assert runs[1].warned == runs[1].summary == []


@ranks(1)
def test_warnings_of_a_resumed_run_count_its_own_skips(pool: RankPool, tmp_path: Path) -> None:
    """While `skipped_steps` goes on counting."""
    planted = functools.partial(Planted, at=[(n, 0) for n in range(3)])
    recipe = Recipe(steps=4, optimizer="momentum")
    ((first, second),) = pool.run(observed_in_turn, "zero2", recipe, planted, str(tmp_path / "a.ckpt"))
    for run in (first, second):
        assert [text.partition("so far: ")[2][0] for text in run.warned] == ["1", "2"]
        assert ["3 of 4 optimizer steps were skipped" in text for text in run.summary] == [True]
    assert (first.skipped, second.skipped) == ([1, 2, 3, 3], [4, 5, 6, 6])


@ranks(2)
@pytest.mark.parametrize(("name", "mode"), [("zero2", "bf16-mixed"), ("zero3_offload", "32-true")])
def test_steps_that_are_skipped_in_a_row_end_the_run_on_all_ranks(pool: RankPool, name: str, mode: str) -> None:
    planted = functools.partial(Planted, at=[(0, 1), (1, 0), *((n, 1) for n in range(3, 6))])  # a step between
    strategy = {**STRATEGIES[name], "max_consecutive_skips": 3}
    with pytest.raises(RankError, match=r"(?s)3 steps of SGD in a row.*model\.norm\.weight.*max_consec") as caught:
        pool.run_within(20, observed, strategy, Recipe(steps=8, optimizer="momentum"), planted, **flags_of(mode))
    assert {failure.kind for failure in caught.value.failures.values()} == {"SkippedStepsError"}
    assert len(caught.value.failures) == 2


@pytest.mark.filterwarnings("ignore:skipped a step", "ignore:gradients overflowed")
def test_the_search_for_a_loss_scale_counts_as_no_skips_in_a_row() -> None:
    """A healthy fp16 run begins with it; at the smallest scale skips count, those of each optimizer for themselves."""
    scaler = DynamicLossScaler(init_scale=2.0**40, on_min_scale="continue")
    outcomes = StepOutcomes(GradientScale(scaler), limit=3, warns=False)
    a, b = (SGD([torch.zeros(1, requires_grad=True)]) for _ in range(2))

    def skip(optimizer: Optimizer) -> None:
        outcomes._scale.adopt()
        outcomes._scale.begin_backward()
        outcomes.skip(optimizer, math.inf, lambda: "weight")

    while not scaler.at_minimum:
        skip(a)
    assert outcomes.skipped == 41  # the first one is spared
    for _ in range(2):
        skip(a)
        skip(b)
    outcomes.take(b, 1.0)
    skip(b)
    with pytest.raises(SkippedStepsError, match=r"3 steps of SGD in a row .* of weight"):
        skip(a)
    assert outcomes.counts() == (48, 47)


@ranks(2)
def test_at_the_smallest_scale_they_become_rare_as_well(pool: RankPool) -> None:
    planted = functools.partial(Planted, at=[(n, 1) for n in range(3)])
    flags = flags_of("16-mixed", init_scale=2.0, hysteresis=1, on_min_scale="continue")
    runs = pool.run(observed, "zero2", Recipe(steps=4, optimizer="momentum"), planted, **flags)
    assert runs[0].scales == [1.0] * 4
    assert runs[0].last == [True, True, True, False]
    # One line for the backoff, one at the second skip; the third says nothing.
    assert [text.split(":")[0] for text in runs[0].warned] == [
        "gradients overflowed",
        "skipped a step of SGD on all ranks",
    ]


@ranks(2)
def test_nonfinite_gradients_may_be_applied(pool: RankPool) -> None:
    """Unless there is a loss scaler, which always skips."""
    strategy = {"stage": 3, "skip_nonfinite": False}
    planted, recipe = functools.partial(Planted, at=[(1, 1)]), Recipe(optimizer="momentum")
    runs = pool.run(observed, strategy, recipe, planted)
    for run in runs:
        assert run.last == [False, False, False]
        assert run.skipped == [0, 0, 0]
        assert run.warned == []
    finite = [bool(weights["norm.weight"].isfinite().all()) for weights in runs[0].weights]
    assert finite == [True, False, False]
    scaled = pool.run(observed, strategy, recipe, planted, **flags_of("16-mixed"))
    assert [run.last for run in scaled] == [[False, True, False]] * 2


# ------------------------------------------------------------------------------------------------------- scale traces

SCALER = {"init_scale": 2.0**10, "window": 2, "hysteresis": 2}
OVERFLOWS = (0, 1, 2, 5)
# The second overflow and the third lower the scale; two clean steps raise it and refill; then one overflow is free.
TRACE = [2.0**10, 2.0**9, 2.0**8, 2.0**8, 2.0**9, 2.0**9, 2.0**9, 2.0**10]


@ranks(2)
def test_no_lower_scale_is_an_error_that_names_parameters(pool: RankPool) -> None:
    planted = functools.partial(Planted, at=[(n, 1) for n in range(3)])
    flags = flags_of("16-mixed", init_scale=2.0, hysteresis=1)
    with pytest.raises(RankError, match=r"bf16-mixed.*Not finite: the gradient of model\.norm\.weight") as caught:
        pool.run_within(20, observed, "zero3", Recipe(optimizer="momentum"), planted, **flags)
    assert {failure.kind for failure in caught.value.failures.values()} == {"LossScaleError"}
    assert len(caught.value.failures) == 2


# --------------------------------------------------------------------------------------------------------- schedulers


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 4)


def sequence(optimizer: Optimizer) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.25, total_iters=2), LambdaLR(optimizer, warm_up)]
    return SequentialLR(optimizer, parts, milestones=[2])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "SequentialLR": sequence,
    "WarmupCosineLR": lambda optimizer: WarmupCosineLR(optimizer, total_steps=10, warmup_steps=3),
    # Never satisfied: every call lowers the rate.
    "ReduceLROnPlateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, factor=0.5),
}
SCHEDULED_STEPS = 6
SKIPS = (0, 2, 3)


class Scheduled(Planted):
    """Its scheduler is one of `SCHEDULERS`; notes the rate, and what the scheduler saves, after every batch."""

    def __init__(self, recipe: Recipe, kind: str, **options: Any) -> None:
        super().__init__(recipe, **options)
        self.kind = kind
        self.configured: list[Any] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.log("level", 1.0)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS[self.kind](optimizer)
        self.configured.append(scheduler)
        config = {"scheduler": scheduler, "interval": "step", "monitor": "level"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def on_train_batch_start(self, *_: Any) -> None:
        if self.trainer.global_step:  # Lightning steps a plateau's scheduler after all other hooks
            self.on_train_end()

    def on_train_end(self) -> None:
        (scheduler,) = self.configured
        self.notes.append((self.trainer.optimizers[0].param_groups[0]["lr"], pickle.dumps(scheduler.state_dict())))


def plain_scheduler(kind: str) -> tuple[Optimizer, Any]:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    optimizer.step()
    return optimizer, SCHEDULERS[kind](optimizer)


def fit_scheduled(name: str, kind: str, at: list[tuple[int, int]], **flags: Any) -> tuple[list[Any], set[str]]:
    """The notes, and which attributes the scheduler has more after the fit than a plain one."""
    module = Scheduled(Recipe(steps=SCHEDULED_STEPS), kind, at=at)
    warnings.filterwarnings("error", message=".*lr_scheduler")  # torch's advice about the order of calls
    make_trainer(name, **flags).fit(module)
    plain = plain_scheduler(kind)[1]
    return module.notes, module.configured[0].__dict__.keys() - plain.__dict__.keys()


@ranks(1)
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_stepwise_scheduler_stands_still_on_a_skip(pool: RankPool, kind: str) -> None:
    at = [(n, 0) for n in SKIPS]
    (notes, extra), *_ = pool.run(fit_scheduled, "zero3", kind, at)
    optimizer, scheduler = plain_scheduler(kind)
    expected = []
    for step in range(SCHEDULED_STEPS):
        if step not in SKIPS:
            scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
        expected.append(optimizer.param_groups[0]["lr"])
    assert [rate for rate, _ in notes] == expected
    assert len(set(expected)) > 2
    saved = pickle.loads(notes[-1][1])
    assert saved.keys() == scheduler.state_dict().keys()
    other_optimizer, other = plain_scheduler(kind)
    other.load_state_dict(saved)
    other_optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]  # as a checkpoint's optimizer state does
    for one in (scheduler, other):  # the saved state goes on as the plain one does
        one.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
    assert other.get_last_lr() == scheduler.get_last_lr()
    assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert extra == set()  # after the fit its methods are its own


class EverySecond(Planted):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1.0)
        config = {"scheduler": StepLR(optimizer, 1, gamma=0.5), "interval": "step", "frequency": 2}
        return {"optimizer": optimizer, "lr_scheduler": config}


@ranks(1)
def test_a_scheduler_of_several_steps_stands_still_if_all_are_skipped(pool: RankPool) -> None:
    planted = functools.partial(EverySecond, at=[(n, 0) for n in (1, 2, 3, 4)])
    (run,) = pool.run(observed, "zero3", Recipe(steps=6), planted)
    assert run.last == [False, True, True, True, True, False]
    assert run.rates == [1.0, 0.5, 0.5, 0.5, 0.5, 0.25]


class ByEpoch(Planted):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1.0)
        config = {"scheduler": StepLR(optimizer, 1, gamma=0.5), "interval": "epoch"}
        return {"optimizer": optimizer, "lr_scheduler": config}


@ranks(2)
@main_names
def test_an_epochs_scheduler_steps_after_a_skip(pool: RankPool, name: str) -> None:
    recipe = Recipe(steps=2)
    flags = flags_of("16-mixed") | {"max_epochs": 3}
    runs = pool.run(observed, name, recipe, functools.partial(ByEpoch, at=[(1, 0)]), **flags)
    assert [run.last for run in runs] == [[False, True] * 3] * 2
    assert runs[0].rates == [1.0, 0.5, 0.5, 0.25, 0.25, 0.125]


# ----------------------------------------------------------------------------------------------------- weight averages


def average(name: str, mode: str, at: list[tuple[int, int]], without: list[int], recipe: Recipe) -> dict[str, Any]:
    """What the callback averaged, under this strategy and, with the same callback, under ddp afterwards."""
    averaging = EMAWeightAveraging(decay=0.5)
    make_trainer(name, callbacks=[averaging], **flags_of(mode), accumulate_grad_batches=recipe.micro).fit(
        Planted(recipe, at, without)
    )
    ours = {key: value.clone() for key, value in averaging._average_model.state_dict().items()}
    left = set(averaging.__dict__) & {"should_update", "step", "state_dict"}
    averaging._latest_update_step = 0  # what a resumed callback restores
    make_trainer("ddp", callbacks=[averaging]).fit(Planted(recipe))
    return {"ours": ours, "left": left, "ddp": int(averaging._average_model.n_averaged)}


@ranks(2)
def test_an_average_stands_still_on_a_skip(pool: RankPool) -> None:
    name, mode, micro = "zero2_offload", "16-mixed", 2
    recipe = Recipe(steps=4, micro=micro, optimizer="momentum")
    batches = list(range(micro, 2 * micro))  # those of the second step
    at, without = [(batches[0], 1)], batches
    planted = pool.run(average, name, mode, at, [], recipe)
    missing = pool.run(average, name, mode, [], without, recipe)
    for one, other in zip(planted, missing, strict=True):
        assert one["left"] == set()
        assert int(one["ours"].pop("n_averaged")) == int(other["ours"].pop("n_averaged")) == recipe.steps - 1
        assert_same(one["ours"], other["ours"])
        assert one["ddp"] == recipe.steps * micro


def only_the_third(step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
    return step_idx == 2


def average_as_told(name: str) -> tuple[int, bool]:
    averaging = WeightAveraging()
    averaging.should_update = only_the_third  # type: ignore[method-assign]
    make_trainer(name, callbacks=[averaging]).fit(Planted(Recipe(steps=4)))
    return int(averaging._average_model.n_averaged), averaging.should_update is only_the_third


@ranks(1)
def test_a_method_that_the_user_gave_the_callback_stays(pool: RankPool) -> None:
    assert pool.run(average_as_told, "zero2") == [(1, True)]


# ----------------------------------------------------------------------------------------------------------- clipping


class ByHook(Planted):
    """Clips in Lightning's hook."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.notes.append(self.trainer.strategy.grad_norm(optimizer))
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        self.notes.append(self.trainer.strategy.grad_norm(optimizer))


class ByHand(Planted):
    """Manual optimization; `self.clip_gradients`."""

    def __init__(self, recipe: Recipe, **options: Any) -> None:
        super().__init__(recipe, **options)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        self.clip(optimizer)
        optimizer.step()

    def clip(self, optimizer: Any) -> None:
        self.notes.append(self.trainer.strategy.grad_norm(optimizer))
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        self.notes.append(self.trainer.strategy.grad_norm(optimizer))


class ByStrategy(ByHand):
    """Manual optimization; `strategy.clip_grad_norm_`."""

    def clip(self, optimizer: Any) -> None:
        self.notes.append(self.trainer.strategy.clip_grad_norm_(optimizer, 0.3))
        self.notes.append(self.trainer.strategy.grad_norm(optimizer))


class ByFlag(Planted):
    """Leaves it to `gradient_clip_val`."""

    def on_train_batch_end(self, *_: Any) -> None:
        norm = self.trainer.strategy.last_grad_norm(self.trainer.optimizers[0])
        self.notes += [norm, min(norm, 0.3)]  # by the flag: what became of it shows in the weights alone


CLIPPING: dict[str, tuple[type[Planted], dict[str, Any]]] = {
    "flag": (ByFlag, {"gradient_clip_val": 0.3}),
    "hook": (ByHook, {"gradient_clip_val": 0.3}),
    "by hand": (ByHand, {}),
    "strategy": (ByStrategy, {}),
}


@ranks(2)
@main_names
def test_every_way_of_clipping_sees_unscaled_gradients(pool: RankPool, name: str) -> None:
    """In fp32 with a scale of 2^10 nothing is rounded: weights and norms are those without a scaler."""
    recipe = Recipe(optimizer="momentum")
    plugin = ZeroPrecision("32-true", scaler=StaticLossScaler(2.0**10))
    expected = reference(name, recipe, 2, clip_norm=0.3)
    assert max(expected.norms) > 0.3
    for way, (module, flags) in CLIPPING.items():
        results = pool.run(fit, name, recipe, module, plugins=[plugin], **flags)
        assert all(torch.equal(results[0].weights[key], value) for key, value in expected.weights.items()), way
        for result in results:
            assert result.notes[0::2] == pytest.approx(expected.norms, rel=1e-12), way
            assert result.notes[1::2] == pytest.approx([min(norm, 0.3) for norm in expected.norms], rel=1e-5), way


class ByHandAndValue(ByHand):
    def clip(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="value")


@ranks(2)
@main_names
@pytest.mark.parametrize(
    ("module", "flags"),
    [(Planted, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}), (ByHandAndValue, {})],
    ids=["flag", "by hand"],
)
def test_clipping_by_value_sees_unscaled_gradients(
    pool: RankPool, name: str, module: type[Planted], flags: dict[str, Any]
) -> None:
    recipe = Recipe(optimizer="momentum")
    plugin = ZeroPrecision("32-true", scaler=StaticLossScaler(2.0**10))
    results = pool.run(fit, name, recipe, module, plugins=[plugin], **flags)
    expected = reference(name, recipe, 2, clip_value=0.02).weights
    assert_same(results[0].weights, expected)
    assert not torch.equal(expected["head.weight"], reference(name, recipe, 2).weights["head.weight"])


# ------------------------------------------------------------------------------------------------------------ monitor


def monitored(
    strategy: StrategyArgument, recipe: Recipe, module: Callable[[Recipe], Lit], folder: str, **flags: Any
) -> tuple[dict[str, float], dict[str, float], Observer]:
    """Fit with the callback; the metrics, those on the progress bar, and what was seen on the way."""
    logger, observer = CSVLogger(folder, name="", version=""), Observer()
    trainer = make_trainer(
        strategy, callbacks=[GradientMonitor(), observer], logger=logger, log_every_n_steps=1, **flags
    )
    observer.watch(trainer, module(recipe))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    bar = {name: value for name, value in trainer.progress_bar_metrics.items() if name != "v_num"}
    return metrics, bar, observer  # type: ignore[return-value]


def column(folder: Path, name: str) -> list[float]:
    with (folder / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


@ranks(2)
@main_names
def test_the_monitor_logs_norm_scale_and_skips(pool: RankPool, name: str, tmp_path: Path) -> None:
    """And the scale follows the overflows, with one warning per backoff."""
    recipe = Recipe(steps=len(TRACE), optimizer="momentum")
    planted = functools.partial(Planted, at=[(n, n % 2) for n in OVERFLOWS])
    flags = {"plugins": [ZeroPrecision("32-true", scaler=DynamicLossScaler(**SCALER))], "gradient_clip_val": 0.3}
    results = pool.run(monitored, name, recipe, planted, str(tmp_path), **flags)
    assert column(tmp_path, "loss_scale") == TRACE
    assert column(tmp_path, "skipped_steps") == [1, 2, 3, 3, 3, 4, 4, 4]
    clean = [n for n in range(len(TRACE)) if n not in OVERFLOWS]
    batches = recipe.batches(2)
    expected = reference(name, recipe, 2, batches=[batches[n] for n in clean], clip_norm=0.3)
    assert_same(results[0][2].weights[-1], expected.weights)  # powers of two are exact: no scale shows
    norms = column(tmp_path, "grad_norm")
    assert [norms[n] for n in clean] == pytest.approx(expected.norms, rel=1e-6)  # loggers get fp32
    assert all(norms[n] == math.inf for n in OVERFLOWS)
    for metrics, bar, run in results:
        assert bar.keys() == {"grad_norm", "loss_scale", "skipped_steps"}
        assert bar["loss_scale"] == metrics["loss_scale"] == TRACE[-1]
        assert bar["skipped_steps"] == len(OVERFLOWS)
        assert bar["grad_norm"] == pytest.approx(norms[-1])
        assert run.scales == TRACE
        assert [n for n, skipped in enumerate(run.last) if skipped] == list(OVERFLOWS)
    assert [text.partition(" (")[0] for text in results[0][2].warned] == [
        "gradients overflowed: the loss scale falls from 1024 to 512",
        "gradients overflowed: the loss scale falls from 512 to 256",
    ]
    assert results[1][2].warned == []


@ranks(1)
def test_the_monitor_logs_no_scale_without_a_scaler(pool: RankPool, tmp_path: Path) -> None:
    ((metrics, bar, _),) = pool.run(monitored, "zero2", Recipe(optimizer="momentum"), Planted, str(tmp_path))
    assert metrics.keys() == bar.keys() == {"grad_norm", "skipped_steps"}
    assert "loss_scale" not in (tmp_path / "metrics.csv").read_text()


class TwoOptimizers(Planted):
    """The matrices and the vectors, each with an optimizer; only the first steps in the first batch."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        matrices, vectors = self.optimizers()
        for optimizer in (matrices, vectors):
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        matrices.step()
        if index:
            vectors.step()

    def configure_optimizers(self) -> Any:
        parts = [[p for p in self.parameters() if (p.dim() >= 2) is wide] for wide in (True, False)]
        return [SGD(part, lr=0.1) for part in parts]


@ranks(2)
@main_names
def test_the_monitor_numbers_several_optimizers(pool: RankPool, name: str, tmp_path: Path) -> None:
    recipe = Recipe(steps=2, optimizer="sgd", options={"lr": 0.1})
    results = pool.run(monitored, name, recipe, TwoOptimizers, str(tmp_path))
    assert all(bar.keys() == {"grad_norm/0", "grad_norm/1", "skipped_steps"} for _, bar, _ in results)
    first, second = column(tmp_path, "grad_norm/0"), column(tmp_path, "grad_norm/1")
    assert (len(first), len(second)) == (2, 1)
    (norm,) = reference(name, recipe, 2, batches=recipe.batches(2)[:1]).norms
    model = recipe.make_model()
    assert 0 < first[0] < norm  # a part of it
    assert {p.dim() >= 2 for p in model.parameters()} == {True, False}


def quiet_monitor(strategy: str, prog_bar: bool) -> dict[str, Any]:
    trainer = make_trainer(strategy, callbacks=[GradientMonitor(prog_bar=prog_bar)])
    trainer.fit(Planted(Recipe(optimizer="momentum")))
    return trainer.progress_bar_metrics


@ranks(1)
def test_the_monitor_may_stay_off_the_progress_bar(pool: RankPool) -> None:
    assert pool.run(quiet_monitor, "zero2", False) == [{}]
    assert pool.run(quiet_monitor, "ddp", True) == [{}]  # another strategy has nothing to show
