"""The executor: everything that moves between memories, or is computed beside the training, goes through it.

Work is submitted to a *lane*, which is a queue, and returns a *ticket*. Whoever needs the result waits for the ticket.
Lanes run independently of each other; work that must follow work of another lane names that one's ticket. An
executor may finish work at once, or at any time before someone waits for its ticket: results have the same bits in
every order that tickets allow. :class:`InlineExecutor` does the first and is the reference;
:class:`~lightning_zero.storage.streams.StreamExecutor` does the second.

As with torch's events there are two ways to wait. :meth:`Ticket.wait` is for results that the device will use: its
stream waits, and the host goes on. :meth:`Ticket.synchronize` is for the host, before it reads what arrives in its
memory, or overwrites what is still being copied from there.
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
    """Queues. The work in each of them is done in the order in which it was submitted, except in READ and WRITE.

    These two may do several jobs at a time, so that a disk does not stand still between two transfers. Jobs begin in
    the order in which they were submitted, and may end in another. So they name the tickets that they must follow, also
    those of their own lane.
    """

    COMPUTE = auto()  # the device's current stream, in order with the training itself
    H2D = auto()  # copies from host memory to the device
    D2H = auto()  # copies from the device to host memory
    HOST = auto()  # computations on host memory
    READ = auto()  # reads of files
    CHECK = auto()  # checks of what was read, so that the next read need not wait for them
    WRITE = auto()  # writes of files, and sums of what is written
    COMM = auto()  # collectives that wait for jobs of other lanes; a thread issues them
    GATHER = auto()  # collectives that wait for copies only, beside the training, on a stream of their own
    REDUCE = auto()  # reductions of gradients beside the training, on a stream of their own
    SIDE = auto()  # computations on the device beside the training, on a stream of their own


_ON_HOST = frozenset({Lane.HOST, Lane.READ, Lane.CHECK, Lane.WRITE})


class Ticket(Protocol):
    """Work that has been submitted."""

    def wait(self) -> None:
        """Have the current stream wait, so that what the caller submits to it from now on finds the result.

        The host waits only for work that it does itself. Inside a job, it is whoever waits for the job that waits.

        Raises:
            Exception: the one that the work raised, with a note that names the work; at every call.
        """
        ...

    def synchronize(self) -> None:
        """Have the host wait. Then the result is in its memory, and it may change what the work has read.

        Raises:
            Exception: as above.
        """
        ...

    def done(self) -> bool:
        """Whether the work has ended.

        Raises:
            Exception: as above.
        """
        ...


@dataclass(eq=False)
class Staged:
    """Memory of a pool: a buffer, and the tensor that was asked for, which is a part of it."""

    buffer: Tensor  # 1-D, bytes
    tensor: Tensor


class Executor(Protocol):
    """Moves tensors and runs jobs.

    Work comes after everything that was submitted to the caller's current stream before. The executor keeps the tensors
    alive that it is given until the work has ended. Until then only work that comes after the ticket may change them.
    An error is raised where someone waits for the ticket, or at once where the work ends before the ticket is returned.

    Attributes:
        overlaps: whether work may go on beside the training.
        in_flight_bytes: device memory that copies to the host may keep alive after everyone else has let go of it, and
            as much that other lanes :meth:`keep`. The last copy, and the last job, keep their own in any case.
        staging_bytes: host memory that it may keep as buffers, per direction; 0: it keeps none.
        staged_bytes: host memory that it keeps now.
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
        """Copy ``source``, on the device, to a buffer in host memory, and call ``use`` with the buffer in a lane."""
        ...

    def filling(self, target: Tensor, what: str) -> AbstractContextManager[Tensor]:
        """Gives a buffer in host memory with the form of ``target``, on the device, to which it is copied at the end.

        All of it must be written inside the context. The current stream waits for the copy; inside a job, whoever waits
        for the job does.
        """
        ...

    def take(self, numel: int, dtype: torch.dtype) -> Staged:
        """Take a 1-D buffer in host memory for values that are copied from the device and back.

        A job that takes one gives it back itself.
        """
        ...

    def give(self, staged: Staged, work: Ticket) -> None:
        """Give a buffer back, which is used again when ``work``, copies and not jobs, has ended."""
        ...

    def submit(self, job: Callable[[], object], lane: Lane, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        """Run ``job`` in a lane.

        A job may fetch and commit, and wait for that, but may not submit to its own lane. Its ticket stands for what it
        submits, too, unless the lane is a stream of the device: then it stands for the work of this stream.

        Args:
            job: is called; what it returns is ignored.
            lane: where it runs.
            what: what it is for, such as the name of a bucket, for messages.
            after: work that must have ended before. If some of it has failed, the job fails in the same way and does
                not run.
        """
        ...

    def keep(self, tensor: Tensor) -> None:
        """Keep a tensor that a job on a stream of the device uses alive until this job's work has ended."""
        ...

    def release(self) -> None:
        """Let go of the tensors of work that has ended."""
        ...


class _Done:
    """The ticket of work that ended without an error before the ticket was returned."""

    def wait(self) -> None:
        """Do nothing: the work has ended."""

    def synchronize(self) -> None:
        """Do nothing: the work has ended."""

    def done(self) -> bool:
        return True


DONE: Ticket = _Done()


class InlineExecutor:
    """Finishes work when it is submitted: nothing overlaps, and errors are raised at once."""

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
        buffer = torch.empty(numel * dtype.itemsize, dtype=torch.uint8, device="cpu")
        return Staged(buffer, buffer.view(dtype))

    def give(self, staged: Staged, work: Ticket) -> None:
        """Do nothing: no buffers are kept."""

    def submit(self, job: Callable[[], object], lane: Lane, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        for ticket in after:
            ticket.synchronize()
        with noting_work(lane, what):
            job()
        return DONE

    def keep(self, tensor: Tensor) -> None:
        """Do nothing: the job's work ends before anyone else runs."""

    def release(self) -> None:
        """Do nothing: nothing is kept."""


@contextmanager
def noting_work(lane: Lane, what: str) -> Iterator[None]:
    """Note the time of the work that is done inside; if it fails, add to the error which work it was."""
    try:
        with WORK_LOG.work(lane.name, what, lane not in _ON_HOST):
            yield
    except BaseException as error:
        error.add_note(f"The work that failed was {what}, in the lane {lane.name}.")
        raise
