"""Windows: if state rests outside of the memory in which it is computed, it is updated a few tiles at a time.

While one window is updated, the next window is fetched and the previous one is put back. After the last window of a
bucket comes the first window of the bucket that is updated next. If two windows share a tile, the second gets the tile
from the first in memory. If state rests in memory, the whole bucket is one window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

from lightning_zero.sharding import Run
from lightning_zero.update.view import UpdateView


class Part(Protocol):
    """A part of a shard that is updated by one call."""

    @property
    def run(self) -> Run: ...


class WindowedState(Protocol):
    """The interface through which an update by windows uses the state of a bucket's segments."""

    def expect(self, start: int, stop: int, names: Iterable[str]) -> None:
        """Begin to fetch the state called ``names`` that an update of ``[start, stop)`` needs."""
        ...

    def commit(self, start: int, stop: int) -> None:
        """Begin to put back the state that an update of ``[start, stop)`` has changed."""
        ...


P = TypeVar("P", bound=Part)


class _Tiles(NamedTuple):
    """A range of a shard that begins and ends at borders of tiles."""

    start: int
    stop: int

    @classmethod
    def around(cls, run: Run, tile: int | None) -> _Tiles:
        if tile is None:
            return cls(0, run.stop)
        return cls(run.start // tile * tile, -(-run.stop // tile) * tile)

    def overlap(self, other: _Tiles) -> bool:
        return self.start < other.stop and other.start < self.stop


def in_windows(
    view: UpdateView,
    state: WindowedState,
    parts: Iterable[P],
    names: Callable[[P], Iterable[str]],
    one_at_a_time: bool = False,
) -> Iterator[tuple[P, ...]]:
    """Yield the parts of an update by windows. Each window is fetched before it is yielded, and put back afterwards.

    Args:
        view: the view of the bucket that is updated.
        state: the state of the bucket.
        parts: the parts to update, in ascending order. A window consists of the parts in the tiles of its first part.
        names: gives the names of a part's per-element state, as far as it exists.
        one_at_a_time: fetch a window only when the previous one has been put back, which takes less memory.
    """
    windows = list(_windows(parts, view.tile))
    follows = view.placement.optimizer_store.tile is not None and not one_at_a_time
    for number, (tiles, window) in enumerate(windows):
        _expect(view, state, windows, number, names, follows)
        following = windows[number + 1 : number + 2]
        for others, _ in following:
            # Otherwise the tiles that both windows have will still change, and nothing passes the changes on.
            if follows or not (one_at_a_time or others.overlap(tiles)):
                _expect(view, state, windows, number + 1, names, follows)
        if not following:
            view.ahead()
        yield tuple(window)
        view.gradient.drop(*_range(window))
        view.master.commit(*_range(window))
        state.commit(*_range(window))


def expect_first(
    view: UpdateView, state: WindowedState, parts: Iterable[P], names: Callable[[P], Iterable[str]]
) -> None:
    """Begin to fetch the first window that :func:`in_windows` will yield for the same arguments."""
    if windows := list(islice(_windows(parts, view.tile), 2)):
        _expect(view, state, windows, 0, names, view.placement.optimizer_store.tile is not None)


def _windows(parts: Iterable[P], tile: int | None) -> Iterator[tuple[_Tiles, list[P]]]:
    """Group parts into windows: a window has those that lie in the tiles of its first part."""
    tiles, window = _Tiles(0, 0), list[P]()
    for part in parts:
        own = _Tiles.around(part.run, tile)
        inside = tile is None or (tiles.start <= own.start and own.stop <= tiles.stop)
        if window and not inside:
            yield tiles, window
            window = []
        if not window:
            tiles = own
        window.append(part)
    if window:
        yield tiles, window


def windows_of(parts: Iterable[P], tile: int | None) -> Iterator[Sequence[P]]:
    """The parts of an update, grouped as :func:`in_windows` does."""
    return (window for _, window in _windows(parts, tile))


def largest_window(runs: Iterable[Run], tile: int | None) -> int:
    """The most elements that are fetched at once for these runs; 0 if state rests in memory."""
    if tile is None:
        return 0
    return max((tiles.stop - tiles.start for tiles, _ in _windows(map(_Alone, runs), tile)), default=0)


class _Alone(NamedTuple):
    run: Run


def _expect(
    view: UpdateView,
    state: WindowedState,
    windows: Sequence[tuple[_Tiles, Sequence[P]]],
    number: int,
    names: Callable[[P], Iterable[str]],
    follows: bool,
) -> None:
    """Begin to fetch a window. ``follows``: it gets tiles that it shares with the previous window from there."""
    tiles, window = windows[number]
    beside = (*windows[max(0, number - 1) : number], *windows[number + 1 : number + 2])
    # If one window alone has a tile, it updates all of the tile but padding. Two windows pass their common tile on.
    complete = view.complete and (follows or not any(others.overlap(tiles) for others, _ in beside))
    start, stop = _range(window)
    view.gradient.expect(start, stop)
    view.master.expect(start, stop, complete)
    state.expect(start, stop, sorted({name for part in window for name in names(part)}))


def _range(window: Sequence[P]) -> tuple[int, int]:
    return window[0].run.start, window[-1].run.stop
