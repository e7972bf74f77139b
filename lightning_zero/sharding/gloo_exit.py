"""Waits for the threads of gloo when the process ends.

A thread of gloo lets go of the tensors of a collective after it has told the caller that the collective is complete,
and needs Python's lock (GIL) for that. If the interpreter is ending by then, CPython before 3.14 ends the thread inside
a C++ function, and that aborts the process with SIGABRT and "terminate called without an active exception", after a
training that went well. This is a defect of torch, for all programs that do not drop every reference to their process
groups: https://github.com/pytorch/pytorch/pull/179291. ``destroy_process_group`` does not help, because it does not
wait for these threads.
"""

from __future__ import annotations

import time

from lightning_zero.limits import thread_states
from lightning_zero.torch_private import GLOO_THREAD

_SECONDS = 5.0  # how long the exit waits; a collective may be incomplete for ever, but then its thread sleeps
_SECONDS_BETWEEN = 1e-3  # between two looks; meanwhile threads can have the lock
_LOOKS = 5  # that must see all threads asleep: one may just have begun to wait for the lock, which the look holds


def wait_for_gloo() -> None:
    """Waits until the threads of gloo sleep, for at most five seconds; for ``atexit``."""
    until, asleep = time.monotonic() + _SECONDS, 0
    while asleep < _LOOKS and time.monotonic() < until:
        if not (states := thread_states(GLOO_THREAD)):
            return
        asleep = asleep + 1 if states == {"S"} else 0
        time.sleep(_SECONDS_BETWEEN)
