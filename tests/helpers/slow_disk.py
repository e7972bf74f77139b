"""Executors with the slowest disk there can be, and what their tiles take meanwhile."""

from __future__ import annotations

import functools
import mmap
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_zero.storage import DiskStore, InlineExecutor, Lane, StreamExecutor, Ticket
from lightning_zero.storage.threads import FILE_LANES


class _Late:
    """The ticket of a job that nobody does before it is waited for."""

    def __init__(self, job: Callable[[], object], before: Sequence[Ticket], waiting: set[_Late]) -> None:
        self._job, self._before, self._waiting, self._ended = job, before, waiting, False
        waiting.add(self)

    def synchronize(self) -> None:
        if not self._ended:
            self._ended = True
            self._waiting.remove(self)
            for ticket in self._before:
                ticket.synchronize()
            self._job()
            del self._job, self._before

    wait = synchronize

    def done(self) -> bool:
        return self._ended


class SlowDisk(InlineExecutor):
    """Does jobs of the disk only when somebody waits for them, and then no other ones. Others keep their memory."""

    def __init__(self) -> None:
        self._waiting: set[_Late] = set()

    def submit(self, job: Callable[[], object], lane: Lane, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        if lane not in FILE_LANES:
            return super().submit(job, lane, what, after)
        return _Late(functools.partial(super().submit, job, lane, what), after, self._waiting)


class SlowDiskOfDevice(StreamExecutor):
    """As :class:`SlowDisk`, and does all other work as a training on a device has it done."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._waiting: set[_Late] = set()
        self._disk = InlineExecutor()

    def submit(self, job: Callable[[], object], lane: Lane, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        if lane not in FILE_LANES:
            return super().submit(job, lane, what, after)
        return _Late(functools.partial(self._disk.submit, job, lane, what), after, self._waiting)


def counting_copies(taken: Counter[str]) -> Callable[[DiskStore, int], Tensor]:
    """In the place of `DiskStore.copy_for`: counts bytes in ``taken``, those in use now, the most, and the largest."""

    def copy_for(store: DiskStore, nbytes: int) -> Tensor:
        mapping = mmap.mmap(-1, nbytes)
        taken["now"] += nbytes
        taken["most"] = max(taken["most"], taken["now"])
        taken["largest"] = max(taken["largest"], nbytes)
        weakref.finalize(mapping, taken.subtract, {"now": nbytes})
        return torch.frombuffer(mapping, dtype=torch.uint8)

    return copy_for
