"""Long-lived tensors wherever they rest: work on them goes range by range.

A tensor that rests in memory shows views of itself. One that rests on a disk is fetched a *tile* at a time into host
memory in passing, and committed when it was changed. Whoever works on either says what comes next
(:meth:`Rested.expect`), works on :meth:`Rested.view`, and says what is done (:meth:`Rested.commit`); in memory the
first and the last do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

import torch
from torch import Tensor

from lightning_zero.storage.executor import DONE, Ticket

Memory = Literal["device", "host", "disk"]


class Rested(Protocol):
    """One long-lived 1-D tensor. One thread at a time works on it.

    Attributes:
        memory: in which it rests.
        device: where its values can be computed on.
        tile: elements that are fetched and committed together: ranges ``[i * tile, (i + 1) * tile)``; ``None``: it is
            where it can be computed on.
        pinned: whether the host memory in which it rests is.
    """

    @property
    def memory(self) -> Memory: ...

    @property
    def pinned(self) -> bool: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def tile(self) -> int | None: ...

    @property
    def numel(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def expect(self, start: int, stop: int, blank: bool = False) -> None:
        """Begin to fetch what :meth:`view` will be asked for, up to :meth:`commit`.

        Args:
            start: first element.
            stop: the one after the last.
            blank: what is there does not matter: of it, with the whole tiles around, all but padding will be
                overwritten. It need not be fetched.
        """
        ...

    def holds(self, start: int, stop: int) -> bool:
        """Whether that has been fetched, or begun to be, and not committed."""
        ...

    def view(self, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)``, to be changed in place before :meth:`commit`."""
        ...

    def open(self, start: int, stop: int, blank: bool = False) -> tuple[Tensor, Ticket]:
        """As :meth:`view`, but for work that itself waits until the elements are there.

        Args:
            start: first element.
            stop: the one after the last.
            blank: what is there does not matter: all of it, whole tiles, will be overwritten.

        Returns:
            The elements, and the ticket of their arrival.
        """
        ...

    def commit(self, start: int, stop: int, after: Sequence[Ticket] = ()) -> None:
        """Begin to keep what was changed in views of ``[start, stop)``, which end here, with the whole tiles around.

        Args:
            start: first element.
            stop: the one after the last.
            after: work that still reads or changes the views.
        """
        ...

    def drop(self, start: int, stop: int, after: Ticket | None = None) -> None:
        """Let go of what was fetched of ``[start, stop)``, with the whole tiles around, and was not changed.

        Args:
            start: first element.
            stop: the one after the last.
            after: work that still reads the views.
        """
        ...

    def read(self, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)``, to be read: a view of what is in memory, or a copy of what is not."""
        ...


class Resident:
    """A tensor in memory.

    Args:
        values: 1-D.
        memory: in which it rests.
    """

    tile: int | None = None

    def __init__(self, values: Tensor, memory: Memory = "host") -> None:
        self._values = values
        self.memory = memory

    @property
    def device(self) -> torch.device:
        return self._values.device

    @property
    def pinned(self) -> bool:
        return self._values.device.type == "cpu" and self._values.is_pinned()

    @property
    def numel(self) -> int:
        return self._values.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self._values.dtype

    def expect(self, start: int, stop: int, blank: bool = False) -> None:
        """Nothing to fetch."""

    def holds(self, start: int, stop: int) -> bool:
        return True

    def view(self, start: int, stop: int) -> Tensor:
        return self._values[start:stop]

    def open(self, start: int, stop: int, blank: bool = False) -> tuple[Tensor, Ticket]:
        return self._values[start:stop], DONE

    def commit(self, start: int, stop: int, after: Sequence[Ticket] = ()) -> None:
        """Nothing to keep: views are the values."""

    def drop(self, start: int, stop: int, after: Ticket | None = None) -> None:
        """Nothing was fetched."""

    def read(self, start: int, stop: int) -> Tensor:
        return self._values[start:stop]


def nbytes_of(rested: Rested) -> int:
    """The bytes of its elements."""
    return rested.numel * rested.dtype.itemsize


def pieces(tile: int | None, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """``[start, stop)`` cut where tiles end; whole where there are none."""
    while start < stop:
        end = stop if tile is None else min(stop, (start // tile + 1) * tile)
        yield start, end
        start = end


@contextmanager
def changing(rested: Rested, start: int, stop: int) -> Iterator[Tensor]:
    """Elements ``[start, stop)``, to be changed in place inside; committed unless they were held before."""
    held = rested.holds(start, stop)
    yield rested.view(start, stop)
    if not held:
        rested.commit(start, stop)


def keep(rested: Rested, start: int, values: Tensor) -> None:
    """Make elements from ``start`` on equal to ``values``, which may be what :meth:`Rested.view` has given."""
    for low, high in pieces(rested.tile, start, start + values.numel()):
        source = values[low - start : high - start]
        with changing(rested, low, high) as target:
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
