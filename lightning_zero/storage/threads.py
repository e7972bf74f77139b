"""The threads of lanes, and the executor of CPU ranks, where only transfers of files run beside the training."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from lightning_zero.storage.executor import InlineExecutor, Lane, Ticket
from lightning_zero.storage.work_log import WORK_LOG

Jobs = queue.SimpleQueue[Callable[[], None] | None]
_THREADS = frozenset({Lane.READ, Lane.CHECK, Lane.WRITE})
_EXIT_SECONDS = 5.0  # how long the exit of the process waits for jobs of lanes, one of which may hang
_lanes: weakref.WeakKeyDictionary[threading.Thread, Jobs] = weakref.WeakKeyDictionary()


def start_lane(owner: object, jobs: Jobs, work: Callable[[], None], lane: Lane) -> None:
    """Start the thread of a lane.

    Args:
        owner: when it dies, the thread ends: ``jobs`` gets a ``None`` then.
        jobs: the queue of the lane.
        work: what the thread runs: it does the jobs in order, until it finds ``None``.
        lane: gives the thread its name.
    """
    # It is a daemon, so that a job that hangs holds up neither teardown nor the end of the process.
    thread = threading.Thread(target=work, name=f"lane {lane.name}", daemon=True)
    _lanes[thread] = jobs
    thread.start()
    weakref.finalize(owner, jobs.put, None)


@atexit.register
def _drain_lanes() -> None:
    """Wait for the jobs of lanes: a thread that is in a compiled function at the end would abort the process."""
    until = time.monotonic() + _EXIT_SECONDS
    for thread, jobs in list(_lanes.items()):
        done = threading.Event()
        jobs.put(done.set)
        while thread.is_alive() and not done.wait(0.01) and time.monotonic() < until:
            pass


class _Work:
    """The ticket of a job that a thread runs."""

    def __init__(self, lane: Lane, what: str, ended: Future[None]) -> None:
        self._lane = lane
        self._what = what
        self._ended = ended

    def synchronize(self) -> None:
        with WORK_LOG.wait(self._lane.name, self._what):
            self._ended.result()

    wait = synchronize

    def done(self) -> bool:
        if self._ended.done():
            self._ended.result()
        return self._ended.done()


class ThreadExecutor(InlineExecutor):
    """Finishes work when it is submitted, except reads, checks and writes of files, which have a thread each.

    It is for CPU ranks: their only memory is the host's, and the cores that would do other work are those that train.
    """

    def __init__(self) -> None:
        self._threads: dict[Lane, Jobs] = {}

    def submit(self, job: Callable[[], object], lane: Lane, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        if lane not in _THREADS:
            return super().submit(job, lane, what, after)
        ended: Future[None] = Future()
        self._thread(lane).put(partial(_run, partial(super().submit, job, lane, what, tuple(after)), ended))
        return _Work(lane, what, ended)

    def _thread(self, lane: Lane) -> Jobs:
        if lane not in self._threads:
            jobs: Jobs = queue.SimpleQueue()
            self._threads[lane] = jobs
            start_lane(self, jobs, partial(_work, jobs), lane)
        return self._threads[lane]


def _work(jobs: Jobs) -> None:
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            job()
            del job  # so that its tensors do not live until the next job comes


def _run(job: Callable[[], object], ended: Future[None]) -> None:
    try:
        job()
        ended.set_result(None)
    except BaseException as error:  # noqa: BLE001  (it is raised where the ticket is waited for)
        ended.set_exception(error)
