"""Tensors that rest on a device and are worked on by the host.

A tile is copied to host memory when it is expected, and copied back when it is committed. Both happen while other tiles
are worked on. Only a few tiles are in host memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zero import ops
from lightning_zero.storage.executor import DONE, Executor, Staged, Ticket
from lightning_zero.storage.rested import Memory, Rested, pieces
from lightning_zero.storage.threads import in_lane
from lightning_zero.storage.windowed import Window, Windowed

_LARGEST_TILE = 1 << 25  # elements; with smaller tiles the fixed cost of each of them shows
_IN_FLIGHT = 4  # tiles in host memory: one is fetched, one is worked on, two are copied back


def staged_tile(executor: Executor, dtype: torch.dtype) -> int:
    """The elements of a tile: a power of two with which the tiles in flight fit in the executor's staging memory."""
    if not executor.staging_bytes:  # the executor keeps no such memory
        return _LARGEST_TILE
    fitting = max(1, executor.staging_bytes // (_IN_FLIGHT * dtype.itemsize))
    return min(max(1 << (fitting.bit_length() - 1), ops.BLOCK), _LARGEST_TILE)  # no block of state is cut


@dataclass(eq=False)
class _Kept:
    """A range that is being copied back."""

    start: int
    stop: int
    ticket: Ticket


class StagedTensor(Windowed):
    """A tensor that rests on a device and is worked on by the host; see :class:`~lightning_zero.storage.rested.Rested`.

    Attributes:
        tile: see there; a window may be longer.

    Args:
        values: the tensor, in the device's memory.
        executor: does the copies.
        what: a name for messages.
    """

    memory: Memory = "device"
    device = torch.device("cpu")

    def __init__(self, values: Rested, executor: Executor, what: str) -> None:
        super().__init__()
        self.numel, self.dtype = values.numel, values.dtype
        self.tile: int | None = staged_tile(executor, values.dtype)
        self._values = values
        self._executor = executor
        self._what = what
        self._kept: list[_Kept] = []

    def commit(self, start: int, stop: int, after: Sequence[Ticket] = ()) -> None:
        for window in self._overlapping(start, stop):
            if not window.seen:
                self.drop(window.start, window.stop)
                continue
            self._windows.remove(window)
            target = self._values.view(window.start, window.stop)
            ticket = self._executor.fetch(target, window.staged.tensor, self._what, after)
            self._executor.give(window.staged, ticket)
            self._kept = [kept for kept in self._kept if not kept.ticket.done()]
            self._kept.append(_Kept(window.start, window.stop, ticket))
            if not in_lane():  # in a job, whoever waits for the job waits for this copy
                ticket.wait()

    def settle(self) -> None:
        for kept in self._kept:
            kept.ticket.synchronize()

    def read(self, start: int, stop: int) -> Tensor:
        if self.holds(start, stop):
            return self.view(start, stop)
        self.commit(start, stop)  # windows that overlap it; the copies wait for theirs
        values = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        for low, high in pieces(self.tile, start, stop):
            window = self._fetch(low, high)
            window.arrived.synchronize()
            values[low - start : high - start].copy_(window.staged.tensor)
            self._executor.give(window.staged, DONE)
        return values

    def _fetch(self, start: int, stop: int) -> Window:
        staged = self._executor.take(stop - start, self.dtype)
        after = [kept.ticket for kept in self._kept if kept.start < stop and start < kept.stop]
        source = self._values.view(start, stop)
        arrived = self._executor.commit(staged.tensor, source, self._what, after)
        return Window(start, stop, staged, staged.tensor, arrived)

    def _give(self, staged: Staged, work: Ticket) -> None:
        self._executor.give(staged, work)
