"""The executor that overlaps: lanes are streams of the device and threads of the host.

Copies between pinned host memory and the device run on a stream per direction, beside what the device computes. They
begin when the stream of whoever submits them has reached that point, and an event marks their end. Nothing converts
through memory that is not pinned: gradients are converted by the device before they leave it, parameters by the host
on their way into pinned memory. Where memory cannot be pinned, copies block, which :attr:`StreamExecutor.blocked`
counts. Jobs on host memory run in a thread, which takes the device's events into account where they read. Collectives
that come after such a job are issued by another thread, on a stream of its own, once that has ended. What a job has the
device compute in the lane SIDE runs on one more stream, which waits for the job's copies and not for the training.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from lightning_zero import ops
from lightning_zero.storage.accelerators import device_type
from lightning_zero.storage.executor import DONE, Executor, InlineExecutor, Lane, Staged, Ticket, noting_work
from lightning_zero.storage.staging import Staging
from lightning_zero.storage.threads import Jobs, ThreadExecutor, start_lane
from lightning_zero.storage.work_log import WORK_LOG

DEFAULT_BYTES = 64 << 20  # of gradients on their way to the host, and of staging memory
_STREAMS = frozenset({Lane.H2D, Lane.D2H, Lane.SIDE})
_THREADS = frozenset({Lane.HOST, Lane.READ, Lane.WRITE, Lane.COMM})


class _Job:
    """A job that a thread of a lane runs: what it comes after, and what it has submitted so far.

    Where it has a stream, that is the current one inside, and waits for what the job waits for.
    """

    def __init__(self, begin: Sequence[torch.Event], stream: torch.Stream | None) -> None:
        self.begin = list(begin)
        self.made: list[torch.Event] = []
        self.stream = stream

    def follow(self, events: Sequence[torch.Event]) -> None:
        """Have what it submits from now on, and those who wait for it, wait for events."""
        self.begin += events
        self.made += events
        if self.stream is not None:
            for event in events:
                self.stream.wait_event(event)

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Around all that it does."""
        if self.stream is None:
            yield
            return
        with self.stream:
            for event in self.begin:
                self.stream.wait_event(event)
            yield
            self.made.append(self.stream.record_event())


class _Running(threading.local):
    """The job that this thread runs."""

    job: _Job | None = None


_RUNNING = _Running()


def in_lane() -> bool:
    """Whether the caller runs in a thread of a lane, rather than in one that trains."""
    return _RUNNING.job is not None


class _Work:
    """The ticket of work on a stream, or of a job, which stands for what the job has submitted to streams, too."""

    def __init__(self, owner: StreamExecutor, lane: Lane, what: str, ended: Future[list[torch.Event]]) -> None:
        self._owner = owner
        self._lane = lane
        self._what = what
        self._ended = ended

    def events(self) -> list[torch.Event]:
        """Events that a stream waits for; the host waits for what is done by a thread."""
        return self._ended.result()

    def done(self) -> bool:
        """Whether the work has ended."""
        return self._ended.done() and all(event.query() for event in self.events())

    def wait(self) -> None:
        with self._noting_wait():
            self._owner.follow(self.events())

    def _noting_wait(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if in_lane() else WORK_LOG.wait(self._lane.name, self._what)

    def synchronize(self) -> None:
        try:
            with self._noting_wait():
                for event in self.events():
                    if not event.query():
                        event.synchronize()
        except Exception as error:
            if not self._ended.exception():  # of the device, which does not say what failed
                error.add_note(f"The host was waiting for {self._what}, in the lane {self._lane.name}.")
            raise
        self._owner.release()


@dataclass
class _Copy:
    """A copy that may be under way: its tensors stay alive until it has ended."""

    event: torch.Event
    on_host: list[Tensor]
    on_device: list[Tensor]
    leaving: int = field(default=0)  # bytes on the device that nobody else needs


class StreamExecutor:
    """Lets copies and computations on host memory run beside the training; see the module's docstring.

    Streams and threads are made when they are first needed.

    Attributes:
        device: that trains.
        in_flight_bytes: see :class:`~lightning_zero.storage.executor.Executor`. Beyond them the stream that computes
            waits for the oldest copies, and the host does not.
        staging_bytes: see there. Beyond them the host waits for an earlier copy; one buffer there always is.
        blocked: bytes that were copied while the host waited, since memory was not pinned, by what they were for.

    Args:
        device: as above.
        in_flight_bytes: as above.
        staging_bytes: as above.
    """

    overlaps = True

    def __init__(
        self, device: torch.device, in_flight_bytes: int = DEFAULT_BYTES, staging_bytes: int = DEFAULT_BYTES
    ) -> None:
        self.device = device
        self.in_flight_bytes = in_flight_bytes
        self.staging_bytes = staging_bytes
        self.blocked: Counter[str] = Counter()
        # Apart: a job that fills memory never waits for memory that a later job of its lane will give back.
        self._leaving, self._arriving = Staging(device, staging_bytes), Staging(device, staging_bytes)
        self._streams: dict[Lane, torch.Stream] = {}
        self._threads: dict[Lane, Jobs] = {}
        self._copies: dict[Lane, deque[_Copy]] = {lane: deque() for lane in _STREAMS}
        self._lock = threading.RLock()
        self._submitting = {lane: threading.RLock() for lane in _STREAMS}  # of the work that goes to its stream

    # ------------------------------------------------------------------------------------------------------- copies

    def fetch(self, target: Tensor, source: Tensor, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        if source.dtype != target.dtype:
            for ticket in after:  # the host converts
                ticket.synchronize()
            staged = self._leaving.take(target)
            staged.tensor.copy_(source)
            ticket = self._copy(Lane.H2D, target, staged.tensor, what, ())
            self._leaving.give(staged, ticket)
            return ticket
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
        staged = self._arriving.take(source)
        arrived = self.commit(staged.tensor, source, what)
        used = self._in_thread(lane, partial(use, staged.tensor), what, (*after, arrived))
        self._arriving.give(staged, used)
        return used

    @contextlib.contextmanager
    def filling(self, target: Tensor, what: str) -> Iterator[Tensor]:
        staged = self._leaving.take(target)
        yield staged.tensor
        ticket = self._copy(Lane.H2D, target, staged.tensor, what, ())
        ticket.wait()
        self._leaving.give(staged, ticket)

    def take(self, numel: int, dtype: torch.dtype) -> Staged:
        return self._leaving.take(torch.empty(numel, dtype=dtype, device="meta"))

    def give(self, staged: Staged, work: Ticket) -> None:
        self._leaving.give(staged, work)

    def _copy(self, lane: Lane, target: Tensor, source: Tensor, what: str, after: Sequence[Ticket]) -> _Work:
        """Copy between host and device on the stream of a lane."""
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
        with self._submitting[lane]:  # while many kernels are submitted to one stream, the others are free
            stream = self._stream(lane)
            with stream:
                for event in before:
                    stream.wait_event(event)
                with noting_work(lane, what):
                    job()
                ended = stream.record_event()
            leaving = sum(tensor.nbytes for tensor in on_device) if lane is Lane.D2H else 0
            self._copies[lane].append(_Copy(ended, list(on_host), list(on_device), leaving))
            self.release()
            if leaving and not in_lane():
                self._bound(self._copies[lane])
        if (running := _RUNNING.job) is not None:
            running.made.append(ended)
        future: Future[list[torch.Event]] = Future()
        future.set_result([ended])
        return _Work(self, lane, what, future)

    def _begin(self, after: Sequence[Ticket]) -> list[torch.Event]:
        """Events that the device must have reached before work begins; the host waits for work of its own threads."""
        events = [event for ticket in after for event in (ticket.events() if isinstance(ticket, _Work) else ())]
        if (running := _RUNNING.job) is not None:
            return [*running.begin, *events]
        return [torch.accelerator.current_stream(self.device).record_event(), *events]

    def follow(self, events: Sequence[torch.Event]) -> None:
        """Have the current stream wait for events; in a job, those who wait for the job, and what it still submits."""
        if (running := _RUNNING.job) is not None:
            running.follow(events)
            return
        stream = torch.accelerator.current_stream(self.device)
        for event in events:
            stream.wait_event(event)

    @property
    def staged_bytes(self) -> int:
        """See :class:`~lightning_zero.storage.executor.Executor`."""
        return self._leaving.nbytes + self._arriving.nbytes

    def release(self) -> None:
        """Let go of the tensors of copies that have ended."""
        with self._lock:
            for copies in self._copies.values():
                while copies and copies[0].event.query():
                    copies.popleft()

    def _bound(self, copies: deque[_Copy]) -> None:
        """Let go of device memory beyond the limit, which later work on the current stream may use: that waits.

        Not for the last copy, which has only begun: however large it is, what is computed next overlaps with it.
        """
        with self._lock:
            leaving = sum(copy.leaving for copy in copies)
            for copy in list(copies)[:-1]:
                if leaving <= self.in_flight_bytes:
                    return
                if copy.leaving:
                    self.follow([copy.event])
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
        with noting_work(lane, what):
            job()
        return DONE

    def _in_thread(self, lane: Lane, job: Callable[[], object], what: str, after: Sequence[Ticket]) -> _Work:
        future: Future[list[torch.Event]] = Future()
        begin = [torch.accelerator.current_stream(self.device).record_event()]
        running = _Job(begin, self._stream(lane) if lane is Lane.COMM else None)
        self._thread(lane).put(partial(_run, job, lane, what, tuple(after), running, future))
        return _Work(self, lane, what, future)

    def _thread(self, lane: Lane) -> Jobs:
        with self._lock:
            if lane not in self._threads:
                jobs = self._threads[lane] = queue.SimpleQueue()
                start_lane(self, jobs, partial(_work, jobs, self.device, lane), lane)
            return self._threads[lane]


def make_executor(device: torch.device, overlap: bool, staging_bytes: int = DEFAULT_BYTES) -> Executor:
    """The executor for a training on ``device``.

    Args:
        device: one that takes the host's memory, as CPU ranks do, has nothing to copy, and no streams.
        overlap: let work run beside the training.
        staging_bytes: of one that has streams; see :class:`StreamExecutor`.
    """
    if not overlap:
        return InlineExecutor()
    return (
        ThreadExecutor()
        if device_type(device).shares_host_memory
        else StreamExecutor(device, staging_bytes=staging_bytes)
    )


def _work(jobs: Jobs, device: torch.device, lane: Lane) -> None:
    """Runs the jobs of a lane, in a thread of its own, until the executor is gone."""
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    if lane is Lane.HOST:
        ops.work_beside()
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            job()
            del job  # what it refers to need not live until the next one comes


def _run(
    job: Callable[[], object],
    lane: Lane,
    what: str,
    after: Sequence[Ticket],
    running: _Job,
    ended: Future[list[torch.Event]],
) -> None:
    _RUNNING.job = running
    try:
        with running.on_stream():
            for ticket in after:  # a stream waits for what the device does, the host only for what threads do
                (ticket.synchronize if running.stream is None else ticket.wait)()
            with noting_work(lane, what):
                job()
        ended.set_result(running.made)
    except BaseException as error:  # noqa: BLE001  (it is raised where the ticket is waited for)
        ended.set_exception(error)
    finally:
        _RUNNING.job = None
