"""Tensors without values for plans, and the memory that an executor and a disk keep for copies of them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from typing import NamedTuple

import torch

from lightning_zero.planning.account import NOTHING, Account, Bytes
from lightning_zero.sharding.placement import BucketPlacement
from lightning_zero.storage import Lane, Memory, device_type
from lightning_zero.storage.nvme import passing_limit
from lightning_zero.storage.rested import pieces
from lightning_zero.storage.staging import staged_size
from lightning_zero.update.footprint import Footprint


class RecordedTensor(NamedTuple):
    """A tensor that has only a size and a place."""

    numel: int
    dtype: torch.dtype
    memory: Memory = "device"
    pinned: bool = False

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def amount(self) -> Bytes:
        """The number of bytes, in the memory in which they are."""
        return Bytes.of(self.memory, self.nbytes, self.pinned)


class RecordedLanes:
    """Counts the memory that an executor keeps for copies, as if no copy ended before the host waits for it.

    Tiles of a disk are counted with the largest memory that its store may keep, which it uses if the disk is slower
    than the computation. If the tiles that are in use at one time need more, these count, each in the size of the
    largest tile.

    Args:
        placement: gives the limits of its executor, and says whether memory for copies is pinned for its device.
        account: counts the memory.
        buffer: bytes that tiles on their way from and to a disk may take.
        resting: bytes that rest on the disk.

    Attributes:
        copied: bytes copied between the memories, by direction.
        summed: bytes of gradients that are written to a disk and read from it.
        added: bytes that the host reads and writes to add up gradients of micro-batches that come from a device.
    """

    def __init__(self, placement: BucketPlacement, account: Account, buffer: int, resting: int) -> None:
        self._executor = placement.executor
        self._pins = device_type(placement.device).can_pin
        self._leaving: deque[Bytes] = deque()  # to the host
        self._reduced: deque[Bytes] = deque()  # read by reductions that go on beside the training
        self._reducing = NOTHING  # read by the one that is being submitted
        self._staged: Counter[Lane] = Counter()  # bytes since the host last waited
        self._kept: Counter[Lane] = Counter()  # bytes
        self._buffer, self._resting = buffer, resting
        self._kept_passing = 0
        self._expected: dict[Hashable, int] = {}  # number of tiles that are fetched ahead of their gather, by bucket
        self._most = {"gathered": 0, "updated": 0, "summed": 0}  # most tiles in use at one time
        self._window = 0  # number of tiles in the last window of the previously updated bucket
        self._largest = 0  # bytes of a tile
        self._apart = Bytes()  # memory of the device for computations of updates beside the training
        self._account = account
        self.copied: Counter[str] = Counter()
        self.summed = self.added = 0

    @property
    def staging(self) -> Bytes:
        """Host memory that is kept for copies to pass through."""
        return Bytes.on_host(self._kept.total() + self._kept_passing, self._pins)

    def let_go(self, tensor: RecordedTensor, moved: int) -> None:
        """Notes that a taken tensor is copied to the host, as ``moved`` bytes, and is not needed any more."""
        self.copied["d2h"] += moved
        self._leaving.append(tensor.amount)
        if self._reducing == NOTHING:
            self._bound()

    def keep(self, tensor: RecordedTensor) -> None:
        """Notes that a taken tensor is read by a reduction beside the training, and is not needed any more."""
        self._reducing += tensor.amount

    def end_reduction(self) -> None:
        """Notes that a reduction beside the training has been submitted."""
        self._reduced.append(self._reducing)
        self._reducing = NOTHING
        self._bound()

    def _bound(self) -> None:
        """Notes that the training waits where work beside it keeps more memory than it may."""
        least = 1 if self._executor.overlaps else 0  # the last work need not end at once
        for kept in (self._leaving, self._reduced):
            while len(kept) > least and sum(amount.total for amount in kept) > self._executor.in_flight_bytes:
                self._account.give(kept.popleft())

    def add_up(self, values: RecordedTensor, total: RecordedTensor) -> None:
        """Notes that ``values`` are copied to the host, and added to ``total`` there."""
        self.stage(Lane.D2H, values.nbytes)
        self.added += values.nbytes + 2 * total.nbytes

    def stage(self, lane: Lane, nbytes: int, held: int = 0) -> None:
        """Notes that ``nbytes`` pass through host memory, while ``held`` bytes are kept there."""
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
        """Notes copies during the update of a shard: of rounded values, upper halves, and computations on the device.

        Args:
            footprint: the footprint of the update.
            numel: number of elements of the shard.
            itemsize: bytes of an element.
        """
        apart = footprint.apart
        self.copied.update(h2d=apart.moved, d2h=apart.moved)
        self._account.touch(Bytes(device=apart.device))
        if self._executor.overlaps:  # the longest update may still run in the next forward
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
        """Notes that all updates have ended, since all parameters were used."""
        self._account.give(self._apart)
        self._apart = Bytes()

    def expect_tiles(self, bucket: Hashable, number: int, nbytes: int) -> None:
        """Notes that ``number`` tiles of ``nbytes`` are fetched ahead, and stay until they are gathered or changed."""
        self._expected[bucket] = number
        self._pass_tiles("gathered", 0, nbytes)

    def gather_tiles(self, bucket: Hashable, number: int, nbytes: int) -> None:
        """Notes that a shard is gathered tile by tile, with ``number`` tiles in use at one time."""
        expected = self._expected.pop(bucket, 0)
        self._pass_tiles("gathered", max(expected, number), nbytes)

    def rest(self, nbytes: int) -> None:
        """Notes that ``nbytes`` more rest on the disk."""
        self._resting += nbytes

    def sum_tiles(self, number: int, tile_bytes: int, moved: int) -> None:
        """Notes that gradients are written to a disk, or read from it for a sum.

        Args:
            number: number of tiles in use at one time.
            tile_bytes: bytes of a tile.
            moved: bytes that are written and read.
        """
        self.summed += moved
        self._pass_tiles("summed", number, tile_bytes)

    def begin_updates(self) -> None:
        """Notes that the next updated bucket is the first of a step."""
        self._window = 0

    def update_tiles(self, bucket: Hashable, window: int, windows: int, nbytes: int) -> None:
        """Notes that a bucket is updated window by window; its first window is fetched during the previous update.

        Args:
            bucket: the key of the bucket.
            window: number of tiles in a window, of all of its tensors.
            windows: number of windows in use at one time.
            nbytes: bytes of a tile.
        """
        self._expected.pop(bucket, None)
        self._pass_tiles("updated", max(window * windows, self._window + window), nbytes)
        self._window = window

    def _pass_tiles(self, kind: str, at_work: int, nbytes: int) -> None:
        self._largest = max(self._largest, nbytes)
        self._most[kind] = max(self._most[kind], at_work + sum(self._expected.values()))
        # Beside the training, a bucket may be updated while others are gathered.
        number = sum(self._most.values()) if self._executor.overlaps else max(self._most.values())
        kept = max(passing_limit(self._buffer, self._resting), number * self._largest, self._kept_passing)
        self._account.take(Bytes.on_host(kept - self._kept_passing, self._pins))
        self._kept_passing = kept

    def wait(self) -> None:
        """Notes that all copies have ended."""
        self._staged.clear()
        for kept in (self._leaving, self._reduced):
            while kept:
                self._account.give(kept.popleft())
