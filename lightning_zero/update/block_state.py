"""Optimizer state of a bucket's segments in 8 bits per element. All code but the kernels reads it as fp32."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero import ops
from lightning_zero.sharding import Bucket, BucketForm, FlatLayout, Run, Segment
from lightning_zero.storage.rested import changing, pieces
from lightning_zero.update.state import ShardState, State


def count_scales(bucket: Bucket | BucketForm) -> int:
    """Counts the blocks that this rank's segments touch. Each has one scale for every name of the state."""
    return sum(ops.count_blocks(segment.param_start, segment.numel) for segment in bucket.segments)


class ScalePiece(NamedTuple):
    """The scales of one segment of a bucket."""

    rank: int  # the owner's rank in the shard group
    first: int  # index of the first scale among all scales of the bucket: rank 0's, then rank 1's, ...
    blocks: int  # number of blocks, each of which has one scale
    param_start: int  # the segment's first element, counted in the parameter


class ScaleLayout(NamedTuple):
    """The places of a bucket's scales among the scales of all ranks of the shard group."""

    ranges: list[tuple[int, int]]  # where each rank's scales begin and end
    pieces: dict[int, list[ScalePiece]]  # by index of the parameter, in ascending order

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, layout: FlatLayout) -> ScaleLayout:
        """Compute the places for a layout of parameters."""
        found, first = cls([], {}), 0
        for rank in range(layout.shards):
            begin = first
            for segment in layout.segments(rank):
                blocks = ops.count_blocks(segment.param_start, segment.numel)
                piece = ScalePiece(rank, first, blocks, segment.param_start)
                found.pieces.setdefault(segment.param, []).append(piece)
                first += blocks
            found.ranges.append((begin, first))
        return found

    def place(self, param: int) -> tuple[int, int]:
        """The range of the scales of parameter ``param``. Adjacent segments have adjacent scales."""
        pieces = self.pieces[param]
        return pieces[0].first, pieces[-1].first + pieces[-1].blocks

    def starts(self, param: int) -> tuple[int, ...]:
        """Elements of parameter ``param`` at which scales start anew: 0, and each shard border that cuts a block."""
        return (0, *(piece.param_start for piece in self.pieces[param] if piece.param_start % ops.BLOCK))


class BlockShardState(ShardState):
    """State of one bucket's segments in blocks (:class:`lightning_zero.ops.Quantized`).

    Blocks are counted from the beginning of a parameter, in the order of its memory. Where a shard border cuts a block,
    each of the two ranks keeps its part of the block with a scale of its own. If the state rests on a disk, tiles end
    where blocks end. The scales, one byte per block, stay in memory.

    Args:
        bucket: the bucket.
        signed: the format of each name of the per-element state; see :class:`lightning_zero.ops.Quantized`.
    """

    def __init__(self, bucket: Bucket, signed: Mapping[str, bool]) -> None:
        super().__init__(bucket, frozenset(signed), torch.int8)
        self._signed = signed
        self._segments = bucket.segments
        self._scale_count = count_scales(bucket)
        blocks = (ops.count_blocks(segment.param_start, segment.numel) for segment in bucket.segments)
        self._first_scale = dict(zip(bucket.segments, accumulate(blocks, initial=0), strict=False))
        self._scales: dict[str, Tensor] = {}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return dict.fromkeys(self.flat, torch.float32)

    @property
    def signed(self) -> Mapping[str, bool]:
        """The format of each name of the per-element state: True if its codes are signed."""
        return self._signed

    def read_codes(self, name: str, start: int, stop: int) -> Tensor:
        """Codes of elements ``[start, stop)`` of the shard: ``[stop - start]`` int8, zeros if there are none yet."""
        return super().read(name, torch.int8, start, stop)

    def read_scales(self, name: str, start: int, stop: int) -> Tensor:
        """This rank's scales ``[start, stop)``, segment by segment: uint8, zeros if there are none yet."""
        scales = self._scales.get(name)
        return torch.zeros(stop - start, dtype=torch.uint8, device="cpu") if scales is None else scales[start:stop]

    def parts(self, name: str, dtype: torch.dtype, run: Run) -> ops.Quantized:
        (segment,) = run.segments
        codes = self.ensure(name, torch.int8).view(run.start, run.stop)
        return ops.Quantized(codes, self._scales_of(name, segment, run.start, run.stop))

    def put_slice(self, segment: Segment, state: State, dtype: torch.dtype, own_dtype: frozenset[str]) -> None:
        names, scalars = [], {}
        for name, value in state.items():
            if name in self._signed and isinstance(value, Tensor):
                self._fill_blocks(name, segment, value)
                names.append(name)
            else:
                scalars[name] = value.detach().clone() if isinstance(value, Tensor) else value
        self.put_scalars(segment, scalars, tuple(names))

    def read(self, name: str, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        values = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
        for segment in self._segments if name in self.flat else ():
            # State that rests outside of memory is read one tile at a time.
            for low, high in pieces(self.flat[name].tile, max(segment.start, start), min(segment.stop, stop)):
                part = ops.Quantized(self.flat[name].read(low, high), self._scales_of(name, segment, low, high))
                index = segment.param_start + low - segment.start
                ops.dequantize_(values[low - start : high - start], part, signed=self._signed[name], index=index)
        return values

    def _fill_blocks(self, name: str, segment: Segment, full: Tensor) -> None:
        codes = self.ensure(name, torch.int8)
        for low, high in pieces(codes.tile, segment.start, segment.stop):
            index = segment.param_start + low - segment.start
            values = torch.empty(high - low, dtype=torch.float32, device="cpu")
            self._formats[segment.param].read(full, index, values)
            with changing(codes, low, high) as changed:
                part = ops.Quantized(changed, self._scales_of(name, segment, low, high))
                ops.quantize_(values, part, signed=self._signed[name], index=index)

    def clear(self) -> None:
        super().clear()
        self._scales = {}

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.resident_nbytes

    @property
    def resident_nbytes(self) -> int:
        return sum(scales.nbytes for scales in self._scales.values())

    def _scales_of(self, name: str, segment: Segment, start: int, stop: int) -> Tensor:
        """Scales of elements ``[start, stop)`` of the shard, all in the segment. Memory is allocated on first use."""
        if name not in self._scales:
            self._scales[name] = self._store.zeros(self._scale_count, torch.uint8, crosses=False)
        index = segment.param_start + start - segment.start
        first = self._first_scale[segment] + index // ops.BLOCK - segment.param_start // ops.BLOCK
        return self._scales[name][first : first + ops.count_blocks(index, stop - start)]
