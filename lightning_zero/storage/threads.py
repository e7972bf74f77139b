"""The threads of lanes, and the executor of CPU ranks, where only transfers of files run beside the training."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import torch

from lightning_zero.storage.executor import InlineExecutor, Lane, Ticket
from lightning_zero.storage.work_log import WORK_LOG

# Number of threads. With one for reads and one for writes, a disk stands still between two transfers.
FILE_LANES = {Lane.READ: 2, Lane.CHECK: 1, Lane.WRITE: 2}
_EXIT_SECONDS = 5.0  # how long the exit of the process waits for jobs of lanes, one of which may hang

T = TypeVar("T")


class _LaneThread(threading.Thread):
    """A thread of a lane."""


def in_lane() -> bool:
    """Whether the current thread is that of a lane, and not the one that trains."""
    return isinstance(threading.current_thread(), _LaneThread)


class LaneThreads:
    """The threads of a lane. They begin jobs in the order in which these are put, each as soon as it is free.

    No job waits for a later one. So the oldest job that has not ended can always go on, however few the threads are.

    Args:
        owner: when it dies, the threads end after the jobs that were put.
        lane: gives the threads their name.
        count: number of threads.
    """

    def __init__(self, owner: object, lane: Lane, count: int = 1) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._left: deque[None] = deque()  # one entry per job that has not ended; its methods are atomic
        # Daemons, so that a job that hangs holds up neither teardown nor the end of the process.
        self._threads = [_LaneThread(target=self._work, name=f"lane {lane.name}", daemon=True) for _ in range(count)]
        _started.add(self)
        weakref.finalize(owner, self._jobs.put, None)  # first: the system may not have all of the threads
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> bool:
        """Whether jobs have not ended."""
        return bool(self._left) and any(thread.is_alive() for thread in self._threads)  # none is in a forked process

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Let a thread run ``job``; returns a future with its result, or the error that it raises."""
        ended: Future[T] = Future()
        self._left.append(None)
        self._jobs.put(partial(_run, job, ended))
        return ended

    def _work(self) -> None:
        with torch.no_grad():
            while (job := self._jobs.get()) is not None:
                job()
                del job  # so that its tensors do not live until the next job comes
                self._left.pop()
        self._jobs.put(None)  # for the next thread


_started: weakref.WeakSet[LaneThreads] = weakref.WeakSet()


@atexit.register
def drain_lanes() -> None:
    """Wait for the jobs of lanes: a thread that is in a compiled function at the end would abort the process."""
    until = time.monotonic() + _EXIT_SECONDS
    while any(lane.busy for lane in list(_started)) and time.monotonic() < until:
        time.sleep(0.01)
    _started.clear()  # whoever calls this again does not wait for the same jobs again


class _Streams(threading.local):
    """Whether the current stream of this thread is that of a lane."""

    of_lane = False


_STREAMS = _Streams()


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Makes the stream of a lane the current one."""
    before, _STREAMS.of_lane = _STREAMS.of_lane, True
    try:
        with stream:
            yield
    finally:
        _STREAMS.of_lane = before


def on_lane_stream() -> bool:
    """Whether the current stream is that of a lane, and not the one that trains."""
    return _STREAMS.of_lane


def noting_wait(lane: Lane, what: str) -> AbstractContextManager[None]:
    """A context in which the thread or the stream waits for work of a lane. A wait of the training is noted."""
    return nullcontext() if in_lane() or on_lane_stream() else WORK_LOG.wait(lane.name, what)


class _Work:
    """The ticket of a job that a thread runs."""

    def __init__(self, lane: Lane, what: str, ended: Future[Ticket]) -> None:
        self._lane = lane
        self._what = what
        self._ended = ended

    def synchronize(self) -> None:
        with noting_wait(self._lane, self._what):
            self._ended.result()

    wait = synchronize

    def done(self) -> bool:
        if self._ended.done():
            self._ended.result()
        return self._ended.done()


class ThreadExecutor(InlineExecutor):
    """Finishes work when it is submitted, except reads, checks and writes of files, which have threads.

    It is for CPU ranks: their only memory is the host's, and the cores that would do other work are those that train.
    """

    def __init__(self) -> None:
        self._threads: dict[Lane, LaneThreads] = {}
        self._lock = threading.Lock()

    def submit(self, job: Callable[[], object], lane: Lane, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        if lane not in FILE_LANES:
            return super().submit(job, lane, what, after)
        return _Work(lane, what, self._threads_of(lane).submit(partial(super().submit, job, lane, what, tuple(after))))

    def _threads_of(self, lane: Lane) -> LaneThreads:
        with self._lock:
            if lane not in self._threads:
                self._threads[lane] = LaneThreads(self, lane, FILE_LANES[lane])
            return self._threads[lane]


def _run(job: Callable[[], T], ended: Future[T]) -> None:
    try:
        ended.set_result(job())
    except BaseException as error:  # noqa: BLE001  (it is raised where the ticket is waited for)
        ended.set_exception(error)
