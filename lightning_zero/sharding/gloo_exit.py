"""Waits for the threads of gloo when the process ends.

A thread of gloo lets go of the tensors of a collective after it has told the caller that the collective is complete,
and needs Python's lock (GIL) for that. If the interpreter is ending by then, CPython before 3.14 ends the thread inside
a C++ function, and that aborts the process with SIGABRT and "terminate called without an active exception", after a
training that went well (https://github.com/pytorch/pytorch/issues/190489). ``destroy_process_group`` does not help: the
threads end with the last reference to their group.

This covers collectives that are complete when the handlers of ``atexit`` run. One that is outstanding then, and that
another rank completes a few milliseconds later, can still abort the process.
"""

from __future__ import annotations

import time
from pathlib import Path

from lightning_zero.cgroups import read_text
from lightning_zero.storage.threads import drain_lanes
from lightning_zero.torch_private import GLOO_THREAD

_THREADS = Path("/proc/self/task")
_SECONDS = 5.0  # how long the exit waits for a thread that goes on running
_SECONDS_BETWEEN = 1e-3  # between two looks; meanwhile threads can have the lock
_LOOKS = 5  # that must see no thread run: one may just have begun to wait for the lock, which the look holds


def wait_for_gloo() -> None:
    """Waits until no thread of gloo runs, for at most five seconds; for ``atexit``."""
    drain_lanes()  # they use gloo
    until, quiet = time.monotonic() + _SECONDS, 0
    while quiet < _LOOKS and time.monotonic() < until:
        if not (states := _states()):
            return
        quiet = 0 if "R" in states else quiet + 1
        time.sleep(_SECONDS_BETWEEN)


def _states() -> set[str]:
    """The states of gloo's threads, such as `R` (running) and `S` (sleeping); none where there is no `/proc`."""
    states = set()
    for thread in _THREADS.glob("*"):
        name, _, rest = (read_text(thread / "stat") or "").partition("(")[2].rpartition(")")
        if name == GLOO_THREAD:  # a thread that has ended meanwhile has no text
            states.add(rest.split()[0])
    return states
