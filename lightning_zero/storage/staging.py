"""Pinned host memory in passing: a few buffers that copies between host and device use in turn."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zero.storage.executor import Staged, Ticket
from lightning_zero.storage.host import HostStore

_ALIGNMENT = 64  # bytes


def staged_size(nbytes: int) -> int:
    """The size of a buffer for so many bytes."""
    return -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT


@dataclass(eq=False)
class _Given:
    """A buffer that was given back, and the work on what is in it."""

    buffer: Tensor
    work: Ticket


class Staging:
    """Gives out pinned buffers, again once the work on what was in them has ended.

    Attributes:
        nbytes: of all buffers.
        limit: bytes. Beyond that the host waits for a buffer to become free; there always is one where none was given
            back.

    Args:
        device: to or from which they are copied.
        limit: as above; it may change.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self.nbytes = 0
        self._store = HostStore(pin_for=device)
        self.limit = limit
        self._given: list[_Given] = []  # oldest first
        self._lock = threading.Lock()

    def take(self, like: Tensor) -> Staged:
        """Memory for values of the shape and dtype of ``like``, contiguous."""
        buffer = self._find(staged_size(like.nbytes))
        return Staged(buffer, buffer[: like.nbytes].view(like.dtype).view(like.shape))

    def give(self, staged: Staged, work: Ticket) -> None:
        """Give memory back, which ``work`` still uses."""
        with self._lock:
            self._given.append(_Given(staged.buffer, work))

    def _find(self, nbytes: int) -> Tensor:
        while (busy := self._choose(nbytes)) is not None:
            if not isinstance(busy, _Given):
                return busy
            busy.work.synchronize()  # without the lock: the work may need it
            if busy.buffer.nbytes >= nbytes:
                return busy.buffer
            with self._lock:
                self.nbytes -= busy.buffer.nbytes
        return self._store.zeros(nbytes, torch.uint8)

    def _choose(self, nbytes: int) -> Tensor | _Given | None:
        """A buffer, or one to wait for, which nobody else can choose then; ``None``: one is to be made, and counts."""
        with self._lock:
            fitting = [given for given in self._given if given.buffer.nbytes >= nbytes]
            if done := [given for given in fitting if given.work.done()]:
                smallest = min(done, key=lambda given: given.buffer.nbytes)
                self._given.remove(smallest)
                return smallest.buffer
            if self.nbytes + nbytes <= self.limit or not self._given:
                self.nbytes += nbytes
                return None
            # Where none is large enough, make room, beginning with the oldest.
            return self._given.pop(self._given.index(fitting[0]) if fitting else 0)
