"""Saves that come unexpectedly: of a run that fails, and of a job that SLURM requeues.

All ranks save together, at the same place of the training. But an error or a signal may come to one of them alone, or
to each at another place. A rank that began to save there would wait for ranks that wait for it in the training.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_zero.integration import private
from lightning_zero.integration.overridden import overrides
from lightning_zero.integration.patches import Undo, replace_methods


class Refusal(Protocol):
    """The error that ends a run, which can say why the run cannot be saved then."""

    def why_no_save(self, trainer: pl.Trainer) -> str:
        """Say why nothing can be saved now; empty if it can."""


def guard_exceptions(trainer: pl.Trainer, failed: Callable[[BaseException], Refusal]) -> list[Undo]:
    """Have callbacks save a run that fails only where all ranks do so, and tell the other ranks of the error before.

    Args:
        trainer: that runs.
        failed: makes the failure of the run, or returns the one that it has made of this error.

    Returns:
        What undoes it.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [_guard(callback, failed) for callback in callbacks if overrides(callback, "on_exception")]


def _guard(callback: Callback, failed: Callable[[BaseException], Refusal]) -> Undo:
    own = callback.on_exception

    def on_exception(
        callback: Callback, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        failure = failed(exception)
        if not _saves(callback):
            own(trainer, pl_module, exception)
        elif reason := failure.why_no_save(trainer):
            exception.add_note(
                f"{type(callback).__name__} has saved nothing: {reason}, which ModelCheckpoint(every_n_train_steps=n) "
                "writes every n steps"
            )
        else:
            try:
                own(trainer, pl_module, exception)
            except Exception as error:  # noqa: BLE001  (raised here, it would hide the other one and stop the teardown)
                exception.add_note(f"{type(callback).__name__} could not save: {error!r}")

    return replace_methods(callback, {"on_exception": on_exception})


def _saves(callback: Callback) -> bool:
    """Whether the callback saves a run that fails."""
    on_exception = isinstance(callback, ModelCheckpoint) and callback.save_on_exception
    return on_exception or isinstance(callback, OnExceptionCheckpoint)


class _Requeue(Callback):
    """Saves and requeues a job where all ranks come, if one of them has got SLURM's signal.

    Args:
        requeue: what Lightning does in the handler of the signal.
        number: of the signal.
    """

    def __init__(self, requeue: Callable[[int, None], object], number: int) -> None:
        self._requeue = requeue
        self._number = number
        self.signalled = False

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._come(trainer)

    @override
    def on_validation_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._come(trainer)

    def _come(self, trainer: pl.Trainer) -> None:
        # A checkpoint has no gradients: those of a step that is accumulated would be lost.
        if (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch:
            return
        if trainer.strategy.reduce_boolean_decision(self.signalled, all=False):
            self._requeue(self._number, None)
            self.signalled = False  # signals that have come meanwhile ask for the same


def requeue_together(trainer: pl.Trainer) -> list[Undo]:
    """Have SLURM's requeueing wait for the end of the step, or of the validation, where the ranks agree on it.

    Lightning saves inside the handler of the signal, which may come at any moment. The ranks ask each other once a
    step, next to Lightning's own question whether to end, and only in a job that SLURM may requeue.

    Returns:
        What undoes it.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return []
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    connector = private.signal_connector(trainer)
    after = _Requeue(private.requeue_method(connector), environment.requeue_signal or signal.SIGUSR1)

    def requeue(*_: Any) -> None:
        after.signalled = True

    callbacks.append(after)
    return [replace_methods(connector, {private.REQUEUE: requeue}), lambda: callbacks.remove(after)]
