"""Computes the position of each element of a bucket, from sizes, ranks and the number of shards only.

The parameters of a bucket lie one after the other in one 1-D *flat buffer*. It is padded at the end so that it splits
into equal *shards*, one per rank of the shard group. Each parameter begins on a cache line, as a separate tensor would,
because the alignment of the operands changes the last bit of matrix products. Shard borders may lie inside a parameter.
A *segment* is the part of one parameter that lies in one shard:

    parameters   |----- 0 -----|-- 1 --|---------- 2 ----------|pad|
    shards       |------- rank 0 -------|------- rank 1 -----------|
    segments     |----- 0 -----|-- 1 --|2|---------- 2 ---------|

In a *whole-parameter layout* no shard border lies inside a parameter: each parameter lies entirely in one shard, and
all shards are padded to the length of the fullest. Everything else is the same:

    parameters   |---------- 2 ----------|----- 0 -----|-- 1 --|pad|
    shards       |-------- rank 0 -------|-------- rank 1 ---------|

All offsets and lengths count elements, not bytes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

from lightning_zero.storage.rested import pieces


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous range of one parameter's elements that one rank owns; the unit of update."""

    param: int  # index of the parameter in its bucket
    start: int  # first element, counted from the beginning of the shard
    numel: int
    param_start: int  # the same element, counted from the beginning of the parameter, in memory order

    @property
    def stop(self) -> int:
        return self.start + self.numel


class Run(NamedTuple):
    """A contiguous range of the shard, and the segments in it: adjacent ones with the same key (see :func:`runs`)."""

    start: int
    stop: int
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, segment: Segment) -> Run:
        """The run of one segment."""
        return cls(segment.start, segment.stop, (segment,))

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def cut(self, max_numel: int) -> Iterator[Run]:
        """Split the run into pieces of at most ``max_numel`` elements; a segment may lie in several pieces."""
        for start in range(self.start, self.stop, max_numel):
            yield self._part(start, min(start + max_numel, self.stop))

    def cut_at(self, tile: int | None) -> Iterator[Run]:
        """Split the run at the borders of the shard's tiles of ``tile`` elements; see :func:`pieces`."""
        for start, stop in pieces(tile, self.start, self.stop):
            yield self._part(start, stop)

    def _part(self, start: int, stop: int) -> Run:
        return Run(start, stop, tuple(s for s in self.segments if s.start < stop and start < s.stop))


@dataclass(frozen=True)
class FlatLayout:
    """Offsets of the parameters of one bucket in its flat buffer.

    Args:
        numels: element count of each parameter, in order; zero is allowed.
        shards: size S of the shard group.
        multiple: the padded length is a multiple of this number of elements, which must be a multiple of S.
        align: parameters begin at multiples of this number of elements.
    """

    numels: tuple[int, ...]
    shards: int
    multiple: int
    align: int = 1

    def __post_init__(self) -> None:
        assert min(self.shards, self.align) >= 1
        assert self.multiple % self.shards == 0

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(_round_up(n, self.align) for n in self.numels))[:-1]

    @cached_property
    def numel(self) -> int:
        """Number of elements of all parameters, without padding."""
        return sum(self.numels)

    @cached_property
    def padded_numel(self) -> int:
        end = self.offsets[-1] + self.numels[-1] if self.numels else 0
        # At least one element per shard: this avoids collectives and views of zero elements.
        return max(_round_up(end, self.multiple), self.multiple)

    @cached_property
    def shard_numel(self) -> int:
        return self.padded_numel // self.shards

    @property
    def keeps_whole(self) -> bool:
        """Whether each parameter lies entirely in one shard."""
        return self.shards == 1

    def owner(self, param: int) -> int:
        """The rank in the shard group that holds parameter ``param``; only for layouts with :attr:`keeps_whole`."""
        assert self.keeps_whole
        return 0

    @property
    def imbalance(self) -> float:
        """Excess of the fullest shard over the average shard, as a fraction of the average."""
        return 0.0  # shards are equal except for padding

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Start and stop of the shard of ``rank`` in the flat buffer, in elements."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """The segments in the shard of ``rank``, in ascending order; a parameter without elements has no segment."""
        low, high = self.shard_range(rank)
        found = []
        for index, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
            start, stop = max(offset, low), min(offset + numel, high)
            if start < stop:
                found.append(Segment(index, start - low, stop - start, start - offset))
        return tuple(found)


@dataclass(frozen=True)
class WholeLayout(FlatLayout):
    """Offsets of parameters that each lie entirely in one shard, for update rules that need whole parameters.

    Parameters are assigned in descending size, each to the shard that holds least so far. So the fullest shard exceeds
    the average by less than one parameter, and a parameter that is larger than the average has a shard of its own.
    Within a shard parameters keep their order. The result depends on sizes only, and so is the same on all ranks.
    """

    @cached_property
    def _places(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shard of each parameter, and the number of elements in each shard including the gaps of alignment."""
        sizes = [_round_up(n, self.align) for n in self.numels]
        lightest = [(0, shard) for shard in range(self.shards)]
        owners = [0] * len(sizes)
        for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):  # stable: equal sizes in their order
            load, owners[index] = lightest[0]
            heapq.heapreplace(lightest, (load + sizes[index], owners[index]))
        loads = {shard: load for load, shard in lightest}
        return tuple(owners), tuple(loads[shard] for shard in range(self.shards))

    @property
    def owners(self) -> tuple[int, ...]:
        """The rank in the shard group that holds each parameter."""
        return self._places[0]

    def owner(self, param: int) -> int:
        return self.owners[param]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        ends = [rank * self.shard_numel for rank in range(self.shards)]
        found = []
        for owner, numel in zip(self.owners, self.numels, strict=True):
            found.append(ends[owner])
            ends[owner] += _round_up(numel, self.align)
        return tuple(found)

    @cached_property
    def padded_numel(self) -> int:
        # Shards must begin at aligned positions too, so that their first parameters do.
        unit = math.lcm(self.multiple // self.shards, self.align)
        return max(_round_up(max(self._places[1]), unit), unit) * self.shards

    @property
    def keeps_whole(self) -> bool:
        return True

    @property
    def imbalance(self) -> float:
        loads = self._places[1]
        return max(loads) * self.shards / sum(loads) - 1 if sum(loads) else 0.0


def imbalance_of(layouts: Iterable[FlatLayout]) -> float:
    """Excess of the fullest shards of several buckets over average shards, as a fraction of the average."""
    weighted = [(layout.numel, layout.imbalance) for layout in layouts]
    return sum(numel * each for numel, each in weighted) / max(sum(numel for numel, _ in weighted), 1)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def runs(segments: Sequence[Segment], key: Callable[[Segment], Hashable], gap: int = 0) -> Iterator[Run]:
    """Group adjacent segments with equal keys into runs.

    Args:
        segments: in ascending order.
        key: returns the key of a segment; ``None`` leaves the segment out and ends the run.
        gap: segments at most this many elements apart count as adjacent. The gaps that alignment leaves are shorter
            than ``FlatLayout.align``; they hold zeros, and computing on them is harmless.
    """
    group: list[Segment] = []
    group_key: Hashable = None
    for segment in segments:
        segment_key = key(segment)
        if group and (segment_key != group_key or segment.start - group[-1].stop > gap):
            yield Run(group[0].start, group[-1].stop, tuple(group))
            group = []
        if segment_key is not None:
            group.append(segment)
        group_key = segment_key
    if group:
        yield Run(group[0].start, group[-1].stop, tuple(group))


class _Sized(Protocol):
    @property
    def numel(self) -> int: ...


T = TypeVar("T", bound=_Sized)


def tiles(parts: Iterable[T], max_numel: int) -> Iterator[tuple[T, ...]]:
    """Group parts of a shard, in order, into tiles of at most ``max_numel`` elements, to bound temporary memory.

    A part that is larger than ``max_numel`` is a tile by itself.
    """
    tile: list[T] = []
    size = 0
    for part in parts:
        if tile and size + part.numel > max_numel:
            yield tuple(tile)
            tile, size = [], 0
        tile.append(part)
        size += part.numel
    if tile:
        yield tuple(tile)
