"""Places of all elements of a bucket: pure functions of sizes, ranks and shard counts.

A bucket's parameters lie one after the other in one 1-D *flat buffer*, padded at the end so that it splits into equal
*shards*, one per rank of the shard group. Each begins on a cache line, as a tensor of its own would: matrix products
differ in the last bit with the alignment of their operands. Shard borders fall anywhere, also inside a parameter. A
*segment* is the part of one parameter that lies in one shard:

    parameters   |----- 0 -----|-- 1 --|---------- 2 ----------|pad|
    shards       |------- rank 0 -------|------- rank 1 -----------|
    segments     |----- 0 -----|-- 1 --|2|---------- 2 ---------|

In a *whole-parameter layout* no shard border falls inside a parameter: each lies whole in one shard, and every shard is
padded to the length of the fullest. The buffers and what is done with them are the same:

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
    """The run of one parameter's elements that one rank owns; the unit of update."""

    param: int  # index of the parameter in its bucket
    start: int  # first element, counted inside the shard
    numel: int
    param_start: int  # the same element, counted inside the parameter as it lies in memory

    @property
    def stop(self) -> int:
        return self.start + self.numel


class Run(NamedTuple):
    """A contiguous range of the shard with the segments that it touches: adjacent ones, which share a key."""

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
        """The run in pieces of at most ``max_numel`` elements; a segment may be in several."""
        for start in range(self.start, self.stop, max_numel):
            yield self._part(start, min(start + max_numel, self.stop))

    def cut_at(self, tile: int | None) -> Iterator[Run]:
        """The run in pieces that end where tiles of so many elements of the shard do; see :func:`pieces`."""
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
        multiple: the padded length is a multiple of this, and this of S.
        align: parameters begin at multiples of this.
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
        """Elements of the parameters, without any padding."""
        return sum(self.numels)

    @cached_property
    def padded_numel(self) -> int:
        end = self.offsets[-1] + self.numels[-1] if self.numels else 0
        # At least one element per shard: collectives and views of zero elements are a special case nobody needs.
        return max(_round_up(end, self.multiple), self.multiple)

    @cached_property
    def shard_numel(self) -> int:
        return self.padded_numel // self.shards

    @property
    def keeps_whole(self) -> bool:
        """Whether each parameter lies whole in one shard."""
        return self.shards == 1

    def owner(self, param: int) -> int:
        """The rank of the shard group that a parameter lies on, where each lies whole in one shard."""
        assert self.keeps_whole
        return 0

    @property
    def imbalance(self) -> float:
        """How much more the fullest shard holds than the average one, as a fraction of the average."""
        return 0.0  # shards are equal, but for padding

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Start and stop of the shard of ``rank`` in the flat buffer."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """The segments of the shard of ``rank``, in ascending order; parameters without elements have none."""
        low, high = self.shard_range(rank)
        found = []
        for index, (offset, numel) in enumerate(zip(self.offsets, self.numels, strict=True)):
            start, stop = max(offset, low), min(offset + numel, high)
            if start < stop:
                found.append(Segment(index, start - low, stop - start, start - offset))
        return tuple(found)


@dataclass(frozen=True)
class WholeLayout(FlatLayout):
    """Offsets of parameters that each lie whole in one shard, for rules that need a parameter in its own shape.

    The largest parameter goes first, each to the shard that holds least so far: the fullest shard exceeds the average
    by less than one parameter, and a parameter larger than the average has a shard for itself. Within a shard
    parameters keep their order. All ranks find the same places, which depend on sizes only.
    """

    @cached_property
    def _places(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shard of each parameter, and the elements in each shard with the gaps that alignment leaves."""
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
        """The rank of the shard group that each parameter lies on."""
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
        # Shards begin at aligned places too, or parameters would not.
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
    """How much more the fullest shards of several buckets hold than average ones, as a fraction of the average."""
    weighted = [(layout.numel, layout.imbalance) for layout in layouts]
    return sum(numel * each for numel, each in weighted) / max(sum(numel for numel, _ in weighted), 1)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def runs(segments: Sequence[Segment], key: Callable[[Segment], Hashable], gap: int = 0) -> Iterator[Run]:
    """Group adjacent segments with equal keys; a ``None`` key leaves the segment out and ends the run.

    Args:
        segments: in ascending order.
        key: of a segment.
        gap: segments at most this far apart are adjacent. Alignment leaves gaps shorter than ``FlatLayout.align``; they
            hold zeros and may be computed on.
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
    """Group parts of a shard, in order, into tiles of at most ``max_numel`` elements; a larger part is one by itself.

    Bounds the temporary memory of an update.
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
