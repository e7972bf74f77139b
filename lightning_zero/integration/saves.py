"""Saves that come unexpectedly: of a run that fails, and of a job that SLURM requeues.

All ranks save together, at the same place of the training. But an error or a signal may come to one of them alone, or
to each at another place. A rank that began to save there would wait for ranks that wait for it in the training.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lightning_zero.integration import private
from lightning_zero.integration.launchers import tell_why
from lightning_zero.integration.patches import Undo, replace_methods
from lightning_zero.sharding import Mesh, is_communication_error

_TORN = (
    "with update_in_backward=True the backward that failed may have updated some parameters and not others. Resume "
    "from an earlier checkpoint"
)
_APART = (
    "all ranks must save together, and not all of them have failed at the same place of the training, within a few "
    "seconds. Resume from an earlier checkpoint"
)


class Failure:
    """The error that ends a run on this rank. When this object is made, the other ranks are told of it.

    Args:
        error: that ends it.
        mesh: of the ranks.
        launcher: of this process.
        run: number of the run, the same on all ranks.
        torn: whether the weights may be torn on this rank.
    """

    def __init__(self, error: BaseException, mesh: Mesh, launcher: object, run: int, torn: bool) -> None:
        self.error = error
        self._mesh = mesh
        self._run = run
        self._torn = torn
        self._reason: str | None = None
        tell_why(error, mesh.board, launcher)

    def why_no_save(self, trainer: pl.Trainer) -> str:
        """Say why nothing can be saved now; empty on all ranks if it can, since all have failed at the same place."""
        if self._reason is None:
            agreed = self._mesh.board.agree(f"save after run {self._run}", lambda: self._place(trainer))
            self._reason = "" if agreed else _TORN if self._torn else _APART
        return self._reason

    def _place(self, trainer: pl.Trainer) -> str | None:
        """See :meth:`Board.agree`."""
        if self._torn or (self._mesh.world.size > 1 and is_communication_error(self.error)):
            return ""
        try:
            position = self._mesh.position()
        except Exception:  # noqa: BLE001  (of a lane: where it is not the error that ends the run, the teardown notes it)
            return ""
        return position and f"batch {trainer.fit_loop.total_batch_idx} step {trainer.global_step} {position}"


def guard_exceptions(trainer: pl.Trainer, failed: Callable[[BaseException], Failure]) -> list[Undo]:
    """Have callbacks save a run that fails only where all ranks do so, and tell the other ranks of the error before.

    Args:
        trainer: that runs.
        failed: makes the failure of the run, or returns the one that it has made of this error.

    Returns:
        What undoes it.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [_guard(callback, failed) for callback in callbacks if is_overridden("on_exception", callback, Callback)]


def _guard(callback: Callback, failed: Callable[[BaseException], Failure]) -> Undo:
    own = callback.on_exception

    def on_exception(
        callback: Callback, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        failure = failed(exception)
        if _saves(callback) and (reason := failure.why_no_save(trainer)):
            exception.add_note(
                f"{type(callback).__name__} has saved nothing: {reason}, which ModelCheckpoint(every_n_train_steps=n) "
                "writes every n steps"
            )
        else:
            own(trainer, pl_module, exception)

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
        if trainer.strategy.reduce_boolean_decision(self.signalled, all=False):
            self._requeue(self._number, None)
            self.signalled = False  # signals that have come meanwhile ask for the same


def requeue_together(trainer: pl.Trainer) -> list[Undo]:
    """Have SLURM's requeueing wait for the end of the batch, or of the validation, where the ranks agree on it.

    Lightning saves inside the handler of the signal, which may come at any moment. The ranks ask each other once a
    batch, next to Lightning's own question whether to end, and only in a job that SLURM may requeue.

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
