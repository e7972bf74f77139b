"""The executor: all that moves between memories, or is computed beside training, goes through it.

Work is submitted to a *lane*, an ordered queue, and returns a *ticket*: whoever needs the result waits for that. Lanes
run independently; what must follow work of another lane names its ticket. An executor may finish work at once, as
:class:`InlineExecutor` does, which is the reference, or at any time before the ticket is waited for: results are the
same bits in every order that tickets allow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import Protocol

from torch import Tensor


class Lane(Enum):
    """Queues in which work is done in the order in which it is submitted."""

    COMPUTE = auto()  # the device's current stream, in order with the training itself
    H2D = auto()  # copies from host memory to the device
    D2H = auto()  # copies from the device to host memory
    HOST = auto()  # computations on host memory
    DISK = auto()  # reads and writes of files


class Ticket(Protocol):
    """Work that has been submitted."""

    def wait(self) -> None:
        """Return when its result can be used by the caller, and by what the caller submits to the current stream.

        Raises:
            Exception: what the work raised, with a note that says what it was for. Again at every call.
        """
        ...


class Executor(Protocol):
    """Moves tensors and runs jobs.

    Tensors that are handed over must neither be changed nor freed before the ticket has been waited for. An error is
    raised where the ticket is waited for, or at once where work ends before its ticket is returned.
    """

    def fetch(self, target: Tensor, source: Tensor, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        """Copy ``source``, in host memory, to ``target`` on the device, in the lane H2D; see :meth:`submit`."""
        ...

    def commit(self, target: Tensor, source: Tensor, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        """Copy ``source``, on the device, to ``target`` in host memory, in the lane D2H; see :meth:`submit`."""
        ...

    def submit(self, job: Callable[[], object], lane: Lane, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        """Run ``job`` in a lane.

        A job may fetch and commit, and wait for that, but not submit to its own lane.

        Args:
            job: what it returns is dropped.
            lane: where.
            what: what it is for, such as the name of a bucket: for messages.
            after: what must have ended before; where one of these has failed, the job fails likewise, without running.
        """
        ...


class _Done:
    """The ticket of work that ended, without error, before the ticket was returned."""

    def wait(self) -> None:
        """Nothing to wait for."""


DONE: Ticket = _Done()


class InlineExecutor:
    """Finishes all work when it is submitted: nothing overlaps, and errors are raised at once."""

    def fetch(self, target: Tensor, source: Tensor, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        return self.submit(partial(target.copy_, source), Lane.H2D, what, after)

    def commit(self, target: Tensor, source: Tensor, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        return self.submit(partial(target.copy_, source), Lane.D2H, what, after)

    def submit(self, job: Callable[[], object], lane: Lane, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        for ticket in after:
            ticket.wait()
        try:
            job()
        except Exception as error:
            error.add_note(f"The work that failed was {what}, in the lane {lane.name}.")
            raise
        return DONE
