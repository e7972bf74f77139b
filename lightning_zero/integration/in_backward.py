"""Checks, before a fit shards anything, whether its updates may begin in backward.

They may not where code runs after backward that could decide about the step or change its gradients: by then some
parameters are updated. Code that does so in a step without being found here gets an error in that step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.integration import private
from lightning_zero.integration.patches import Undo, replace_methods
from lightning_zero.integration.precision import ZeroPrecision
from lightning_zero.update import why_not_in_backward

# Hooks that Lightning calls between the first gradient of a backward and the step.
_OF_MODULES = ("backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
_OF_CALLBACKS = ("on_after_backward", "on_before_optimizer_step")


def check(
    trainer: pl.Trainer, module: pl.LightningModule, optimizers: Sequence[Optimizer], precision: Precision
) -> None:
    """Refuse a fit whose updates cannot begin in backward.

    Raises:
        ValueError: it says why, and what to change.
    """
    for reason, remedy in _reasons(trainer, module, optimizers, precision):
        raise ValueError(f"update_in_backward=True: {reason}. {remedy}, or use update_in_backward=False")


def _reasons(
    trainer: pl.Trainer, module: pl.LightningModule, optimizers: Sequence[Optimizer], precision: Precision
) -> Iterator[tuple[str, str]]:
    """The reasons against it, each with a remedy."""
    name = type(module).__name__
    if not module.automatic_optimization:
        yield (
            f"{name} has automatic_optimization=False, and only its own code knows after which backward a step comes",
            "Use automatic optimization",
        )
    if trainer.gradient_clip_val:  # Lightning does not clip by 0
        yield (
            f"gradient_clip_val={trainer.gradient_clip_val!r} clips gradients when some parameters are updated already",
            "Use gradient_clip_val=None",
        )
    if isinstance(precision, ZeroPrecision) and precision.scaler is not None:
        yield (
            f"precision={precision.precision!r} has a {type(precision.scaler).__name__}, which skips overflowing steps",
            "Use a precision without a loss scaler, such as 'bf16-mixed'",
        )
    if (reason := why_not_in_backward(optimizers)) is not None:
        yield reason, "Use such an optimizer"
    for hook in _OF_MODULES:
        if is_overridden(hook, module):
            yield f"{name}.{hook} {_comes_late(hook)}", "Remove it"
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        for hook in _OF_CALLBACKS:
            if is_overridden(hook, callback, Callback):
                yield f"{type(callback).__name__}.{hook} {_comes_late(hook)}", "Remove the callback"


def _comes_late(hook: str) -> str:
    if hook == "backward":
        return "may change gradients after backward has updated some parameters"
    return "comes after backward, and may read or change gradients by which some parameters are updated already"


def guard_saves(trainer: pl.Trainer, may_be_torn: Callable[[], bool]) -> list[Undo]:
    """Have nothing save a checkpoint in the middle of a step that may be torn, where the save would be an error.

    Callbacks that save when a fit fails save nothing then: the error of the save would take the place of the one with
    which the fit fails, before other ranks learn of that one. SLURM's requeueing waits for the end of the batch.

    Args:
        trainer: that fits.
        may_be_torn: the same on all ranks where all of them are asked at the same place of the fit.

    Returns:
        What undoes it.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    saving = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint | OnExceptionCheckpoint)]
    return [_requeue_later(trainer, may_be_torn), *(_pass_over_torn(callback, may_be_torn) for callback in saving)]


def _pass_over_torn(callback: ModelCheckpoint | OnExceptionCheckpoint, may_be_torn: Callable[[], bool]) -> Undo:
    own = callback.on_exception

    def on_exception(
        callback: Any, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if not may_be_torn():
            own(trainer, pl_module, exception)
        elif isinstance(callback, OnExceptionCheckpoint) or callback.save_on_exception:
            exception.add_note(
                f"{type(callback).__name__} has saved nothing: with update_in_backward=True the backward that failed "
                "may have updated some parameters and not others. Resume from an earlier checkpoint, which "
                "ModelCheckpoint(every_n_train_steps=n) writes every n steps"
            )

    return replace_methods(callback, {"on_exception": on_exception})


class _AfterBatch(Callback):
    """Does at the end of a batch what came in the middle of its step."""

    def __init__(self) -> None:
        self.postponed: list[Callable[[], object]] = []

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        while self.postponed:
            self.postponed.pop(0)()


def _requeue_later(trainer: pl.Trainer, may_be_torn: Callable[[], bool]) -> Undo:
    """Lightning saves and requeues inside the handler of the signal, which may come at any moment."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    connector, after = private.signal_connector(trainer), _AfterBatch()
    own = private.requeue_method(connector)

    def requeue(_: Any, number: int, frame: Any) -> None:
        if may_be_torn():
            after.postponed.append(lambda: own(number, None))
        else:
            own(number, frame)

    restore = replace_methods(connector, {private.REQUEUE: requeue})
    callbacks.append(after)

    def undo() -> None:
        restore()
        callbacks.remove(after)

    return undo
