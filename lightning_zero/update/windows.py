"""Windows: an update of state that rests elsewhere than where it is computed on, a few tiles at a time.

While a window is updated the next one is fetched and the one before is put back; the one after a bucket's last is the
first of the bucket that is updated next. A tile that two windows touch passes from one to the other in memory. Where
state rests in memory all of the bucket is one window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

from lightning_zero.sharding import Run
from lightning_zero.update.view import UpdateView


class Part(Protocol):
    """A part of a shard that is updated at once."""

    @property
    def run(self) -> Run: ...


class WindowedState(Protocol):
    """The state of a bucket's segments, as an update by windows uses it."""

    def expect(self, start: int, stop: int, names: Iterable[str]) -> None:
        """Begin to fetch the state called ``names`` that an update of ``[start, stop)`` needs."""
        ...

    def commit(self, start: int, stop: int) -> None:
        """Begin to put back what an update of ``[start, stop)`` has changed."""
        ...


P = TypeVar("P", bound=Part)


class _Tiles(NamedTuple):
    """The range of a shard from one border of a tile to another."""

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
    """Give the parts of an update by windows, each of which is fetched before, and put back after it was updated.

    Args:
        view: of the bucket.
        state: its.
        parts: what is updated, in ascending order. Those that lie inside a tile, or a number of whole tiles, are one
            window at most.
        names: the per-element state of a part, as far as it exists.
        one_at_a_time: fetch a window only when the one before was put back: it takes less memory.
    """
    windows = list(_windows(parts, view.tile))
    follows = view.placement.optimizer_store.tile is not None and not one_at_a_time
    for number, (tiles, window) in enumerate(windows):
        _expect(view, state, windows, number, names, follows)
        following = windows[number + 1 : number + 2]
        for others, _ in following:
            # Else what both have is still to change, and nothing passes it on.
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
    """Begin to fetch the first window that :func:`in_windows` will give for the same arguments."""
    if windows := list(islice(_windows(parts, view.tile), 2)):
        _expect(view, state, windows, 0, names, view.placement.optimizer_store.tile is not None)


def _windows(parts: Iterable[P], tile: int | None) -> Iterator[tuple[_Tiles, list[P]]]:
    """Put parts in the tiles of the first of them together."""
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
    """The parts of an update as :func:`in_windows` gives them."""
    return (window for _, window in _windows(parts, tile))


def largest_window(runs: Iterable[Run], tile: int | None) -> int:
    """The most elements that are fetched at once for these runs; 0 where state rests in memory."""
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
    """Begin to fetch a window; ``follows``: what it has in common with the one before comes from there."""
    tiles, window = windows[number]
    beside = (*windows[max(0, number - 1) : number], *windows[number + 1 : number + 2])
    # Whatever is not padding in a tile that is updated by one window only is updated by that; of two, it is passed on.
    complete = view.complete and (follows or not any(others.overlap(tiles) for others, _ in beside))
    start, stop = _range(window)
    view.gradient.expect(start, stop)
    view.master.expect(start, stop, complete)
    state.expect(start, stop, sorted({name for part in window for name in names(part)}))


def _range(window: Sequence[P]) -> tuple[int, int]:
    return window[0].run.start, window[-1].run.stop
