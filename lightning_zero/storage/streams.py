"""The executor that overlaps: its lanes are streams of the device and threads of the host.

Copies between pinned host memory and the device run on a stream per direction, beside what the device computes. A copy
begins when the submitter's current stream has reached the point where it was submitted, and an event marks its end. No
conversion uses memory that is not pinned: the device converts gradients before they leave it, and the host converts
parameters when it writes them into pinned memory. Where memory cannot be pinned, copies block the host;
:attr:`StreamExecutor.blocked` counts them.

Jobs on host memory run in a thread, which waits for the device's events where they read. Collectives that follow such a
job are issued by another thread, on a stream of its own, when the job has ended. Reductions of gradients, and gathers
that come after copies only, have streams, too. What a job computes on the device in the lane SIDE runs on one more
stream. That stream waits for the job's copies, and not for the training.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero import ops
from lightning_zero.storage.accelerators import device_type
from lightning_zero.storage.executor import DONE, Executor, InlineExecutor, Lane, Staged, Ticket, noting_work
from lightning_zero.storage.staging import Staging
from lightning_zero.storage.threads import FILE_LANES, LaneThreads, ThreadExecutor, in_lane, noting_wait, on_stream

DEFAULT_BYTES = 64 << 20  # for gradients that are reduced, and those on their way to the host
STAGING_BYTES = 256 << 20  # tiles whose fixed cost is small fit in it; see `staged_tile`
_STREAMS = frozenset({Lane.H2D, Lane.D2H, Lane.GATHER, Lane.REDUCE, Lane.SIDE})
_THREADS = FILE_LANES | {Lane.HOST: 1, Lane.COMM: 1}  # number of threads


class _Mark(NamedTuple):
    """An event that a stream has recorded.

    Attributes:
        event: the event.
        stream: the stream of a lane; ``None``: a stream that was the current one of some thread.
        number: of a lane's stream, greater than those of its earlier marks. Who waits for a mark has waited for these.
    """

    event: torch.Event
    stream: torch.Stream | None = None
    number: int = 0


_NUMBERS = itertools.count(1)


def _record(stream: torch.Stream) -> _Mark:
    """Record an event on the stream of a lane; nobody else may do so at the same time."""
    return _Mark(stream.record_event(), stream, next(_NUMBERS))


def _last(marks: Iterable[_Mark]) -> list[_Mark]:
    """The marks to wait for instead of all: the last one of each lane's stream, and those of other streams.

    Otherwise each tile of an update would wait for all tiles before it, one call of the driver for each.
    """
    last: dict[int, _Mark] = {}
    for mark in marks:
        key = id(mark.event if mark.stream is None else mark.stream)
        if key not in last or last[key].number < mark.number:
            last[key] = mark
    return [*last.values()]


class _Job:
    """A job that a thread of a lane runs.

    It knows the marks that it comes after, and those of the work that it has submitted so far. If it has a stream, that
    is the current stream inside of it, and waits for the same marks.
    """

    def __init__(self, begin: Sequence[_Mark], stream: torch.Stream | None) -> None:
        self.begin = list(begin)
        self.made: list[_Mark] = []
        self.stream = stream

    def follow(self, marks: Sequence[_Mark]) -> None:
        """Let what it submits from now on, and whoever waits for it, wait for marks."""
        self.begin = _last([*self.begin, *marks])
        self.submitted(marks)
        if self.stream is not None:
            for mark in marks:
                self.stream.wait_event(mark.event)

    def submitted(self, marks: Sequence[_Mark]) -> None:
        """Let whoever waits for it wait for marks."""
        self.made = _last([*self.made, *marks])

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Makes its stream, if it has one, the current one; it is around everything that the job does."""
        if self.stream is None:
            yield
            return
        with self.stream:
            for mark in self.begin:
                self.stream.wait_event(mark.event)
            yield
            self.submitted([_record(self.stream)])


class _Running(threading.local):
    """The job that the current thread runs.

    Attributes:
        prepared: whether the thread is prepared for the jobs of its lane.
        job: the job of a thread of a lane.
        made: marks of what a job in the lane COMPUTE, which has no thread, has submitted so far.
        kept: tensors that a job on the stream of a lane keeps; ``None`` outside of such jobs.
    """

    prepared = False
    job: _Job | None = None
    made: list[_Mark] | None = None
    kept: list[Tensor] | None = None


_RUNNING = _Running()


class _Work:
    """The ticket of work on a stream, or of a job. A job's ticket stands for what it has submitted to streams, too."""

    def __init__(self, owner: StreamExecutor, lane: Lane, what: str, ended: Future[list[_Mark]]) -> None:
        self._owner = owner
        self._lane = lane
        self._what = what
        self._ended = ended

    def marks(self) -> list[_Mark]:
        """The marks that a stream waits for. The host waits here until the job's thread has ended it."""
        return self._ended.result()

    def done(self) -> bool:
        """Whether the work has ended."""
        return self._ended.done() and all(mark.event.query() for mark in self.marks())

    def wait(self) -> None:
        with noting_wait(self._lane, self._what):
            self._owner.follow(self.marks())

    def synchronize(self) -> None:
        try:
            with noting_wait(self._lane, self._what):
                for mark in self.marks():
                    if not mark.event.query():
                        mark.event.synchronize()
        except Exception as error:
            if not self._ended.exception():  # it is the device's, which does not say what failed
                error.add_note(f"The host was waiting for {self._what}, in the lane {self._lane.name}.")
            raise
        self._owner.release()


@dataclass
class _Copy:
    """A copy, or a job on a stream, that may be under way; it keeps its tensors alive."""

    what: str
    mark: _Mark
    on_host: list[Tensor]
    on_device: list[Tensor]
    leaving: int = 0  # bytes on the device that only this work needs
    owner: torch.Stream | None = None  # that has allocated them, where it is the stream of a lane


class StreamExecutor:
    """Lets copies and computations on host memory run beside the training; see the module's docstring.

    Streams and threads are made when they are first needed.

    Attributes:
        device: the device that trains.
        in_flight_bytes: see :class:`~lightning_zero.storage.executor.Executor`. Where it is exceeded, the stream that
            computes waits for the oldest copies; the host does not wait.
        staging_bytes: see there. Where it is exceeded, the host waits for an earlier copy. One buffer is always
            allowed.
        blocked: bytes that were copied while the host waited, because memory was not pinned, by what they were for.

    Args:
        device: as above.
        in_flight_bytes: as above.
        staging_bytes: as above.
    """

    overlaps = True

    def __init__(
        self, device: torch.device, in_flight_bytes: int = DEFAULT_BYTES, staging_bytes: int = STAGING_BYTES
    ) -> None:
        self.device = device
        self.in_flight_bytes = in_flight_bytes
        self.staging_bytes = staging_bytes
        self.blocked: Counter[str] = Counter()
        # Two pools: a job that fills memory must not wait for memory that a later job of its lane will give back.
        self._leaving, self._arriving = Staging(device, staging_bytes), Staging(device, staging_bytes)
        self._streams: dict[Lane, torch.Stream] = {}
        self._threads: dict[Lane, LaneThreads] = {}
        self._copies: dict[Lane, deque[_Copy]] = {lane: deque() for lane in _STREAMS}
        self._lock = threading.RLock()
        self._submitting = {lane: threading.RLock() for lane in _STREAMS}  # while work is submitted to its stream

    # ------------------------------------------------------------------------------------------------------- copies

    def fetch(self, target: Tensor, source: Tensor, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        if source.dtype != target.dtype:
            for ticket in after:  # the host converts
                ticket.synchronize()
            staged, copied = self._leaving.take(target), DONE
            try:
                staged.tensor.copy_(source)
                copied = self._copy(Lane.H2D, target, staged.tensor, what, ())
            finally:
                self._leaving.give(staged, copied)
            return copied
        return self._copy(Lane.H2D, target, source, what, after)

    def commit(self, target: Tensor, source: Tensor, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        return self._copy(Lane.D2H, target, source, what, after)

    def receive(
        self,
        source: Tensor,
        use: Callable[[Tensor], object],
        what: str,
        after: Sequence[Ticket] = (),
        lane: Lane = Lane.HOST,
    ) -> Ticket:
        staged, used = self._arriving.take(source), DONE
        try:
            used = arrived = self.commit(staged.tensor, source, what)
            used = self._in_thread(lane, partial(use, staged.tensor), what, (*after, arrived))
        finally:
            self._arriving.give(staged, used)
        return used

    @contextlib.contextmanager
    def filling(self, target: Tensor, what: str) -> Iterator[Tensor]:
        staged, copied = self._leaving.take(target), DONE
        try:
            yield staged.tensor
            copied = self._copy(Lane.H2D, target, staged.tensor, what, ())
            copied.wait()
        finally:
            self._leaving.give(staged, copied)

    def take(self, numel: int, dtype: torch.dtype) -> Staged:
        return self._leaving.take(torch.empty(numel, dtype=dtype, device="meta"))

    def give(self, staged: Staged, work: Ticket) -> None:
        self._leaving.give(staged, work)

    def _copy(self, lane: Lane, target: Tensor, source: Tensor, what: str, after: Sequence[Ticket]) -> _Work:
        """Copy between host memory and the device, on the stream of a lane."""
        on_host, on_device = (source, target) if lane is Lane.H2D else (target, source)
        free = on_host.is_pinned() and on_host.is_contiguous() and on_device.is_contiguous()
        if not free:
            self.blocked[what] += on_host.nbytes

        def job() -> None:
            converted = source.to(target.dtype) if lane is Lane.D2H else source
            target.copy_(converted, non_blocking=free)

        return self._on_stream(lane, job, what, after, [on_host], [on_device])

    def _on_stream(
        self,
        lane: Lane,
        job: Callable[[], object],
        what: str,
        after: Sequence[Ticket],
        on_host: Sequence[Tensor] = (),
        on_device: Sequence[Tensor] = (),
    ) -> _Work:
        before = self._begin(after)
        outer, _RUNNING.kept = _RUNNING.kept, []
        try:
            with self._submitting[lane]:  # a lock per stream: while many kernels go to one, others are free
                stream = self._stream(lane)
                try:
                    with on_stream(stream):
                        for mark in before:
                            if mark.stream is not stream:  # it does its work in order
                                stream.wait_event(mark.event)
                        with noting_work(lane, what):
                            job()
                        ended = _record(stream)
                except BaseException:  # nobody keeps the tensors that it has begun to read
                    self.follow([_record(stream)])
                    raise
                leaving = [*(on_device if lane is Lane.D2H else ()), *_RUNNING.kept]
                needed = sum(tensor.nbytes for tensor in leaving)
                owner = None if outer is None else torch.accelerator.current_stream(self.device)
                kept = [*on_device, *_RUNNING.kept]
                self._copies[lane].append(_Copy(what, ended, list(on_host), kept, needed, owner))
                self.release()
        finally:
            _RUNNING.kept = outer
        if needed and outer is None and not in_lane():  # else another stream than the current one uses the memory next
            self._bound(Lane.D2H)
            self._bound(Lane.REDUCE)
        if (running := _RUNNING.job) is not None:
            running.submitted([ended])
        elif _RUNNING.made is not None:
            _RUNNING.made.append(ended)
        return self._made(lane, what, [ended])

    def _made(self, lane: Lane, what: str, marks: list[_Mark]) -> _Work:
        """A ticket of work that was submitted to streams."""
        future: Future[list[_Mark]] = Future()
        future.set_result(marks)
        return _Work(self, lane, what, future)

    def _begin(self, after: Sequence[Ticket]) -> list[_Mark]:
        """The marks that must be reached before work begins. The host waits here for jobs of its own threads."""
        marks = [mark for ticket in after for mark in (ticket.marks() if isinstance(ticket, _Work) else ())]
        running = _RUNNING.job
        return _last([*(self._now() if running is None else running.begin), *marks])

    def _now(self) -> list[_Mark]:
        """A mark of what was submitted to the current stream so far."""
        return [_Mark(torch.accelerator.current_stream(self.device).record_event())]

    def follow(self, marks: Sequence[_Mark]) -> None:
        """Let the current stream wait for marks. In a job, what it still submits and who waits for it wait instead."""
        if (running := _RUNNING.job) is not None:
            running.follow(marks)
            return
        stream = torch.accelerator.current_stream(self.device)
        for mark in marks:
            stream.wait_event(mark.event)

    @property
    def staged_bytes(self) -> int:
        """See :class:`~lightning_zero.storage.executor.Executor`."""
        return self._leaving.nbytes + self._arriving.nbytes

    def keep(self, tensor: Tensor) -> None:
        if _RUNNING.kept is not None:
            _RUNNING.kept.append(tensor)

    def release(self) -> None:
        with self._lock:
            for copies in self._copies.values():
                while copies and copies[0].mark.event.query():
                    copies.popleft()

    def _bound(self, lane: Lane) -> None:
        """Let go of device memory beyond the limit, after the current stream was made to wait for work that uses it.

        It never waits for the last work, which has only begun: what is computed next shall overlap with that.
        """
        with self._lock:
            copies = list(self._copies[lane])  # at once: other threads add to it
            leaving = sum(copy.leaving for copy in copies)
            for copy in copies[:-1]:
                if leaving <= self.in_flight_bytes:
                    return
                if copy.leaving:
                    with noting_wait(lane, copy.what):
                        self.follow([copy.mark])
                    if copy.owner is not None:
                        copy.owner.wait_event(copy.mark.event)
                    leaving -= copy.leaving
                    copy.on_device, copy.leaving = [], 0

    def _stream(self, lane: Lane) -> torch.Stream:
        with self._lock:
            if lane not in self._streams:
                self._streams[lane] = torch.Stream(self.device)
            return self._streams[lane]

    # --------------------------------------------------------------------------------------------------------- jobs

    def submit(self, job: Callable[[], object], lane: Lane, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        if lane in _STREAMS:
            return self._on_stream(lane, job, what, after)
        if lane in _THREADS:
            return self._in_thread(lane, job, what, after)
        for ticket in after:
            ticket.wait()
        before, _RUNNING.made = _RUNNING.made, []
        try:
            with noting_work(lane, what):
                job()
            marks = _last(_RUNNING.made)
        finally:
            _RUNNING.made = before
        return self._made(lane, what, marks) if marks else DONE

    def _in_thread(self, lane: Lane, job: Callable[[], object], what: str, after: Sequence[Ticket]) -> _Work:
        running = _Job(self._now(), self._stream(lane) if lane is Lane.COMM else None)
        run = partial(_run, self.device, job, lane, what, tuple(after), running)
        return _Work(self, lane, what, self._threads_of(lane).submit(run))

    def _threads_of(self, lane: Lane) -> LaneThreads:
        with self._lock:
            if lane not in self._threads:
                self._threads[lane] = LaneThreads(self, lane, _THREADS[lane])
            return self._threads[lane]


def make_executor(
    device: torch.device, overlap: bool, in_flight_bytes: int = DEFAULT_BYTES, staging_bytes: int = STAGING_BYTES
) -> Executor:
    """Make the executor for a training on ``device``.

    Args:
        device: the device. A CPU has no memory of its own and no streams, and so needs no copies.
        overlap: whether work may run beside the training.
        in_flight_bytes: see :class:`StreamExecutor`.
        staging_bytes: see there.
    """
    if not overlap:
        return InlineExecutor()
    return (
        ThreadExecutor()
        if device_type(device).shares_host_memory
        else StreamExecutor(device, in_flight_bytes, staging_bytes)
    )


def _prepare(device: torch.device, lane: Lane) -> None:
    """Prepare the current thread for the jobs of a lane, unless it is prepared."""
    if _RUNNING.prepared:
        return
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    if lane is Lane.HOST:
        ops.work_beside()
    _RUNNING.prepared = True


def _run(
    device: torch.device,
    job: Callable[[], object],
    lane: Lane,
    what: str,
    after: Sequence[Ticket],
    running: _Job,
) -> list[_Mark]:
    """Run a job in the current thread, that of a lane; returns the marks that stand for it."""
    _RUNNING.job = running
    try:
        _prepare(device, lane)
        with running.on_stream():
            for ticket in after:  # if there is a stream, it waits for the device, and the host only for threads
                (ticket.synchronize if running.stream is None else ticket.wait)()
            with noting_work(lane, what):
                job()
        return running.made
    finally:
        _RUNNING.job = None
