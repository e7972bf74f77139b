"""Tensors on a disk, fetched a tile at a time into host memory in passing, and committed when they were changed.

Reads and writes are jobs in lanes of their own, so that one tile is fetched while another is written. A tile that is
fetched again waits for the write that was to keep it; one is written after its fetch. A CRC-32 of each tile is known
from when it was written, and verified when it is fetched. A tile of zeros is neither written nor read: so are all from
the start, gradients of what no rank has used, and state that has not moved.
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Container, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from zlib_ng.zlib_ng import crc32

from lightning_zero.advice import Case, advice
from lightning_zero.storage.disk_file import DiskError, DiskFile, aligned
from lightning_zero.storage.disk_speed import Way, choose_way, usual_way
from lightning_zero.storage.executor import DONE, Executor, Lane, Staged, Ticket
from lightning_zero.storage.host import HostStore
from lightning_zero.storage.rested import Memory
from lightning_zero.storage.run_folder import RunFolder
from lightning_zero.storage.staging import Staging
from lightning_zero.storage.windowed import Window, Windowed

_LEAST_TILE, _LARGEST_TILE = 1 << 12, 1 << 20  # elements; of the least, one byte each fills a page
_IN_FLIGHT = 3  # tiles of one bucket: one is fetched, one updated, one written
_AT_WORK = 10  # tiles: two of a master, of two moments and of parameters in an update, and two that are gathered
_PROBED = 64  # bytes
_TYPICAL_ITEMSIZE = 16  # bytes per element: fp32 masters and three states of their size


def tile_numel(buffer_bytes: int) -> int:
    """Elements of a tile of which as many as are in flight fit ``buffer_bytes``: a power of two."""
    fitting = max(1, buffer_bytes // (_IN_FLIGHT * _TYPICAL_ITEMSIZE))
    return min(max(1 << (fitting.bit_length() - 1), _LEAST_TILE), _LARGEST_TILE)


def transfer_bytes(buffer_bytes: int) -> int:
    """Bytes of a tile of fp32 values: most transfers move so many."""
    return tile_numel(buffer_bytes) * torch.float32.itemsize


def passing_limit(buffer_bytes: int, resting: int) -> int:
    """The host memory that tiles pass through at most, unless those that are at work at one time need more.

    Args:
        buffer_bytes: that the user allows.
        resting: bytes that rest on the disk.
    """
    return min(buffer_bytes, resting)


def tiles_at_work(window: int, numel: int) -> int:
    """Tiles of a tensor that are at work at one time: one is computed on, and one is fetched meanwhile.

    Args:
        window: elements of what is fetched at once, one tile or more.
        numel: of the tensor.
    """
    return min(-(-numel // window), _IN_FLIGHT - 1)


def tiles_ahead(buffer_bytes: int, itemsize: int) -> int:
    """Tiles of parameters that are fetched long before they are gathered: half of the buffer at most.

    As many are left as are at work in an update and in a gather beside it. Tiles of 16-bit parameters may lie in memory
    that was taken for tiles of 32 bits.

    Args:
        buffer_bytes: that the user allows.
        itemsize: of an element.
    """
    tile = tile_numel(buffer_bytes)
    others = buffer_bytes // (tile * torch.float32.itemsize) - _AT_WORK
    return max(0, min(buffer_bytes // 2 // (tile * itemsize), others))


class DiskStore:
    """State rests in a file; what must be in memory, such as gradients that fit there, in host memory.

    Attributes:
        file: where; ``None`` in a plan.

    Args:
        file: as above.
        executor: does the reads and writes.
        buffer_bytes: of host memory that tiles pass through; they take no more than what rests in the store does.
        pin_for: see :class:`~lightning_zero.storage.host.HostStore`.
        checksums: verify tiles when they are fetched.
    """

    device = torch.device("cpu")
    exact = True
    memory: Memory = "host"
    resting_memory: Memory = "disk"
    as_on_host = True

    def __init__(
        self,
        file: DiskFile | None,
        executor: Executor,
        buffer_bytes: int,
        pin_for: torch.device | None = None,
        checksums: bool = True,
    ) -> None:
        self.file = file
        self.passing_bytes = buffer_bytes
        self.tile: int | None = tile_numel(buffer_bytes)
        self._executor = executor
        self._host = HostStore(pin_for)
        self._staging = Staging(pin_for or self.device, buffer_bytes)
        self._checksums = checksums
        self._folder: RunFolder | None = None  # is removed when nobody refers to it
        self._failed: DiskError | None = None  # what was to be written then is lost

    @classmethod
    def in_folder(
        cls,
        folder: RunFolder,
        executor: Executor,
        buffer_bytes: int,
        direct: bool = True,
        way: Way | None = None,
        **options: Any,
    ) -> DiskStore:
        """A store with a file of its own in a folder, which is removed with the store. Without a ``way`` the usual one.

        Raises:
            DiskError: the file cannot be made.
        """
        file = DiskFile(Path(folder.path, "state.bin"), (way or usual_way()).pool(), direct)
        store = cls(file, executor, buffer_bytes, **options)
        store._folder = folder
        return store

    @property
    def pins(self) -> bool:
        return self._host.pins

    def zeros(self, numel: int, dtype: torch.dtype, *, crosses: bool = True) -> Tensor:
        return self._host.zeros(numel, dtype, crosses=crosses)

    def rest(self, numel: int, dtype: torch.dtype, what: str, *, crosses: bool = False) -> DiskTensor:
        # Whatever it is, it passes through the store's buffer, which parameters cross from: all of that is pinned.
        return DiskTensor(self, numel, dtype, what)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.remove()

    def reserve(self, nbytes: int) -> None:
        """Make sure that the disk has room for ``nbytes`` in all.

        Raises:
            DiskError: it has not; with the bytes that are needed and free.
        """
        self.opened.reserve(nbytes, "masters, optimizer state and gradients")

    def choose_way(self, seconds: float) -> Way:
        """Find the fastest way of transfers for what was reserved, before any of it is given out, in about so long.

        Raises:
            DiskError: the disk fails.
        """
        return choose_way(self.opened, transfer_bytes(self.passing_bytes), self.opened.nbytes, seconds)

    @property
    def opened(self) -> DiskFile:
        """The file."""
        assert self.file is not None, "a store of a plan keeps nothing"
        return self.file

    @property
    def staged_bytes(self) -> int:
        """Host memory that tiles pass through now."""
        return self._staging.nbytes

    def check(self) -> None:
        """Raise what a write has failed with, if one has: what the disk holds is not what it should."""
        if self._failed is not None:
            raise DiskError(*self._failed.args) from self._failed

    def take(self, nbytes: int) -> Staged:
        """Memory in passing; 1-D, bytes."""
        self._staging.limit = passing_limit(self.passing_bytes, self.opened.given)
        return self._staging.take(torch.empty(nbytes, dtype=torch.uint8, device="meta"))

    def give(self, staged: Staged, work: Ticket) -> None:
        """Give it back, when ``work`` ends."""
        self._staging.give(staged, work)

    def copy_for(self, nbytes: int) -> Tensor:
        """Memory for a copy that someone reads; 1-D, bytes."""
        return HostStore().zeros(nbytes, torch.uint8)

    def load(self, tensor: DiskTensor, first: int, memory: Tensor, after: Sequence[Ticket]) -> Ticket:
        """Begin to read tiles from ``first`` on, after writes of them."""
        self.check()
        return self._executor.submit(partial(self._load, tensor, first, memory), Lane.READ, tensor.what, after)

    def keep(self, tensor: DiskTensor, first: int, memory: Tensor, after: Sequence[Ticket]) -> Ticket:
        """Begin to write tiles from ``first`` on."""
        self.check()
        return self._executor.submit(partial(self._keep, tensor, first, memory), Lane.WRITE, tensor.what, after)

    def _load(self, tensor: DiskTensor, first: int, memory: Tensor) -> None:
        self.check()  # again: it may have waited for long
        tiles = list(tensor.tiles_in(first, memory))
        for start, stop in _runs_of(tensor.sums, first, len(tiles)):
            begin, end = tensor.offset_of(first + start), start * tensor.tile_bytes
            part = memory[end : stop * tensor.tile_bytes]
            self.opened.read(part, begin, tensor.what)
        for number, tile in enumerate(tiles, first):
            expected = tensor.sums.get(number)
            if expected is None:
                tile.zero_()
            elif self._checksums and crc32(tile.numpy().data) != expected:
                path, offset = self.opened.path, tensor.offset_of(number)
                raise DiskError(
                    errno.EIO,
                    f"{tensor.what} in {path}, {tile.nbytes:,} bytes from {offset:,} on, is not what was written: its "
                    f"checksum does not match{advice(Case.DISK_DAMAGED, '. ')}",
                    str(path),
                )

    def _keep(self, tensor: DiskTensor, first: int, memory: Tensor) -> None:
        self.check()
        tiles = [*tensor.tiles_in(first, memory)]
        sums = {
            n: crc32(tile.numpy().data) if self._checksums else 0
            for n, tile in enumerate(tiles, first)
            if not _is_zeros(tile)
        }
        try:
            for start, stop in _runs_of(sums, first, len(tiles)):
                part = memory[start * tensor.tile_bytes : stop * tensor.tile_bytes]
                self.opened.write(part, tensor.offset_of(first + start), tensor.what)
        except DiskError as error:
            self._failed = error
            raise
        for number in range(first, first + len(tiles)):
            tensor.sums.pop(number, None)
        tensor.sums |= sums


def _is_zeros(tile: Tensor) -> bool:
    """Whether all its bytes are zeros: of few others are the first ones."""
    return not tile[:_PROBED].any() and not tile.any()


def _runs_of(chosen: Container[int], first: int, count: int) -> Iterator[tuple[int, int]]:
    """Runs of those of ``count`` tiles from ``first`` on that are chosen, counted from there."""
    start = None
    for number in range(count + 1):
        written = number < count and first + number in chosen
        if written and start is None:
            start = number
        elif not written and start is not None:
            yield start, number
            start = None


class DiskTensor(Windowed):
    """A tensor that rests on a disk, zeros at first; see :class:`~lightning_zero.storage.rested.Rested`.

    Attributes:
        what: it is, for messages.
        sums: checksums of the tiles that are not zeros, and lie in the file, by their number.
        tile_bytes: of all tiles but the last one, which may be shorter.

    Args:
        store: that it rests in.
        numel: number of elements.
        dtype: of the elements.
        what: as above.

    Raises:
        DiskError: the disk is full.
    """

    memory: Memory = "disk"
    device = torch.device("cpu")

    def __init__(self, store: DiskStore, numel: int, dtype: torch.dtype, what: str) -> None:
        super().__init__()
        assert store.tile is not None
        self.numel, self.dtype, self.what, self.tile = numel, dtype, what, store.tile
        self.tile_bytes = self.tile * dtype.itemsize
        self.sums: dict[int, int] = {}
        self._store = store
        self._offset = store.opened.allocate(numel * dtype.itemsize, what)
        self._writes: dict[int, Ticket] = {}  # by tile: the last one, unless it was seen to have ended
        weakref.finalize(self, store.opened.free, self._offset, numel * dtype.itemsize)

    def commit(self, start: int, stop: int, after: Sequence[Ticket] = ()) -> None:
        for window in self._overlapping(start, stop):
            self._windows.remove(window)
            first, last = self._tiles_of(window.start, window.stop)
            written = self._store.keep(self, first, window.staged.tensor, (window.arrived, *after))
            self._writes |= dict.fromkeys(range(first, last), written)
            self._store.give(window.staged, written)

    def read(self, start: int, stop: int) -> Tensor:
        if start == stop:
            return torch.empty(0, dtype=self.dtype)
        if self.holds(start, stop):
            return self.view(start, stop)
        self._forget_unseen(start, stop)
        assert not self._overlapping(start, stop), f"{self.what} is read while a part of it is changed"
        first, last = self._tiles_of(start, stop)
        memory = self._store.copy_for(self._bytes(first, last))
        self._load(first, last, memory).synchronize()
        begin = first * self.tile
        return self._elements(first, last, memory)[start - begin : stop - begin]

    def offset_of(self, tile: int) -> int:
        """Where in the file a tile begins."""
        return self._offset + tile * self.tile_bytes

    def tiles_in(self, first: int, memory: Tensor) -> Iterator[Tensor]:
        """The bytes of the elements of each tile in ``memory``, which holds tiles from ``first`` on."""
        for start in range(0, memory.nbytes, self.tile_bytes):
            end = min(start + self.tile_bytes, self.numel * self.dtype.itemsize - first * self.tile_bytes)
            yield memory[start:end]

    def _fetch(self, start: int, stop: int) -> Window:
        window, tiles = self._blank(start, stop), self._tiles_of(start, stop)
        window.arrived = self._load(*tiles, window.staged.tensor)
        return window

    def _blank(self, start: int, stop: int) -> Window:
        first, last = self._tiles_of(start, stop)
        staged = self._store.take(self._bytes(first, last))
        values, begin = self._elements(first, last, staged.tensor), first * self.tile
        return Window(begin, begin + values.numel(), staged, values, DONE)

    def _give(self, staged: Staged, work: Ticket) -> None:
        self._store.give(staged, work)

    def _tiles_of(self, start: int, stop: int) -> tuple[int, int]:
        """The tiles ``[first, last)`` in which elements ``[start, stop)`` are."""
        return start // self.tile, -(-stop // self.tile)

    def _load(self, first: int, last: int, memory: Tensor) -> Ticket:
        """Begin to read tiles ``[first, last)``, as they are when all that was committed is written."""
        writes = [self._writes.pop(tile) for tile in range(first, last) if tile in self._writes]
        return self._store.load(self, first, memory, [*dict.fromkeys(writes)])

    def _bytes(self, first: int, last: int) -> int:
        return aligned(min(last * self.tile, self.numel) * self.dtype.itemsize - first * self.tile_bytes)

    def _elements(self, first: int, last: int, memory: Tensor) -> Tensor:
        numel = min(last * self.tile, self.numel) - first * self.tile
        return memory[: numel * self.dtype.itemsize].view(self.dtype)
