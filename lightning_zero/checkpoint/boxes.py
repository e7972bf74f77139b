"""Converts slices of a tensor's elements to boxes, by pure functions.

A shard holds a slice of a parameter's elements in memory order; ``torch.distributed.checkpoint`` stores boxes. The
slice ``[4, 20)`` of 4 rows x 6 columns consists of three boxes:

    .  .  .  .  |4  5|
    |6  7  8  9  10 11
    12 13 14 15 16 17|
    |18 19| .  .  .  .
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from lightning_zero.sharding.memory_format import MemoryFormat


class Box(NamedTuple):
    """An N-dimensional part of a tensor.

    Attributes:
        offsets: index of its first element in each dimension.
        sizes: its shape.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def of(self, tensor: Tensor) -> Tensor:
        """The box as a view of ``tensor``."""
        return tensor[tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))]

    def within(self, other: Box) -> Box:
        """The same box with offsets relative to ``other``, which contains it."""
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.sizes)

    def intersection(self, other: Box) -> Box | None:
        """The box of the elements in both boxes; ``None`` if there are none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = [
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None


def boxes_of_slice(form: MemoryFormat, start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up elements ``[start, stop)``, in order; at most ``2 * dimensions - 1`` boxes."""
    inverse = sorted(range(len(form.order)), key=form.order.__getitem__)
    for box in _row_major(tuple(form.shape[dim] for dim in form.order), start, stop):
        yield Box(tuple(box.offsets[i] for i in inverse), tuple(box.sizes[i] for i in inverse))


def view_as_box(values: Tensor, box: Box, form: MemoryFormat) -> Tensor:
    """View a box's elements (1-D, in the memory order of ``form``) in the box's shape."""
    inverse = sorted(range(len(form.order)), key=form.order.__getitem__)
    return values.view([box.sizes[dim] for dim in form.order]).permute(inverse)


def _row_major(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])

    def inside(number: int, low: int, high: int) -> Iterator[Box]:
        """The boxes within one row."""
        for box in _row_major(shape[1:], low - number * row, high - number * row):
            yield Box((number, *box.offsets), (1, *box.sizes))

    first = -(-start // row)  # of the full rows
    yield from inside(first - 1, start, min(stop, first * row)) if start < first * row else ()
    last = stop // row
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if first <= last:
        yield from inside(last, last * row, stop)
