"""Signals that end or requeue a job: SIGTERM, and that of SLURM.

A signal may come to one rank alone, or to each at another place, and more than once. Lightning broadcasts and saves in
its handlers, and ends a rank after its own batch. A rank that does so waits for ranks that wait for it in the training.
So the handlers only note the signal here, and the ranks ask each other at fixed places of the training.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_zero.integration import private
from lightning_zero.integration.patches import Undo, replace_methods
from lightning_zero.sharding import Mesh


class _Terminate(Callback):
    """Ends a fit where all ranks come, if one of them has got SIGTERM.

    Args:
        connector: Lightning's, which handles signals.
        mesh: of the ranks.
        run: number of the run, the same on all ranks.
    """

    def __init__(self, connector: Any, mesh: Mesh, run: int) -> None:
        self._connector = connector
        self._mesh = mesh
        self._run = run
        self._asked = False
        self.signalled = False

    def note(self, trainer: pl.Trainer, signum: int) -> None:
        """Handles the signal on this rank, which passes it on to the ranks that it has started."""
        launcher = trainer.strategy.launcher
        if not self.signalled and launcher is not None:
            launcher.kill(signum)
        self.signalled = True
        if trainer.state.fn != TrainerFn.FITTING:
            self._connector.received_sigterm = True  # nothing can be lost: this rank ends after its batch

    def come(self, trainer: pl.Trainer) -> None:
        """Ends the fit if some rank is to end. Collective.

        Raises:
            SIGTERMException: on all ranks.
        """
        with self._mesh.world.explaining("ask whether a rank has got SIGTERM"):
            ends = trainer.strategy.reduce_boolean_decision(self.signalled, all=False)
        if ends:
            self._connector.received_sigterm = True
            raise SIGTERMException

    @override
    def on_validation_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.come(trainer)

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        # Ranks may have other numbers of batches, so they do not ask each other in each. One that was signalled waits
        # for the others for a moment; if they were not, or are elsewhere, the fit ends after the validation.
        if trainer.state.fn == TrainerFn.FITTING and self.signalled and not self._asked:
            self._asked = True
            question = f"end run {self._run} in a validation"
            self._connector.received_sigterm = self._mesh.board.agree(question, self._mesh.position)

    @override
    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING and self._connector.received_sigterm:
            raise SIGTERMException  # agreed upon in this rank's last batch, after which the loop does not end by itself


def end_together(trainer: pl.Trainer, mesh: Mesh, run: int) -> list[Undo]:
    """Have SIGTERM end a fit before the next batch or validation, on all ranks if one of them has got it.

    This takes the place of Lightning's question before each batch, which asks rank 0 alone.

    Args:
        trainer: that runs.
        mesh: of the ranks.
        run: number of the run, the same on all ranks.

    Returns:
        What undoes it.
    """
    if trainer.world_size == 1:
        return []
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    connector, loop = private.signal_connector(trainer), trainer.fit_loop.epoch_loop
    end = _Terminate(connector, mesh, run)

    def tell() -> None:
        callbacks.remove(end)
        connector.received_sigterm |= end.signalled  # also of a signal that came too late to end the fit

    callbacks.append(end)
    return [
        replace_methods(connector, {private.TERMINATE: lambda _, signum, *__: end.note(trainer, signum)}),
        replace_methods(loop, {private.ASK_TO_END: lambda _: end.come(trainer)}),
        tell,
    ]


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
