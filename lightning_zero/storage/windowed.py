"""Tensors that are worked on in host memory in passing: the windows of one that are there now."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_zero.storage.executor import DONE, Staged, Ticket


@dataclass(eq=False)
class Window:
    """Elements ``[start, stop)`` in host memory in passing.

    Attributes:
        start: the first one.
        stop: the one after the last.
        staged: the memory.
        values: the elements in it, 1-D.
        arrived: ends when they are there.
        seen: by someone who may have changed them.
    """

    start: int
    stop: int
    staged: Staged
    values: Tensor
    arrived: Ticket
    seen: bool = False


class Windowed(ABC):
    """A tensor whose windows come to host memory; see :class:`~lightning_zero.storage.rested.Rested`."""

    pinned = False  # it rests elsewhere

    def __init__(self) -> None:
        self._windows: list[Window] = []

    @abstractmethod
    def _fetch(self, start: int, stop: int) -> Window:
        """Begin to fetch ``[start, stop)``, or more, which overlaps no window that is there."""

    @abstractmethod
    def _give(self, staged: Staged, work: Ticket) -> None:
        """Give back memory that ``work`` still uses."""

    @abstractmethod
    def commit(self, start: int, stop: int, after: Sequence[Ticket] = ()) -> None:
        """See :class:`~lightning_zero.storage.rested.Rested`."""

    def expect(self, start: int, stop: int, blank: bool = False) -> None:
        if not blank:
            self._window(start, stop)
        elif not self.holds(start, stop):
            window = self._renewed(start, stop)
            if window.arrived is DONE:  # nothing was fetched
                window.values.zero_()  # of padding nothing else is written

    def holds(self, start: int, stop: int) -> bool:
        return self._held(start, stop) is not None

    def view(self, start: int, stop: int) -> Tensor:
        values, arrived = self.open(start, stop)
        arrived.synchronize()
        return values

    def open(self, start: int, stop: int, blank: bool = False) -> tuple[Tensor, Ticket]:
        window = self._renewed(start, stop) if blank else self._window(start, stop)
        window.seen = True
        return window.values[start - window.start : stop - window.start], window.arrived

    def _renewed(self, start: int, stop: int) -> Window:
        for window in self._overlapping(start, stop):
            window.arrived.synchronize()  # what is written next must not come under a read
        self.drop(start, stop)
        window = self._blank(start, stop)
        self._windows.append(window)
        return window

    def _blank(self, start: int, stop: int) -> Window:
        """A window of ``[start, stop)``, with any values."""
        return self._fetch(start, stop)

    def drop(self, start: int, stop: int, after: Ticket | None = None) -> None:
        for window in self._overlapping(start, stop):
            self._windows.remove(window)
            self._give(window.staged, after or window.arrived)  # who reads it has waited for its arrival

    def _forget_unseen(self, start: int, stop: int) -> None:
        """Let go of what was expected, and did not come to be used."""
        for window in self._overlapping(start, stop):
            if not window.seen:
                self.drop(window.start, window.stop)

    def _window(self, start: int, stop: int) -> Window:
        if (held := self._held(start, stop)) is not None:
            return held
        self._forget_unseen(start, stop)
        self.commit(start, stop)  # what overlaps; the fetch waits for that
        window = self._fetch(start, stop)
        self._windows.append(window)
        return window

    def _held(self, start: int, stop: int) -> Window | None:
        return next((w for w in self._windows if w.start <= start and stop <= w.stop), None)

    def _overlapping(self, start: int, stop: int) -> list[Window]:
        return [w for w in self._windows if w.start < stop and start < w.stop]
