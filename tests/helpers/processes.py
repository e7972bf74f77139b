"""Measures what the processes of this machine do, on Linux; elsewhere there are no such measurements."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

ROOT = Path("/")
AT_WORK = "RDTt"  # states of proc_pid_stat(5): running or runnable, waiting for a disk, stopped by a signal


class Measured(NamedTuple):
    """Seconds: the elapsed time, and the part of it that other processes took."""

    took: float
    lost: float


class Stopwatch:
    """Measures elapsed seconds, and how many of them the cores spent on the work of others; starts when it is made.

    Others are the host of a virtual machine, and all processes except this one and those that it has started. If all
    cores are busy, the remaining time is this process's share, as if it had been given without interruption.

    Args:
        root: root of the file system.
        now: a clock, in seconds.
    """

    def __init__(self, root: Path = ROOT, now: Callable[[], float] = perf_counter) -> None:
        self._root, self._now = root, now
        self._before = now(), *self._used()

    def read(self) -> Measured:
        begin, cores, own = self._before
        cores_now, own_now = self._used()
        took, lost = self._now() - begin, 0.0
        if cores:
            others = sum(cores_now) - sum(cores) - max(0.0, own_now - own)  # the time of a killed process disappears
            lost = min(max(0.0, others / len(cores)), took)
        return Measured(took, lost)

    def _used(self) -> tuple[list[float], float]:
        """Seconds of work: of each core, and of this process and its descendants."""
        own = sum(seconds_of(pid, self._root) for pid in family(os.getpid(), self._root))
        return busy_seconds(self._root), own


def busy_seconds(root: Path = ROOT) -> list[float]:
    """Of each CPU that this process may use: how long it has been busy, or the host of a virtual machine had it."""
    found = []
    for line in read(root / "proc/stat").splitlines():
        name, *ticks = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in usable_cpus():
            user, nice, system, _idle, _waiting, irq, softirq, stolen = map(int, ticks[:8])
            found.append((user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK"))
    return found


def usable_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def family(pid: int, root: Path = ROOT) -> Iterator[int]:
    """A process and its descendants, those aside that other threads than the first have started."""
    yield pid
    for child in read(root / f"proc/{pid}/task/{pid}/children").split():
        yield from family(int(child), root)


def seconds_of(pid: int, root: Path = ROOT) -> float:
    """The CPU time of a process, including its children that have ended."""
    fields = read(root / f"proc/{pid}/stat").rpartition(")")[2].split()  # from the third on: a name may have blanks
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def at_work(pid: int, root: Path = ROOT) -> bool:
    """Whether a thread of a process has work to do, and so may only be late because no core is free."""
    stats = (read(path) for path in (root / f"proc/{pid}/task").glob("*/stat"))
    return any(stat.rpartition(")")[2].lstrip()[:1] in AT_WORK for stat in stats if stat)


def read(path: Path) -> str:
    """The text of a file; "" if it does not exist or its process has ended."""
    try:
        return path.read_text()
    except OSError:
        return ""
