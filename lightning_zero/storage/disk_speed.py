"""How fast a disk takes and gives tiles as the engine moves them, and the way of doing so that it likes best."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from lightning_zero import ops
from lightning_zero.storage.disk_file import DiskFile, aligned
from lightning_zero.storage.host import HostStore

_REGION = 1 << 30  # bytes of a file that are written and read over and over, at most
_GAIN = 1.1  # by which another way must be faster than the usual one; less may be chance
_LEAST_TILES = 4  # that are measured: less tells nothing


class Way(NamedTuple):
    """In how many blocks a disk is read and written, and by what.

    Attributes:
        depth: blocks at a time.
        block: bytes of one.
        backend: what moves them.
    """

    depth: int = 8
    block: int = 1 << 19
    backend: ops.DiskBackend = "threads"

    def pool(self) -> ops.DiskPool:
        """Makes what does so: threads where the system has no ring left, whatever the backend.

        Raises:
            OSError: it has no thread left either.
        """
        if self.backend != "threads" and not ops.io_uring_refusal():
            with contextlib.suppress(OSError):
                return ops.DiskPool(*self)
        return ops.DiskPool(self.depth, self.block)


# The usual one first. SSDs of data centers want many requests, network volumes large ones.
THREADS = (Way(), Way(4, 1 << 20), Way(16, 1 << 18), Way(32, 1 << 17), Way(16, 1 << 20))
RINGS = tuple(Way(depth, block, "io_uring") for depth, block in ((8, 1 << 19), (32, 1 << 17), (16, 1 << 20)))


def ways() -> tuple[Way, ...]:
    """Those that this system lets."""
    return THREADS if ops.io_uring_refusal() else (*THREADS, *RINGS)


def usual_way() -> Way:
    """That which is taken where none is measured."""
    return ways()[0]


class DiskSpeed(NamedTuple):
    """Bytes per second.

    Attributes:
        read: one tile after the other.
        write: likewise, over what was written before.
        mixed: read and written at the same time, as an update does; both count.
    """

    read: float
    write: float
    mixed: float

    def seconds(self, read: int, written: int) -> float:
        """The time that so many bytes take, of which as many as possible are read and written at the same time."""
        both = min(read, written)
        return 2 * both / self.mixed + (read - both) / self.read + (written - both) / self.write


class _Region:
    """The part of a file that is measured, filled with what no disk can compress.

    Args:
        file: whose first bytes are overwritten.
        tile: bytes of a transfer.
        limit: bytes of the part.
        seconds: after which no more is filled.
    """

    def __init__(self, file: DiskFile, tile: int, limit: int, seconds: float) -> None:
        self.file, self.tile = file, aligned(tile)
        self._memory = HostStore().zeros(self.tile, torch.uint8)
        self._memory.random_(generator=torch.Generator().manual_seed(0))
        self._other = HostStore().zeros(self.tile, torch.uint8)
        fitting = max(1, min(limit, _REGION) // self.tile)
        file.reserve(fitting * self.tile, "a measurement of its speed")
        start = time.perf_counter()
        for filled in range(fitting):
            self.write(filled * self.tile)
            self._tiles = filled + 1
            if time.perf_counter() - start > seconds and self._tiles >= _LEAST_TILES:
                break
        file.settle()

    def write(self, offset: int) -> None:
        self.file.write(self._memory, offset, "a measurement")

    def read(self, offset: int) -> None:
        self.file.read(self._other, offset, "a measurement")

    def rate(self, seconds: float, *transfers: Callable[[int], None]) -> float:
        """Bytes per second of these transfers at the same time, for about so long.

        What passes through the page cache is written to the disk inside, and read from there.
        """
        self.file.settle()
        start = time.perf_counter()
        with ThreadPoolExecutor(len(transfers)) as threads:
            apart = self._tiles // len(transfers)  # tiles, between what is read and what is written
            moving = [
                threads.submit(self._move, transfer, number * apart, start + seconds)
                for number, transfer in enumerate(transfers)
            ]
            moved = sum(each.result() for each in moving)
        if self.write in transfers:
            self.file.settle()
        return moved / (time.perf_counter() - start)

    def _move(self, transfer: Callable[[int], None], first: int, end: float) -> int:
        """Transfers one tile after the other, over and over, until then; returns the bytes."""
        for number in itertools.count():
            if time.perf_counter() >= end and number >= _LEAST_TILES:
                break
            transfer((first + number) % self._tiles * self.tile)
            if not self.file.direct and (number + 1) % self._tiles == 0:
                self.file.settle()
        return number * self.tile


def measure(file: DiskFile, tile: int, seconds: float, limit: int = _REGION) -> DiskSpeed:
    """Measure how fast a disk is.

    Args:
        file: whose contents are lost.
        tile: bytes of a transfer.
        seconds: for each of three measurements, and to fill the file before.
        limit: bytes that the file may take; one tile it always does.

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
    """Find out how a disk reads and writes tiles at the same time the fastest. No result depends on it.

    Args:
        file: whose first ``limit`` bytes are lost. It moves what follows in the way that was found.
        tile: bytes of a transfer.
        limit: as above.
        seconds: that it takes, or as long as a few tiles do.
        among: the ways that are measured, of each backend the usual one first; by default all of this system.

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
    """Of each backend the first way, unless another one is clearly faster, and then the faster backend."""
    best = []
    for backend in dict.fromkeys(way.backend for way in rates):
        usual, *_ = own = [way for way in rates if way.backend == backend]
        fastest = max(own, key=rates.__getitem__)
        best.append(fastest if rates[fastest] > _GAIN * rates[usual] else usual)
    return max(best, key=rates.__getitem__)
