"""The number of threads of the kernels, and the cores that these threads are bound to."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from lightning_zero.cgroups import cpu_quota
from lightning_zero.numa import parse_cores
from lightning_zero.ops import _C

# Cores that kernels running beside the training leave free: for the training or autograd thread, and for loaders.
_LEFT_CORES = 2


def _cores() -> int:
    """Counts the cores that this process may use, according to its affinity and the quota of its control groups."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, min(cores, int(quota))) if isinstance(quota, float) else cores


def positive(name: str, value: int) -> int:
    """Returns `value` if it is an int >= 1 that the extension can take; raises TypeError or ValueError otherwise."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} has type {type(value).__name__}; expected int")
    if not 1 <= value < 2**63:
        raise ValueError(f"{name}={value} is out of range; expected >= 1, and < 2**63")
    return value


class _Threads:
    """The number of threads of a kernel: the requested number, or this process's share of the cores it may run on."""

    def __init__(self, environment: str) -> None:
        if environment and not environment.isdecimal():
            raise ValueError(f"LIGHTNING_ZERO_NUM_THREADS={environment!r} must be a whole number >= 1, or unset")
        self.asked = positive("LIGHTNING_ZERO_NUM_THREADS", int(environment)) if environment else None
        self.processes = 1
        self.cores = _cores()
        self.near: tuple[int, ...] = ()  # the cores near the device that the kernels are restricted to; empty: all
        self.bound: frozenset[int] = frozenset()  # the cores to which the kernels' threads are bound; empty: to none

    @property
    def share(self) -> int:
        limits = [len(cores) for cores in (self.near, self.bound) if cores]
        return max(1, min([self.cores // self.processes, *limits]))

    @property
    def number(self) -> int:
        return self.asked or self.share

    @property
    def beside(self) -> int:
        return self.asked or max(1, self.share - _LEFT_CORES)


class _Beside(threading.local):
    """Whether this thread works beside the training."""

    yes = False


_BESIDE = _Beside()
_THREADS = _Threads(os.environ.get("LIGHTNING_ZERO_NUM_THREADS", ""))


def get_num_threads() -> int:
    """Returns the maximum number of threads of a kernel that this thread calls; for small arrays it uses fewer."""
    return _THREADS.beside if _BESIDE.yes else _THREADS.number


def threads_beside() -> int:
    """Returns the maximum number of threads of a kernel that runs beside the training.

    It is the requested number or, by default, two less than the process's share of the cores (at least 1), which leaves
    two cores to autograd and loaders.
    """
    return _THREADS.beside


def work_beside() -> None:
    """Notes that the calling thread works beside the training, and restricts it to the kernels' cores."""
    _BESIDE.yes = True
    if _THREADS.near:
        os.sched_setaffinity(0, _THREADS.near)


def set_num_threads(threads: int | None) -> None:
    """Sets the number of threads from now on; `None`: the process's share of the cores that it may run on.

    Raises:
        TypeError: `threads` is not an int.
        ValueError: `threads` is less than 1.
    """
    _THREADS.asked = None if threads is None else positive("threads", threads)


def share_cores(processes: int, number: int = 0) -> None:
    """Tells the kernels how many processes on this machine run kernels at the same time; the default is one.

    The cores that `LIGHTNING_ZERO_CORES` names are divided among the processes.

    Args:
        processes: number of processes.
        number: number of this process among them, from 0.

    Raises:
        TypeError: `processes` is not an int.
        ValueError: `processes` is less than 1.
    """
    _THREADS.processes = positive("processes", processes)
    if _NAMED_CORES:
        share = max(1, len(_NAMED_CORES) // processes)
        first = number * share % len(_NAMED_CORES)
        bind_threads(_NAMED_CORES[first : first + share])


def keep_near(cores: Sequence[int]) -> None:
    """Restricts each of the kernels' threads to a set of cores, such as those near a device.

    This does nothing if `LIGHTNING_ZERO_CORES` is set.

    Args:
        cores: numbers of the cores; empty: no restriction.

    Raises:
        ValueError: this process may not run on one of the cores.
    """
    if not _NAMED_CORES and (cores or _THREADS.near):
        _C.bind_threads([*cores], together=True)
        _THREADS.near = tuple(cores)


def bind_threads(cores: Sequence[int] | None) -> None:
    """Binds each of the kernels' threads to one core, in turn. By default there are no more threads than cores then.

    The calling thread, which takes part in the work, is not bound.

    Args:
        cores: numbers of cores that this process may run on; `None` or empty: no binding.

    Raises:
        ValueError: this process may not run on one of the cores.
    """
    wanted = list(cores or ())
    if outside := [core for core in wanted if not 0 <= core < 2**31]:
        raise ValueError(f"core {outside[0]} is out of range; expected the number of a core")
    _C.bind_threads(wanted, together=False)
    _THREADS.bound = frozenset(wanted)  # more threads would wait for each other there


def _cores_named(text: str) -> list[int]:
    """Parses numbers and ranges of cores: `"0-2,5"` means [0, 1, 2, 5]."""
    try:
        return parse_cores(text)
    except ValueError as error:
        raise ValueError(f"LIGHTNING_ZERO_CORES={error}; or leave it unset") from error


_NAMED_CORES = _cores_named(_ENVIRONMENT) if (_ENVIRONMENT := os.environ.get("LIGHTNING_ZERO_CORES")) else []
if _NAMED_CORES:
    bind_threads(_NAMED_CORES)
