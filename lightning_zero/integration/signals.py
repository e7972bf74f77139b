"""Signals that end or requeue a job: SIGTERM, and that of SLURM.

A signal may come to one rank alone, or to each at another place, and more than once. Lightning broadcasts and saves in
its handlers, and ends a rank after its own batch. A rank that does so waits for ranks that wait for it in the training.
So the handlers only note the signal here, and the ranks act at fixed places of the training.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Self

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing.spawn import ProcessExitedException
from typing_extensions import override

from lightning_zero.integration import private
from lightning_zero.integration.patches import Undo, copies_module, replace_methods
from lightning_zero.sharding import Mesh

TERMINATED = 128 + signal.SIGTERM  # the exit status of a rank that SIGTERM has ended between two steps

_SECONDS_TO_LOOK = 1.0
_SECONDS_TO_END = 30.0  # torch, too, gives ranks that long when another has failed

_log = logging.getLogger(__name__)


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
        self._flag = f"run {run} got SIGTERM"
        self._told = False
        self._next_look = 0.0
        self._over = False
        self._signalled = False

    def note(self, trainer: pl.Trainer, signum: int) -> None:
        """Handles the signal on this rank, which passes it on to the ranks that it has started."""
        _log.info("rank %d has got SIGTERM", trainer.global_rank)
        launcher = trainer.strategy.launcher
        if not self._signalled and launcher is not None:
            launcher.kill(signum)
        self._signalled = True
        if self._over or trainer.state.fn != TrainerFn.FITTING:
            self._connector.received_sigterm = True  # nothing can be lost: an evaluation ends after the rank's batch

    def come(self, trainer: pl.Trainer, ask: Callable[[], object]) -> None:
        """Ends the fit if some rank is to end, and no step is half done. Collective.

        Args:
            trainer: that fits.
            ask: Lightning's question, which raises on all ranks if ``received_sigterm`` is true on rank 0.

        Raises:
            SIGTERMException: on all ranks.
        """
        if not _between_steps(trainer):
            return
        if trainer.is_global_zero:
            self._connector.received_sigterm = self._signalled or self._look()
        elif self._signalled and not self._told:
            self._told = True
            self._mesh.board.raise_flag(self._flag)
        try:
            ask()
        except SIGTERMException:
            self._end(trainer)

    def _look(self) -> bool:
        """Whether another rank has told rank 0 of the signal, which looks every second."""
        if (now := time.monotonic()) < self._next_look:
            return False
        self._next_look = now + _SECONDS_TO_LOOK
        return self._mesh.board.is_raised(self._flag)

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        # Ranks may have other numbers of batches, so they do not ask each other in each. One that was signalled waits
        # for the others for a moment; if they were not, or are elsewhere, the fit ends after the validation.
        if trainer.state.fn != TrainerFn.FITTING or not self._signalled or self._told or not _between_steps(trainer):
            return
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if any(map(copies_module, callbacks)):
            return  # an average that is validated is in the place of the weights
        self._told = True
        self._mesh.board.raise_flag(self._flag)
        if self._mesh.board.agree(f"{self._flag} in a validation", self._mesh.position):
            self._end(trainer)

    def _end(self, trainer: pl.Trainer) -> None:
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, _Requeue):  # its signal precedes this one
                callback.ask(trainer)
        self._connector.received_sigterm = True
        raise SIGTERMException

    def leave(self) -> None:
        """Ends the agreement of the ranks: a signal that comes now, or came too late, is for this rank alone."""
        self._over = True
        self._connector.received_sigterm |= self._signalled


def end_together(trainer: pl.Trainer, mesh: Mesh, run: int) -> list[Undo]:
    """Have SIGTERM end a fit before the next step, on all ranks if one of them has got it.

    Lightning asks rank 0 before each batch, whose answer here includes other ranks'.

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
    connector, batches = private.signal_connector(trainer), trainer.fit_loop.epoch_loop
    end, ask = _Terminate(connector, mesh, run), private.ask_method(batches)
    callbacks.append(end)
    return [
        replace_methods(connector, {private.TERMINATE: lambda _, signum, *__: end.note(trainer, signum)}),
        replace_methods(batches, {private.ASK_TO_END: lambda _: end.come(trainer, ask)}),
        lambda: callbacks.remove(end),
        end.leave,
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
        if _between_steps(trainer):
            self.ask(trainer)

    def ask(self, trainer: pl.Trainer) -> None:
        """Saves and requeues the job if some rank was signalled. Collective."""
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


class PassOn:
    """Passes SIGTERM on to the ranks that this process starts meanwhile, whose end ends the launch.

    They end where all of them come, and may save there. Without this the signal would end only this process. Where no
    rank runs, as before the first and after the last, it ends this process. Outside the main thread, which handles all
    signals, it is not passed on. After an error the ranks that still run are ended, too.

    Attributes:
        came: whether SIGTERM has come.
    """

    def __init__(self) -> None:
        self.came = False
        self._others = {*multiprocessing.active_children()}
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Ends the ranks that still run after an error.

        Raises:
            SIGTERMException: from an error that SIGTERM has brought about.
        """
        try:
            if error is not None:
                self._end_ranks()
        finally:
            self.undo()
        self.came |= _is_by_sigterm(error)
        if error is not None and self.came:
            raise SIGTERMException(f"SIGTERM has ended the run: {error}") from error

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handles the signal, then by the handler that was there before."""
        self.came = True
        ranks = self._ranks()
        for rank in ranks:
            rank.terminate()
        if callable(self._before):
            self._before(signum, frame)
        if not ranks:
            raise SIGTERMException("no rank ran")  # in a rank that this process forks now, no success either

    def undo(self) -> None:
        """Gives the signal the handler that was there before."""
        before = self._before or signal.SIG_DFL
        if signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, before)

    def _end_ranks(self) -> None:
        """Ends ranks that still run, as where Ctrl-C has come to this process alone: by SIGTERM, later by SIGKILL."""
        ranks, deadline = self._ranks(), time.monotonic() + _SECONDS_TO_END
        try:
            for rank in ranks:
                rank.terminate()
            for rank in ranks:
                rank.join(max(0.0, deadline - time.monotonic()))
        finally:
            for rank in ranks:
                rank.kill()

    def _ranks(self) -> set[BaseProcess]:
        return {*multiprocessing.active_children()} - self._others


def _is_by_sigterm(error: BaseException | None) -> bool:
    """Whether SIGTERM has ended a rank: between two steps or, before it was ready for the signal, at once."""
    return isinstance(error, ProcessExitedException) and error.exit_code in (TERMINATED, -signal.SIGTERM)


def enter_rank() -> None:
    """Gives SIGTERM the usual handler in a rank that was forked while its process passed the signal on."""
    if isinstance(handler := signal.getsignal(signal.SIGTERM), PassOn):
        handler.undo()


def end_in_peace() -> None:
    """Have SIGTERM not disturb a rank that ends already: it may save, and the end of another rank brings the signal."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _between_steps(trainer: pl.Trainer) -> bool:
    """Whether the last batch of training ended a step: a checkpoint has no gradients of micro-batches before."""
    return trainer.is_last_batch or not (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches
