"""Tensors that rest elsewhere and are worked on in host memory: which of their elements are there now.

A *window* is a range of elements in a buffer in host memory. It begins with a fetch and ends when it is committed or
dropped. Two windows may have a tile in common, where a range ends inside of it and the next range begins there. The
later window then takes that tile over from the earlier one in memory, when the earlier one ends: the tile is read once
and written once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_zero.storage.executor import DONE, Staged, Ticket


@dataclass(eq=False)
class Window:
    """Elements ``[start, stop)`` of a tensor in host memory.

    Attributes:
        start: the first element.
        stop: the one after the last.
        staged: the memory.
        values: the elements in it, 1-D.
        arrived: the fetch.
        seen: whether someone has seen the elements, and may have changed them.
        front: the earlier window from which this one takes over its first tiles when that one ends; ``None``: it has
            all of its tiles, or fetches them.
    """

    start: int
    stop: int
    staged: Staged
    values: Tensor
    arrived: Ticket
    seen: bool = False
    front: Window | None = None


class Windowed(ABC):
    """A tensor that is worked on in windows; see :class:`~lightning_zero.storage.rested.Rested`."""

    pinned = False  # the host memory is not the one in which it rests
    tile: int | None

    def __init__(self) -> None:
        self._windows: list[Window] = []

    @abstractmethod
    def _fetch(self, start: int, stop: int) -> Window:
        """Begin to fetch ``[start, stop)``, or more, where it overlaps no window."""

    @abstractmethod
    def _give(self, staged: Staged, work: Ticket) -> None:
        """Give back memory, which may be used again when ``work`` has ended."""

    @abstractmethod
    def commit(self, start: int, stop: int, after: Sequence[Ticket] = ()) -> None:
        """See :class:`~lightning_zero.storage.rested.Rested`."""

    def _follow(self, front: Window, start: int, stop: int, blank: bool) -> Window | None:
        """Begin to fetch the tiles of ``[start, stop)`` that ``front`` does not have; ``None``: there are no tiles."""
        return None

    def expect(self, start: int, stop: int, blank: bool = False) -> None:
        if self.holds(start, stop):
            return
        if (following := self._following(start, stop, blank)) is not None:
            self._windows.append(following)
        elif not blank or self._overlapping(start, stop):
            self._window(start, stop)
        else:
            window = self._renewed(start, stop)
            if window.arrived is DONE:  # nothing was fetched
                window.values.zero_()  # padding is not overwritten by anyone

    def _following(self, start: int, stop: int, blank: bool) -> Window | None:
        """A new window that takes over its first tiles from the only one that it overlaps; ``None``: there is none."""
        touched = self._overlapping(start, stop)
        if len(touched) != 1 or touched[0].front is not None or touched[0].start > start:
            return None
        return self._follow(touched[0], start, stop, blank)

    def holds(self, start: int, stop: int) -> bool:
        return self._held(start, stop) is not None

    def view(self, start: int, stop: int) -> Tensor:
        values, arrived = self.open(start, stop)
        arrived.synchronize()
        return values

    def open(self, start: int, stop: int, blank: bool = False) -> tuple[Tensor, Ticket]:
        window = self._renewed(start, stop) if blank else self._window(start, stop)
        if window.front is not None:
            self.commit(window.front.start, window.front.stop)
        window.seen = True
        return window.values[start - window.start : stop - window.start], window.arrived

    def _renewed(self, start: int, stop: int) -> Window:
        for window in reversed(self._overlapping(start, stop)):
            window.arrived.synchronize()  # what is written next must not come under a read
            self._let_go(window)
        window = self._blank(start, stop)
        self._windows.append(window)
        return window

    def _blank(self, start: int, stop: int) -> Window:
        """A window of ``[start, stop)`` whose values are arbitrary."""
        return self._fetch(start, stop)

    def drop(self, start: int, stop: int, after: Ticket | None = None) -> None:
        for window in reversed(self._ending(start, stop)):
            self._let_go(window, after)

    def _let_go(self, window: Window, after: Ticket | None = None) -> None:
        self._windows.remove(window)
        self._pass_on(window)
        self._give(window.staged, after or window.arrived)  # whoever has read it has waited for its fetch

    def _forget_unseen(self, start: int, stop: int) -> None:
        """Let go of windows that were expected and have not been used."""
        for window in reversed(self._overlapping(start, stop)):
            if not window.seen:
                self._let_go(window)

    def _ending(self, start: int, stop: int) -> list[Window]:
        """The windows that end when ``[start, stop)`` is committed or dropped.

        It is all that overlap it, except one that is still to take tiles over from another, and goes on behind it.
        """
        assert self.tile is not None
        end = -(-stop // self.tile) * self.tile
        return [w for w in self._overlapping(start, stop) if w.front is None or w.stop <= end]

    def _pass_on(self, window: Window, after: Sequence[Ticket] = ()) -> Window | None:
        """Copy the tiles that two windows have in common to the later one, if there is one.

        Args:
            window: the earlier one, which ends.
            after: work that still changes it.

        Returns:
            The later one.
        """
        follower = next((w for w in self._windows if w.front is window), None)
        if follower is not None:
            for work in (window.arrived, *after):
                work.synchronize()
            shared = window.values[follower.start - window.start :]
            follower.values[: shared.numel()].copy_(shared)
            follower.front, follower.seen = None, follower.seen or window.seen
        return follower

    def _window(self, start: int, stop: int) -> Window:
        if (held := self._held(start, stop)) is not None:
            return held
        self._forget_unseen(start, stop)
        self.commit(start, stop)  # windows that overlap it; the fetch waits for their writes
        window = self._fetch(start, stop)
        self._windows.append(window)
        return window

    def _held(self, start: int, stop: int) -> Window | None:
        # The first in the list: a later window does not have the tiles yet that it takes over from an earlier one.
        return next((w for w in self._windows if w.start <= start and stop <= w.stop), None)

    def _overlapping(self, start: int, stop: int) -> list[Window]:
        return [w for w in self._windows if w.start < stop and start < w.stop]
