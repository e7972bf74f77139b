"""A pool of host memory for what is copied or read: a few buffers that are used again and again."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zero.storage.executor import Staged, Ticket
from lightning_zero.storage.host import HostStore

_ALIGNMENT = 64  # bytes


def staged_size(nbytes: int) -> int:
    """The size of the buffer in which ``nbytes`` fit."""
    return -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT


@dataclass(eq=False)
class _Given:
    """A buffer that was given back, and the work that may still use it."""

    buffer: Tensor
    work: Ticket


class Staging:
    """Gives out buffers, and uses one again when the work on it has ended.

    Attributes:
        nbytes: the size of all buffers.
        limit: the bytes that they may take. Beyond it :meth:`take` waits for a buffer that was given back. Where none
            was, it makes a new one all the same, because nobody else could free one.

    Args:
        device: for whose copies the buffers are pinned, where its type can.
        limit: as above; it may change.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self.nbytes = 0
        self._store = HostStore(pin_for=device)
        self.limit = limit
        self._given: list[_Given] = []  # oldest first
        self._lock = threading.Lock()

    def take(self, like: Tensor) -> Staged:
        """Contiguous memory for a tensor of the shape and dtype of ``like``."""
        buffer = self._find(staged_size(like.nbytes))
        return Staged(buffer, buffer[: like.nbytes].view(like.dtype).view(like.shape))

    def give(self, staged: Staged, work: Ticket) -> None:
        """Give memory back; it is used again when ``work`` has ended."""
        with self._lock:
            self._given.append(_Given(staged.buffer, work))

    def _find(self, nbytes: int) -> Tensor:
        while (busy := self._choose(nbytes)) is not None:
            if not isinstance(busy, _Given):
                return busy
            busy.work.synchronize()  # outside of the lock, which the work may need
            if busy.buffer.nbytes >= nbytes:
                return busy.buffer
            with self._lock:
                self.nbytes -= busy.buffer.nbytes
        return self._store.zeros(nbytes, torch.uint8)

    def _choose(self, nbytes: int) -> Tensor | _Given | None:
        """Choose a free buffer, or a busy one to wait for; ``None``: a new one, whose bytes are counted already.

        What is chosen is no longer in the list, so that nobody else chooses it.
        """
        with self._lock:
            room = self.nbytes + nbytes <= self.limit
            fitting = [given for given in self._given if given.buffer.nbytes >= nbytes]
            # While there is room, a larger one is left to what needs it: what passes in a step takes no more than its
            # sizes add up to.
            usable = [given for given in fitting if given.buffer.nbytes == nbytes or not room]
            if done := [given for given in usable if given.work.done()]:
                smallest = min(done, key=lambda given: given.buffer.nbytes)
                self._given.remove(smallest)
                return smallest.buffer
            if room or not self._given:
                self.nbytes += nbytes
                return None
            # Wait for one that is large enough; where none is, give up the oldest to make room.
            return self._given.pop(self._given.index(fitting[0]) if fitting else 0)
