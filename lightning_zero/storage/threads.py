"""Threads of lanes, and the executor of CPU ranks: only the disk works beside the training."""

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
_THREADS = frozenset({Lane.READ, Lane.WRITE})
_EXIT_SECONDS = 5.0  # in which lanes end their jobs when the process exits: one that hangs holds it up no longer
_lanes: weakref.WeakKeyDictionary[threading.Thread, Jobs] = weakref.WeakKeyDictionary()


def start_lane(owner: object, jobs: Jobs, work: Callable[[], None], lane: Lane) -> None:
    """Start the thread of a lane.

    Args:
        owner: with which it ends: then ``jobs`` get a ``None``.
        jobs: that are done in order.
        work: takes them, until it finds ``None``.
        lane: its name.
    """
    # A daemon: one that hangs holds up neither teardown nor the end of the process.
    thread = threading.Thread(target=work, name=f"lane {lane.name}", daemon=True)
    _lanes[thread] = jobs
    thread.start()
    weakref.finalize(owner, jobs.put, None)


@atexit.register
def _drain_lanes() -> None:
    """Wait for the jobs of lanes: a thread in a compiled function would end the process, by an abort."""
    until = time.monotonic() + _EXIT_SECONDS
    for thread, jobs in list(_lanes.items()):
        done = threading.Event()
        jobs.put(done.set)
        while thread.is_alive() and not done.wait(0.01) and time.monotonic() < until:
            pass


class _Work:
    """The ticket of a job in a thread."""

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
    """Finishes all work when it is submitted, but reads and writes of files: each have a thread, from the first job on.

    Host memory is all the memory there is, and its cores are those that train.
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
            del job  # what it refers to need not live until the next one comes


def _run(job: Callable[[], object], ended: Future[None]) -> None:
    try:
        job()
        ended.set_result(None)
    except BaseException as error:  # noqa: BLE001  (it is raised where the ticket is waited for)
        ended.set_exception(error)
