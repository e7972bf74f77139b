"""Long-lived tensors, wherever they rest.

Work on such a tensor goes range by range. :meth:`Rested.expect` announces a range that will be worked on,
:meth:`Rested.view` gives its elements, and :meth:`Rested.commit` or :meth:`Rested.drop` ends the work on it. A tensor
in memory gives views of itself, and ``expect``, ``commit`` and ``drop`` do nothing. A tensor on a disk is fetched to
host memory by ``expect``, in whole *tiles*, and written back by ``commit``.
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
    """A long-lived 1-D tensor. Only one thread works on it at a time.

    Attributes:
        memory: where it rests.
        device: the device on which its values are computed with.
        tile: the number of elements that are fetched and committed together: ranges ``[i * tile, (i + 1) * tile)``.
            ``None``: it rests where it is computed with, and nothing is fetched.
        pinned: whether it rests in pinned host memory.
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
        """Begin to fetch a range for :meth:`view`, until :meth:`commit` or :meth:`drop`.

        Args:
            start: first element.
            stop: the one after the last.
            blank: the range need not be fetched, because all of its tiles will be overwritten, except for padding. A
                tile that it shares with the range that was expected before may be overwritten by both together.
        """
        ...

    def holds(self, start: int, stop: int) -> bool:
        """Whether the range was fetched, or is being fetched, and has not been committed or dropped."""
        ...

    def view(self, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)``, to be changed in place before :meth:`commit`."""
        ...

    def open(self, start: int, stop: int, blank: bool = False) -> tuple[Tensor, Ticket]:
        """Does the work of :meth:`view` without waiting for the fetch.

        Args:
            start: first element.
            stop: the one after the last.
            blank: the range consists of whole tiles, which will be overwritten: they need not be fetched.

        Returns:
            The elements, and the ticket of the fetch.
        """
        ...

    def commit(self, start: int, stop: int, after: Sequence[Ticket] = ()) -> None:
        """Begin to write back the tiles of a range; views of them are no longer valid.

        Args:
            start: first element.
            stop: the one after the last.
            after: work that still reads or changes the views.
        """
        ...

    def settle(self) -> None:
        """Wait until everything that was committed is written back."""
        ...

    def drop(self, start: int, stop: int, after: Ticket | None = None) -> None:
        """End the work on the tiles of a range without writing them back, since they were not changed.

        Args:
            start: first element.
            stop: the one after the last.
            after: work that still reads the views.
        """
        ...

    def read(self, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)``, not to be changed: a view where they are in memory, else a copy."""
        ...


class Resident:
    """A tensor that rests in memory; see :class:`Rested`.

    Args:
        values: the tensor, 1-D.
        memory: where it rests.
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
        """Do nothing: there is nothing to fetch."""

    def holds(self, start: int, stop: int) -> bool:
        return True

    def view(self, start: int, stop: int) -> Tensor:
        return self._values[start:stop]

    def open(self, start: int, stop: int, blank: bool = False) -> tuple[Tensor, Ticket]:
        return self._values[start:stop], DONE

    def commit(self, start: int, stop: int, after: Sequence[Ticket] = ()) -> None:
        """Do nothing: views are the tensor itself."""

    def settle(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def drop(self, start: int, stop: int, after: Ticket | None = None) -> None:
        """Do nothing: nothing was fetched."""

    def read(self, start: int, stop: int) -> Tensor:
        return self._values[start:stop]


def nbytes_of(rested: Rested) -> int:
    """The bytes of a tensor's elements."""
    return rested.numel * rested.dtype.itemsize


def pieces(tile: int | None, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The parts of ``[start, stop)`` in each tile; the whole range where there are no tiles."""
    while start < stop:
        end = stop if tile is None else min(stop, (start // tile + 1) * tile)
        yield start, end
        start = end


@contextmanager
def changing(rested: Rested, start: int, stop: int, overwritten: bool = False) -> Iterator[Tensor]:
    """Gives elements ``[start, stop)``, which are changed in place inside the context.

    At its end they are committed, unless they were held before: then whoever holds them commits them.

    Args:
        rested: the tensor.
        start: first element.
        stop: the one after the last.
        overwritten: whether all of these elements will be overwritten. Then whole tiles need not be fetched.
    """
    held, tile = rested.holds(start, stop), rested.tile or 1
    whole = start % tile == 0 and (stop % tile == 0 or stop == rested.numel)
    values, arrived = rested.open(start, stop, blank=overwritten and whole and not held)
    arrived.synchronize()
    yield values
    if not held:
        rested.commit(start, stop)


def keep(rested: Rested, start: int, values: Tensor) -> None:
    """Copy ``values`` to the elements from ``start`` on, unless they are the view of these elements."""
    for low, high in pieces(rested.tile, start, start + values.numel()):
        source = values[low - start : high - start]
        with changing(rested, low, high, overwritten=True) as target:
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
