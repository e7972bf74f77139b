"""Tensors without values, and the memory that an executor and a disk keep for copies of them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from typing import NamedTuple

import torch

from lightning_zero.planning.account import Account, Bytes
from lightning_zero.sharding.placement import BucketPlacement
from lightning_zero.storage import Lane, Memory, device_type
from lightning_zero.storage.nvme import passing_limit
from lightning_zero.storage.rested import pieces
from lightning_zero.storage.staging import staged_size
from lightning_zero.update.footprint import Footprint


class RecordedTensor(NamedTuple):
    """A tensor of which only the size is known."""

    numel: int
    dtype: torch.dtype
    memory: Memory = "device"
    pinned: bool = False

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.numel * self.dtype.itemsize

    @property
    def amount(self) -> Bytes:
        """Its size, on its side."""
        return Bytes.of(self.memory, self.nbytes, self.pinned)


class RecordedLanes:
    """Memory that an executor keeps for copies, none of which ends before the host waits for it.

    Tiles of a disk take all that its store may keep, as while the disk is slower than what computes, or, where that is
    more, what those at work at one time need, each of which may lie in memory for the largest.

    Args:
        placement: whose executor's limits it knows, and whether memory in passing is pinned for its device.
        account: notes the memory.
        buffer: bytes that tiles on their way from and to a disk may take.
        resting: bytes that rest there.

    Attributes:
        copied: bytes between the memories, by direction.
        summed: bytes of gradients that are written to a disk and read from it.
    """

    def __init__(self, placement: BucketPlacement, account: Account, buffer: int, resting: int) -> None:
        self._executor = placement.executor
        self._pins = device_type(placement.device).can_pin
        self._leaving: deque[Bytes] = deque()
        self._staged: Counter[Lane] = Counter()  # bytes, since the host has waited
        self._kept: Counter[Lane] = Counter()  # bytes
        self._buffer, self._resting = buffer, resting
        self._kept_passing = 0
        self._expected: dict[Hashable, int] = {}  # tiles that are fetched long before they are gathered, by bucket
        self._most = {"gathered": 0, "updated": 0, "summed": 0}  # tiles at work
        self._window = 0  # tiles in the last window of the bucket that was updated before
        self._largest = 0  # bytes of a tile
        self._apart = Bytes()  # of the device, for what updates compute there beside the training
        self._account = account
        self.copied: Counter[str] = Counter()
        self.summed = 0

    @property
    def staging(self) -> Bytes:
        """Host memory in passing that is kept."""
        return Bytes.on_host(self._kept.total() + self._kept_passing, self._pins)

    def let_go(self, tensor: RecordedTensor, moved: int) -> None:
        """A tensor that was taken is on its way to the host, as so many bytes, and nobody else needs it."""
        self.copied["d2h"] += moved
        self._leaving.append(tensor.amount)
        least = 1 if self._executor.overlaps else 0  # the last copy is not waited for at once
        while len(self._leaving) > least and self._total_leaving > self._executor.in_flight_bytes:
            self._account.give(self._leaving.popleft())

    @property
    def _total_leaving(self) -> int:
        return sum(amount.total for amount in self._leaving)

    def stage(self, lane: Lane, nbytes: int, held: int = 0) -> None:
        """So many bytes pass through host memory, of which others are ``held`` meanwhile."""
        limit = self._executor.staging_bytes
        if not limit or not nbytes + held:
            self._account.touch(Bytes(host=nbytes + held))
            return
        taken = held + (staged_size(nbytes) if nbytes else 0)
        self._staged[lane] += taken
        more = min(self._staged[lane], max(limit, taken)) - self._kept[lane]
        if more > 0:
            self._account.take(Bytes.on_host(more, self._pins))
            self._kept[lane] += more

    def update(self, footprint: Footprint, numel: int, itemsize: int) -> None:
        """Values pass between the memories while a shard is updated: rounded ones, high halves, what is computed apart.

        Args:
            footprint: of the update.
            numel: elements of the shard.
            itemsize: bytes of one.
        """
        apart = footprint.apart
        self.copied.update(h2d=apart.moved, d2h=apart.moved)
        self._account.touch(Bytes(device=apart.device))
        if self._executor.overlaps:  # the longest one may be under way in the next forward
            more = Bytes(device=max(0, apart.device - self._apart.device))
            self._apart += self._account.take(more)
        if not (tile := footprint.master.tile):
            if footprint.published is None:
                self.stage(Lane.H2D, footprint.staged, apart.staged)
                return
            for start, stop in pieces(footprint.published, 0, footprint.staged // itemsize):
                self.stage(Lane.H2D, (stop - start) * itemsize)
            return
        self.copied["d2h"] += footprint.staged
        # While one tile is updated, the next one comes.
        for start, stop in pieces(2 * tile, 0, numel):
            self.stage(Lane.H2D, (stop - start) * itemsize)

    def end_updates(self) -> None:
        """All parameters were used: updates have ended."""
        self._account.give(self._apart)
        self._apart = Bytes()

    def expect_tiles(self, bucket: Hashable, number: int, nbytes: int) -> None:
        """So many tiles of a shard, of so many bytes each, are fetched, and stay until they are gathered or changed."""
        self._expected[bucket] = number
        self._pass_tiles("gathered", 0, nbytes)

    def gather_tiles(self, bucket: Hashable, number: int, nbytes: int) -> None:
        """A shard is gathered tile by tile; so many of them are at work at one time."""
        expected = self._expected.pop(bucket, 0)
        self._pass_tiles("gathered", max(expected, number), nbytes)

    def rest(self, nbytes: int) -> None:
        """So many bytes more rest on the disk."""
        self._resting += nbytes

    def sum_tiles(self, number: int, tile_bytes: int, moved: int) -> None:
        """Gradients are written to a disk, or read there for a sum.

        Args:
            number: of tiles that are at work at one time.
            tile_bytes: of a tile.
            moved: bytes that are written and read.
        """
        self.summed += moved
        self._pass_tiles("summed", number, tile_bytes)

    def begin_updates(self) -> None:
        """The next bucket that is updated is the first of a step."""
        self._window = 0

    def update_tiles(self, bucket: Hashable, window: int, windows: int, nbytes: int) -> None:
        """A bucket is updated window by window, the first of which comes while the last one before it is updated.

        Args:
            bucket: which.
            window: tiles in one, of all of its tensors.
            windows: that are at work at one time.
            nbytes: of a tile.
        """
        self._expected.pop(bucket, None)
        self._pass_tiles("updated", max(window * windows, self._window + window), nbytes)
        self._window = window

    def _pass_tiles(self, kind: str, at_work: int, nbytes: int) -> None:
        self._largest = max(self._largest, nbytes)
        self._most[kind] = max(self._most[kind], at_work + sum(self._expected.values()))
        # Beside the training, an update may be under way while others are gathered.
        number = sum(self._most.values()) if self._executor.overlaps else max(self._most.values())
        kept = max(passing_limit(self._buffer, self._resting), number * self._largest, self._kept_passing)
        self._account.take(Bytes.on_host(kept - self._kept_passing, self._pins))
        self._kept_passing = kept

    def wait(self) -> None:
        """All copies have ended."""
        self._staged.clear()
        while self._leaving:
            self._account.give(self._leaving.popleft())
