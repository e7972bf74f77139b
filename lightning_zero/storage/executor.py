"""The executor: all that moves between memories, or is computed beside training, goes through it.

Work is submitted to a *lane*, an ordered queue, and returns a *ticket*: whoever needs the result waits for that. Lanes
run independently; what must follow work of another lane names its ticket. An executor may finish work at once, as
:class:`InlineExecutor` does, which is the reference, or at any time before the ticket is waited for, as
:class:`~lightning_zero.storage.streams.StreamExecutor` does: results are the same bits in every order that tickets
allow.

A ticket is waited for in one of two ways, as an event of torch. What will be read by the device is waited for by its
stream (:meth:`Ticket.wait`), which costs the host nothing. The host waits (:meth:`Ticket.synchronize`) before it reads
what arrives in its own memory, and before it overwrites what is still being copied from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lightning_zero.storage.work_log import WORK_LOG


class Lane(Enum):
    """Queues in which work is done in the order in which it is submitted."""

    COMPUTE = auto()  # the device's current stream, in order with the training itself
    H2D = auto()  # copies from host memory to the device
    D2H = auto()  # copies from the device to host memory
    HOST = auto()  # computations on host memory
    READ = auto()  # reads of files
    WRITE = auto()  # writes of files
    COMM = auto()  # collectives that wait for other lanes, issued beside the training
    SIDE = auto()  # computations of the device beside the training, on a stream of their own


_ON_HOST = frozenset({Lane.HOST, Lane.READ, Lane.WRITE})


class Ticket(Protocol):
    """Work that has been submitted."""

    def wait(self) -> None:
        """Have the current stream wait: what the caller submits to it from now on finds the result.

        The host waits only where the work is the host's own. In a job, those wait who wait for the job.

        Raises:
            Exception: what the work raised, with a note that says what it was for. Again at every call.
        """
        ...

    def synchronize(self) -> None:
        """Have the host wait: it finds the result in its memory, and may change what the work has read.

        Raises:
            Exception: as above.
        """
        ...

    def done(self) -> bool:
        """Whether the work has ended, so that nobody would have to wait.

        Raises:
            Exception: as above.
        """
        ...


@dataclass(eq=False)
class Staged:
    """Host memory in passing: a buffer, and the tensor that was asked for, which is a part of it."""

    buffer: Tensor  # 1-D, bytes
    tensor: Tensor


class Executor(Protocol):
    """Moves tensors and runs jobs.

    What has been submitted to the caller's current stream before is done first. Tensors that are handed over stay alive
    until the work is done; before that nobody may change them, but for work that comes after the ticket. An error is
    raised where the ticket is waited for, or at once where work ends before its ticket is returned.

    Attributes:
        overlaps: whether work may go on beside the training.
        in_flight_bytes: of device memory that copies to the host may keep after everyone else has let go of it; the
            last one keeps its own, however large it is.
        staging_bytes: of host memory in passing that it may keep, per direction; 0: none is kept.
        staged_bytes: that it keeps now.
    """

    overlaps: bool
    in_flight_bytes: int
    staging_bytes: int

    @property
    def staged_bytes(self) -> int: ...

    def fetch(self, target: Tensor, source: Tensor, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        """Copy ``source``, in host memory, to ``target`` on the device, in the lane H2D; see :meth:`submit`."""
        ...

    def commit(self, target: Tensor, source: Tensor, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        """Copy ``source``, on the device, to ``target`` in host memory, in the lane D2H; see :meth:`submit`."""
        ...

    def receive(
        self,
        source: Tensor,
        use: Callable[[Tensor], object],
        what: str,
        after: Sequence[Ticket] = (),
        lane: Lane = Lane.HOST,
    ) -> Ticket:
        """Copy ``source``, on the device, to host memory in passing, and call ``use`` with that in a lane."""
        ...

    def filling(self, target: Tensor, what: str) -> AbstractContextManager[Tensor]:
        """Host memory in passing with the form of ``target``, on the device, to which it is copied in the end.

        It must be written inside the context; who waits for the job, or else the current stream, waits for the copy.
        """
        ...

    def take(self, numel: int, dtype: torch.dtype) -> Staged:
        """Host memory in passing that values of the device are copied to and back from; 1-D.

        A job that takes memory gives it back itself.
        """
        ...

    def give(self, staged: Staged, work: Ticket) -> None:
        """Give back what was taken, and ``work`` still uses: copies, and no jobs."""
        ...

    def submit(self, job: Callable[[], object], lane: Lane, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        """Run ``job`` in a lane.

        A job may fetch and commit, and wait for that, but not submit to its own lane. Its ticket stands for all that it
        submits, too.

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

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def done(self) -> bool:
        return True


DONE: Ticket = _Done()


class InlineExecutor:
    """Finishes all work when it is submitted: nothing overlaps, and errors are raised at once."""

    overlaps = False
    in_flight_bytes = staging_bytes = staged_bytes = 0

    def fetch(self, target: Tensor, source: Tensor, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        return self.submit(partial(target.copy_, source), Lane.H2D, what, after)

    def commit(self, target: Tensor, source: Tensor, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        return self.submit(partial(target.copy_, source), Lane.D2H, what, after)

    def receive(
        self,
        source: Tensor,
        use: Callable[[Tensor], object],
        what: str,
        after: Sequence[Ticket] = (),
        lane: Lane = Lane.HOST,
    ) -> Ticket:
        arrived = torch.empty_like(source, device="cpu")
        return self.submit(partial(use, arrived), lane, what, (*after, self.commit(arrived, source, what)))

    @contextmanager
    def filling(self, target: Tensor, what: str) -> Iterator[Tensor]:
        filled = torch.empty_like(target, device="cpu")
        yield filled
        self.fetch(target, filled, what)

    def take(self, numel: int, dtype: torch.dtype) -> Staged:
        buffer = torch.empty(numel * dtype.itemsize, dtype=torch.uint8)
        return Staged(buffer, buffer.view(dtype))

    def give(self, staged: Staged, work: Ticket) -> None:
        """Nothing is kept."""

    def submit(self, job: Callable[[], object], lane: Lane, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        for ticket in after:
            ticket.synchronize()
        with noting_work(lane, what):
            job()
        return DONE


@contextmanager
def noting_work(lane: Lane, what: str) -> Iterator[None]:
    """Say in an error of what is done inside which work has failed, and note the time that it takes."""
    try:
        with WORK_LOG.work(lane.name, what, lane not in _ON_HOST):
            yield
    except BaseException as error:
        error.add_note(f"The work that failed was {what}, in the lane {lane.name}.")
        raise
