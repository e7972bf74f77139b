"""The error that ends a run: what other ranks are told of it, whether the run can be saved then, and its teardown."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import TracebackType

import lightning.pytorch as pl

from lightning_zero.integration.launchers import ScriptLauncher
from lightning_zero.sharding import Board, CollectiveError, Mesh, Subject, is_communication_error, tells_an_end

_TORN = (
    "the step that failed may have updated some parameters and not others, as may one that updates in backward. "
    "Resume from an earlier checkpoint"
)
_APART = (
    "all ranks must save together, which they can where all of them have failed at the same place of the training, "
    "within a few seconds, and still reach each other. Resume from an earlier checkpoint"
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
        _tell_why(error, mesh.board, launcher)

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
            self._torn = True  # an update beside the training may have failed
            return ""
        return position and f"batch {trainer.fit_loop.total_batch_idx} step {trainer.global_step} {position}"


def tell_of_uncaught(board: Board) -> None:
    """Have this process tell the other ranks of an error that nobody catches, before Python prints it."""
    print_it, known = sys.excepthook, weakref.ref(board)  # the hook outlives the process group of the board

    def tell(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            if (board := known()) is not None:
                _tell_why(error, board, None)
        finally:
            print_it(kind, error, traceback)

    sys.excepthook = tell


def noting(failure: BaseException | None, end: Callable[[], object]) -> None:
    """Ends a part of a fit. If the fit has failed, an error here becomes a note of that failure."""
    try:
        end()
    except Exception as error:
        if failure is None:
            raise
        failure.add_note(f"The teardown after it failed too: {error!r}")


def _tell_why(exception: BaseException, board: Board, launcher: object) -> None:
    """Report this rank's error to the ranks that wait for it. If it waited itself, add why another rank is missing.

    Args:
        exception: the error that ends this rank's fit.
        board: of the ranks.
        launcher: of this process; ``None``: it has started no ranks that it knows of.
    """
    if not is_communication_error(exception):
        board.put(Subject.FAILURE, " ".join(f"{type(exception).__name__}: {exception}".split()))
        return
    # Errors of Lightning's own collectives do not name the cause.
    if not isinstance(exception, CollectiveError) and (cause := _cause(exception, board)):
        exception.add_note(cause)
    if isinstance(launcher, ScriptLauncher) and (ended := launcher.ended_by_signal()):
        exception.add_note(ended)


def _cause(exception: BaseException, board: Board) -> str:
    if cause := board.explain():
        return cause
    missing = board.describe(board.find_missing(None, tells_an_end(str(exception))))
    late = f"{missing} did not come: it was killed, or its node or the network to it is down" if missing else ""
    return board.explain() or late
