"""Measures how fast a disk reads and writes tiles, and chooses the way of transfers with which it is the fastest."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero import ops
from lightning_zero.storage.disk_file import DiskFile, aligned
from lightning_zero.storage.executor import Lane
from lightning_zero.storage.host import HostStore
from lightning_zero.storage.threads import FILE_LANES

_REGION = 1 << 30  # the most bytes of a file that are written and read again and again
_GAIN = 1.1  # another way must be so much faster than the usual one: less may be chance
_LEAST_TILES = 4  # tiles that a measurement moves at least: fewer tell nothing
# Tiles in memory, about as many as an update by Adam has there. Transfers from and to fewer tiles, which stay in the
# caches of the processor, are up to an eighth faster on a virtual disk.
_IN_MEMORY = 12
_AT_A_TIME = FILE_LANES[Lane.READ]  # tiles that an update reads at the same time, and writes


class Way(NamedTuple):
    """The blocks into which a transfer is cut, and what moves them.

    Attributes:
        depth: the number of blocks that are moved at a time.
        block: bytes of a block.
        backend: what moves them.
    """

    depth: int = 8
    block: int = 1 << 19
    backend: ops.DiskBackend = "threads"

    def pool(self) -> ops.DiskPool:
        """Makes the pool that moves blocks in this way. If the system has no ring left, it uses threads.

        Raises:
            OSError: the system has no thread left either.
        """
        if self.backend != "threads" and not ops.io_uring_refusal():
            with contextlib.suppress(OSError):
                return ops.DiskPool(*self)
        return ops.DiskPool(self.depth, self.block)


# The usual way comes first. SSDs of data centers are fast with many requests, network volumes with large ones.
THREADS = (Way(), Way(4, 1 << 20), Way(16, 1 << 18), Way(32, 1 << 17), Way(16, 1 << 20))
RINGS = tuple(Way(depth, block, "io_uring") for depth, block in ((8, 1 << 19), (32, 1 << 17), (16, 1 << 20)))


def ways() -> tuple[Way, ...]:
    """The ways that this system allows."""
    return THREADS if ops.io_uring_refusal() else (*THREADS, *RINGS)


def usual_way() -> Way:
    """The way that is taken where nothing is measured."""
    return ways()[0]


class DiskSpeed(NamedTuple):
    """Bytes per second.

    Attributes:
        read: reading one tile after the other.
        write: writing one tile after the other over older ones.
        mixed: reading and writing at the same time, as an update does; the sum of both.
    """

    read: float
    write: float
    mixed: float

    def seconds(self, read: int, written: int) -> float:
        """The time in which so many bytes are read and written, as far as possible at the same time."""
        both = min(read, written)
        return 2 * both / self.mixed + (read - both) / self.read + (written - both) / self.write


class _Region:
    """The first part of a file, on which transfers are measured. It is filled with bytes that no disk can compress.

    Args:
        file: the file; the part is overwritten.
        tile: bytes of a transfer.
        limit: the most bytes that the part may have.
        seconds: the time after which it stops filling the part, which is shorter then.
    """

    def __init__(self, file: DiskFile, tile: int, limit: int, seconds: float) -> None:
        self.file, self.tile = file, aligned(tile)
        # A mapping each, as an update has: those of 2 MiB and more are in huge pages, from which transfers are faster.
        self._memory = [HostStore().zeros(self.tile, torch.uint8) for _ in range(_IN_MEMORY)]
        self._memory[0].random_(generator=torch.Generator().manual_seed(0))
        for other in self._memory[1:]:
            other.copy_(self._memory[0])
        fitting = max(1, min(limit, _REGION) // self.tile)
        file.reserve(fitting * self.tile, "a measurement of its speed")
        start = time.perf_counter()
        for filled in range(fitting):
            self.write(self._memory[0], filled * self.tile)
            self._tiles = filled + 1
            if time.perf_counter() - start > seconds and self._tiles >= _LEAST_TILES:
                break
        file.settle()

    def write(self, memory: Tensor, offset: int) -> None:
        self.file.write(memory, offset, "a measurement")

    def read(self, memory: Tensor, offset: int) -> None:
        self.file.read(memory, offset, "a measurement")

    def rate(self, seconds: float, *transfers: Callable[[Tensor, int], None]) -> float:
        """Bytes per second of these transfers, all at the same time, measured for about ``seconds``.

        Each has a part of the file to itself, of which it moves several tiles at the same time. Where transfers use the
        page cache, the time to write it to the disk counts, and it is empty before reads.
        """
        self.file.settle()
        start = time.perf_counter()
        with ThreadPoolExecutor(len(transfers) * _AT_A_TIME) as threads:
            moving = [
                threads.submit(self._move, transfer, part, len(transfers), turn, start + seconds)
                for part, transfer in enumerate(transfers)
                for turn in range(_AT_A_TIME)
            ]
            moved = sum(each.result() for each in moving)
        if self.write in transfers:
            self.file.settle()
        return moved / (time.perf_counter() - start)

    def _move(self, transfer: Callable[[Tensor, int], None], part: int, parts: int, turn: int, end: float) -> int:
        """Transfers every ``_AT_A_TIME``-th tile of a part of the file, one pass after the other, until ``end``.

        Args:
            transfer: transfers a tile between memory and an offset in the file.
            part: number of the part.
            parts: number of parts. Where there are fewer tiles, parts share them.
            turn: number of the first tile.
            end: as above, in seconds of the performance counter.

        Returns:
            The bytes.
        """
        first, tiles, ahead = part * self._tiles // parts, max(1, self._tiles // parts), part * _IN_MEMORY // parts
        for moved in itertools.count():
            if time.perf_counter() >= end and moved >= _LEAST_TILES:
                break
            number = turn + moved * _AT_A_TIME
            transfer(self._memory[(ahead + number) % _IN_MEMORY], (first + number % tiles) * self.tile)
            if not self.file.direct and number % tiles + _AT_A_TIME >= tiles:  # it was the last one of a pass
                self.file.settle()
        return moved * self.tile


def measure(file: DiskFile, tile: int, seconds: float, limit: int = _REGION) -> DiskSpeed:
    """Measure how fast a disk is.

    Args:
        file: a file; its contents are lost.
        tile: bytes of a transfer.
        seconds: for each of three measurements, and for filling the file before.
        limit: the most bytes that the file may have; one tile is always allowed.

    Raises:
        DiskError: the disk has no room, or fails.
    """
    region = _Region(file, tile, limit, seconds)
    return DiskSpeed(
        read=region.rate(seconds, region.read),
        write=region.rate(seconds, region.write),
        mixed=region.rate(seconds, region.read, region.write),
    )


def choose_way(file: DiskFile, tile: int, limit: int, seconds: float = 1.0, among: Sequence[Way] | None = None) -> Way:
    """Find the way in which a disk reads and writes tiles at the same time the fastest. No bit depends on it.

    Args:
        file: a file, whose first ``limit`` bytes are lost. From then on it uses the way that was found.
        tile: bytes of a transfer.
        limit: as above.
        seconds: about how long it takes, if a few tiles do not take longer.
        among: the ways to measure, of each backend the usual one first; by default all that this system allows.

    Raises:
        DiskError: the disk has no room, or fails.
    """
    among = among or ways()
    region, share = _Region(file, tile, limit, seconds / 4), seconds / 2 / len(among)
    rates = {}
    for way in among:
        file.pool = way.pool()
        rates[way] = region.rate(share, region.read, region.write)
    chosen = _fastest(rates)
    file.pool = chosen.pool()
    return chosen


def _fastest(rates: Mapping[Way, float]) -> Way:
    """The faster of the backends, each with its first way, unless another of its ways is clearly faster."""
    best = []
    for backend in dict.fromkeys(way.backend for way in rates):
        usual, *_ = own = [way for way in rates if way.backend == backend]
        fastest = max(own, key=rates.__getitem__)
        best.append(fastest if rates[fastest] > _GAIN * rates[usual] else usual)
    return max(best, key=rates.__getitem__)
