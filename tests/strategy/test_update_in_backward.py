"""`update_in_backward=True`: the bits of the ordinary step, and what cannot go together with it is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import models
from helpers.ranks import RankPool, ranks, slow_unless
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from strategy.fits import (
    NAMES,
    Fitted,
    Lit,
    Recipe,
    assert_same,
    assert_same_states,
    fit,
    make_trainer,
    observe,
)
from torch import Tensor
from torch.optim import Optimizer

import lightning_zero
from lightning_zero import StaticLossScaler, ZeroFabricStrategy, ZeroPrecision, ZeroStrategy
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.update import TornStepError

ON: dict[str, Any] = {"skip_nonfinite": False, "update_in_backward": True}


def options_of(name: str, **options: Any) -> dict[str, Any]:
    return {**STRATEGIES[name], "bucket_size_mb": 0.0003, "persistence_numel": 0, "skip_nonfinite": False, **options}


class Counting(Lit):
    """Notes after each step how many buckets were updated before it."""

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Callable[[], Any]) -> None:
        engine = self.trainer.strategy.engine  # type: ignore[attr-defined]

        def counted() -> Any:
            loss = closure()
            updates = engine.in_backward._updates
            self.notes.append(0 if updates is None else len(updates.begun))
            return loss

        super().optimizer_step(epoch, index, optimizer, counted)


RECIPES = [
    (Recipe(steps=3), {}),
    (Recipe(steps=3, micro=3, flagged=models.by_turns, model="optional"), {}),
    (Recipe(steps=3, scheduled=True), {"precision": "bf16-true"}),
]


def fit_both(name: str) -> list[tuple[Fitted, Fitted]]:
    found = []
    for recipe, flags in RECIPES:
        split = {"master_layout": "split"} if flags and "offload" in name else {}
        strategies = [options_of(name, **split), options_of(name, **split, **ON)]
        late, early = (fit(strategy, recipe, Counting, **flags) for strategy in strategies)
        found.append((late, early))
    return found


@ranks(2)
@pytest.mark.parametrize("name", slow_unless(("zero0", "zero2_offload", "zero3_offload"), NAMES))
def test_updates_in_backward_have_the_bits_of_the_ordinary_step(pool: RankPool, name: str) -> None:
    """Also of parameters that one rank, or none, has used, over accumulated micro-batches, and of split masters."""
    for late, early in pool.run(fit_both, name)[0]:
        assert_same(early.weights, late.weights)
        assert_same_states(early.optimizer_states[0], late.optimizer_states[0])
        assert late.notes == [0, 0, 0]
        assert sum(early.notes) > 0


def resumes(name: str, folder: str) -> None:
    whole = fit(options_of(name), Recipe(), max_epochs=2)
    trainer, path = make_trainer(options_of(name, **ON)), str(Path(folder, "one.ckpt"))
    trainer.fit(Lit(Recipe()))
    trainer.save_checkpoint(path)
    resumed = fit(options_of(name, **ON), Recipe(), Counting, ckpt_path=path, max_epochs=2)
    assert sum(resumed.notes) > 0
    assert_same(resumed.weights, whole.weights)
    assert_same_states(resumed.optimizer_states[0], whole.optimizer_states[0])


@ranks(2)
@pytest.mark.parametrize("name", slow_unless(("zero2_offload",), ("zero2_offload", "zero3")))
def test_it_resumes_from_a_checkpoint(pool: RankPool, name: str, tmp_path: Path) -> None:
    pool.run(resumes, name, str(tmp_path))


class Failing(Lit):
    """Its second backward fails when it has come to the embedding."""

    fails = True

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if index == 1 and self.fails:
            next(self.model.parameters()).register_hook(self._fail)
        return super().training_step(batch, index)

    def _fail(self, _: Tensor) -> None:
        if self.fails:
            raise ArithmeticError("out of gradients")


def tears(name: str, folder: str, recipe: Recipe) -> bool:
    """Whether this rank has begun updates."""
    whole = fit(options_of(name), recipe, max_epochs=2)
    path = str(Path(folder, "one.ckpt"))
    first = make_trainer(options_of(name, **ON))
    first.fit(Lit(recipe))
    first.save_checkpoint(path)
    trainer, lit = make_trainer(options_of(name, **ON)), Failing(recipe)
    with pytest.raises(ArithmeticError, match="out of gradients"):
        trainer.fit(lit)
    begun = bool(trainer.strategy.engine.in_backward._begun)  # type: ignore[attr-defined]
    saved = Path(folder, "torn.ckpt")
    remedy = r"^The step is torn.*Resume from the last checkpoint: trainer\.fit"
    for read in (
        lambda: trainer.test(lit, verbose=False),  # first: a save makes ranks ask each other, too
        lambda: trainer.save_checkpoint(saved),
        trainer.strategy.lightning_module_state_dict,
        lambda: trainer.strategy.optimizer_state(trainer.optimizers[0]),
        lambda: lightning_zero.full_param(next(lit.parameters())),
        lambda: lightning_zero.full_optimizer_state(next(lit.parameters())),
        lambda: trainer.strategy.load_model_state_dict({"state_dict": {}}, strict=False),
        lambda: trainer.fit(lit),
    ):
        with pytest.raises(TornStepError, match=remedy):
            read()
    assert not saved.exists()
    trainer.fit_loop.max_epochs, lit.fails, lit.strict_loading = 2, False, False
    trainer.fit(lit, ckpt_path=path)
    assert_same(observe(trainer, lit).weights, whole.weights)
    return begun


@ranks(1)
@pytest.mark.parametrize("name", ["zero2_offload", "zero3"])
def test_a_torn_step_is_never_saved(pool: RankPool, name: str, tmp_path: Path) -> None:
    """Nor computed with, until a checkpoint is loaded; that may be by the same Trainer."""
    assert pool.run(tears, name, str(tmp_path), Recipe()) == [True]


@ranks(2)
def test_a_rank_that_has_begun_nothing_learns_that_another_is_torn(pool: RankPool, tmp_path: Path) -> None:
    """At stage 3 blocks that a rank uses in part wait for the step there."""
    recipe = Recipe(model="optional", flagged=models.not_on_rank_0)
    assert pool.run(tears, "zero3", str(tmp_path), recipe) == [False, True]


class FailingInForward(Lit):
    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if index == 1:
            raise ArithmeticError("out of batches")
        return super().training_step(batch, index)


def fails(module: Callable[[Recipe], Lit], folder: str) -> tuple[list[str], list[str]]:
    """The notes of the error with which a fit ends, and the checkpoints that callbacks have saved then."""
    callbacks = [OnExceptionCheckpoint(folder), ModelCheckpoint(folder, filename="other", save_on_exception=True)]
    trainer = make_trainer(options_of("zero3", **ON), callbacks=callbacks, enable_checkpointing=True)
    with pytest.raises(ArithmeticError) as caught:
        trainer.fit(module(Recipe()))
    return getattr(caught.value, "__notes__", []), sorted(path.name for path in Path(folder).glob("*.ckpt"))


@ranks(2)
def test_the_error_of_a_fit_is_not_that_of_saving_a_torn_step(pool: RankPool, tmp_path: Path) -> None:
    for notes, saved in pool.run(fails, Failing, str(tmp_path)):
        assert [note.partition(" has saved nothing")[0] for note in notes] == [
            "OnExceptionCheckpoint",
            "ModelCheckpoint",
        ]
        assert not saved
    for notes, saved in pool.run(fails, FailingInForward, str(tmp_path)):
        assert not notes
        assert saved == ["on_exception.ckpt", "other.ckpt"]


class Manual(Lit):
    automatic_optimization = False


class OfTheUser(torch.optim.SGD):
    """A class of the user's."""


class Own(Lit):
    def configure_optimizers(self) -> Any:
        return OfTheUser(self.parameters(), lr=0.1)


class Clipping(Lit):
    def configure_gradient_clipping(self, *_: Any) -> None:
        """Perhaps."""


class Reading(Lit):
    def on_after_backward(self) -> None:
        """It may read gradients."""


class Watcher(Callback):
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """It may read gradients."""


class BeforeSteps(Lit):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer


REFUSED: list[tuple[type[Lit], dict[str, Any], str]] = [
    (Lit, {"gradient_clip_val": 0.5}, "gradient_clip_val=0.5 clips.*Use gradient_clip_val=None"),
    (Manual, {}, "automatic_optimization=False.*Use automatic optimization"),
    (Own, {}, "OfTheUser, whose step may read.*expected one of torch's"),
    (Clipping, {}, "Clipping.configure_gradient_clipping comes after backward.*Remove it"),
    (Reading, {}, "Reading.on_after_backward comes after backward"),
    (Lit, {"callbacks": [Watcher()]}, "Watcher.on_before_optimizer_step comes after.*Remove the callback"),
    (BeforeSteps, {}, "AdamW has a hook of register_step_pre_hook"),
    (Lit, {"precision": StaticLossScaler}, "has a StaticLossScaler.*such as 'bf16-mixed'"),
]


def refuses() -> list[str]:
    said = []
    for module, flags, _ in REFUSED:
        strategy = options_of("zero2", **ON)
        if flags.get("precision") is StaticLossScaler:
            plugin = ZeroPrecision("16-true", scaler=StaticLossScaler(8.0))
            strategy, flags = {**strategy, "precision_plugin": plugin}, {}
        lit = module(Recipe())
        before = {name: value.clone() for name, value in lit.state_dict().items()}
        with pytest.raises(ValueError, match="update_in_backward=") as caught:
            make_trainer(strategy, **flags).fit(lit)
        said.append(str(caught.value))
        assert_same({name: value.detach() for name, value in lit.state_dict().items()}, before)
    return said


@ranks(1)
def test_what_decides_about_the_step_is_refused_before_one(pool: RankPool) -> None:
    (said,) = pool.run(refuses)
    wrong = [message for message, (*_, words) in zip(said, REFUSED, strict=True) if not re.search(words, message)]
    assert not wrong


def test_options_that_contradict_it_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got skip_nonfinite=True\. Use skip_nonfinite=False"):
        ZeroStrategy(update_in_backward=True)
    with pytest.raises(ValueError, match="got offload_optimizer='nvme'"):
        ZeroStrategy(**ON, offload_optimizer="nvme", nvme_path="/local")
    with pytest.raises(ValueError, match="works with the Trainer"):
        ZeroFabricStrategy(**ON)
