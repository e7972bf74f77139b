"""Tensors that rest on a disk.

Work on such a tensor goes tile by tile: a tile is fetched into a buffer in host memory, and is committed to the disk
after it was changed. Reads and writes are jobs in two lanes, so that tiles can be read while others are written. A read
waits for earlier writes of the same tile, and a write waits for earlier reads and writes of it.

The CRC-32 of a tile is recorded when the tile is written, and compared when it was read. A third lane compares, while
the disk already reads the next tile. A tile in which all bytes are zero is neither written nor read. Such tiles are
those of new tensors, of gradients of parameters that no rank has used, and of state that no step has changed.
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

from lightning_zero import ops
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
_IN_FLIGHT = 3  # tiles of one tensor in memory: one is fetched, one is updated, one is written
_AT_WORK = 10  # tiles in memory: of an update two each of master, two moments and parameters; of a gather two
_PROBED = 64  # bytes at the beginning of a tile that are looked at first
_TYPICAL_ITEMSIZE = 16  # bytes per element: fp32 masters and three states of their size


def tile_numel(buffer_bytes: int) -> int:
    """The elements of a tile: the largest power of two with which the tiles in flight fit in ``buffer_bytes``."""
    fitting = max(1, buffer_bytes // (_IN_FLIGHT * _TYPICAL_ITEMSIZE))
    return min(max(1 << (fitting.bit_length() - 1), _LEAST_TILE), _LARGEST_TILE)


def transfer_bytes(buffer_bytes: int) -> int:
    """The bytes of a tile of fp32 values, which is the size of most transfers."""
    return tile_numel(buffer_bytes) * torch.float32.itemsize


def passing_limit(buffer_bytes: int, resting: int) -> int:
    """The bytes of host memory that tiles may take, unless the tiles in work at one time need more.

    Args:
        buffer_bytes: the limit that the user has set.
        resting: the bytes that rest on the disk; more than these are never needed.
    """
    return min(buffer_bytes, resting)


def tiles_at_work(window: int, numel: int) -> int:
    """The number of a tensor's windows in memory at one time: one is computed on while the next is fetched.

    Args:
        window: elements that are fetched together: one tile or more.
        numel: elements of the tensor.
    """
    return min(-(-numel // window), _IN_FLIGHT - 1)


def tiles_ahead(buffer_bytes: int, itemsize: int) -> int:
    """The number of tiles of parameters that may be fetched long before their gather: half of the buffer at most.

    The rest of the buffer has room for an update and a gather at the same time. A tile of 16-bit parameters counts with
    the size of a 32-bit tile there, because it may get memory that was allocated for one.

    Args:
        buffer_bytes: the limit that the user has set.
        itemsize: bytes of a parameter's element.
    """
    tile = tile_numel(buffer_bytes)
    others = buffer_bytes // (tile * torch.float32.itemsize) - _AT_WORK
    return max(0, min(buffer_bytes // 2 // (tile * itemsize), others))


class DiskStore:
    """Rests tensors in a file. Tensors that must be in memory are in host memory.

    Attributes:
        file: the file; ``None`` in a plan, which stores nothing.

    Args:
        file: as above.
        executor: does the reads and writes.
        buffer_bytes: host memory for tiles. Less is taken where less rests in the store.
        pin_for: see :class:`~lightning_zero.storage.host.HostStore`.
        checksums: whether tiles are verified when they are read.
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
        self._folder: RunFolder | None = None  # it removes itself from the disk when nothing refers to it
        self._failed: DiskError | None = None  # of a write, whose tile is lost
        self._tensors: weakref.WeakSet[DiskTensor] = weakref.WeakSet()

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
        """A store with a new file in a folder, which is removed together with the store.

        Args:
            folder: of this rank.
            executor: see the class.
            buffer_bytes: see the class.
            direct: whether to try ``O_DIRECT``.
            way: of transfers; ``None``: the usual one.
            options: see the class.

        Raises:
            DiskError: the file cannot be created.
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

    def rest(
        self, numel: int, dtype: torch.dtype, what: str, *, crosses: bool = False, apart: bool = False
    ) -> DiskTensor:
        # The store's buffers are pinned for all tensors alike, because parameters are copied to the device from there.
        tensor = DiskTensor(self, numel, dtype, what, apart)
        self._tensors.add(tensor)
        return tensor

    def settle(self) -> None:
        """Wait until everything that was committed is written. Meanwhile nothing may be committed.

        Raises:
            DiskError: a write has failed.
        """
        for tensor in list(self._tensors):
            tensor.settle()
        self.check()

    def close(self) -> None:
        if self._folder is not None:
            self._folder.remove()

    def reserve(self, nbytes: int) -> None:
        """Reserve disk space for ``nbytes`` in all.

        Raises:
            DiskError: there is not enough; it states the bytes needed and free.
        """
        self.opened.reserve(nbytes, "masters, optimizer state and gradients")

    def choose_way(self, seconds: float) -> Way:
        """Measure which way of transfers is the fastest in the reserved part of the file, and use it from now on.

        It overwrites that part, and so comes before any tensor is placed there.

        Args:
            seconds: about how long it takes.

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
        """The bytes of host memory that tiles take now."""
        return self._staging.nbytes

    def check(self) -> None:
        """Raise the error of an earlier write, if one has failed: the disk does not hold what it should.

        Raises:
            DiskError: as above.
        """
        if self._failed is not None:
            error = DiskError(self._failed.errno, self._failed.strerror, self._failed.filename)
            error.__notes__ = [*getattr(self._failed, "__notes__", ())]
            raise error from self._failed

    def take(self, nbytes: int) -> Staged:
        """Memory for tiles: 1-D, bytes. It may wait until some was given back."""
        self._staging.limit = passing_limit(self.passing_bytes, self.opened.given)
        return self._staging.take(torch.empty(nbytes, dtype=torch.uint8, device="meta"))

    def give(self, staged: Staged, work: Ticket) -> None:
        """Give memory of :meth:`take` back; it is used again when ``work`` has ended."""
        self._staging.give(staged, work)

    def copy_for(self, nbytes: int) -> Tensor:
        """Memory that does not count as the store's: 1-D, bytes."""
        return HostStore().zeros(nbytes, torch.uint8)

    def load(self, tensor: DiskTensor, first: int, memory: Tensor, after: Sequence[Ticket]) -> Ticket:
        """Begin to read tiles into ``memory``, the first of which is ``first``; ``after``: writes of these tiles."""
        self.check()
        read = self._executor.submit(partial(self._load, tensor, first, memory), Lane.READ, tensor.what, after)
        return self._executor.submit(partial(self._verify, tensor, first, memory), Lane.CHECK, tensor.what, [read])

    def keep(self, tensor: DiskTensor, first: int, memory: Tensor, after: Sequence[Ticket]) -> Ticket:
        """Begin to write tiles from ``memory``, the first of which is ``first``; ``after``: work that changes it."""
        self.check()
        return self._executor.submit(partial(self._keep, tensor, first, memory), Lane.WRITE, tensor.what, after)

    def _load(self, tensor: DiskTensor, first: int, memory: Tensor) -> None:
        self.check()  # again: writes may have failed while this waited
        count = len([*tensor.tiles_in(first, memory)])
        for start, stop in _runs_of(tensor.sums, first, count):
            part = memory[start * tensor.tile_bytes : stop * tensor.tile_bytes]
            self.opened.read(part, tensor.offset_of(first + start), tensor.what)

    def _verify(self, tensor: DiskTensor, first: int, memory: Tensor) -> None:
        for number, tile in enumerate(tensor.tiles_in(first, memory), first):
            expected = tensor.sums.get(number)
            if expected is None:
                ops.zero_(tile)  # memory that was taken in inference mode refuses `zero_` in this thread
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
    """Whether all bytes of a tile are zero. Most other tiles are recognized by their first bytes."""
    return not tile[:_PROBED].any() and not tile.any()


def _runs_of(chosen: Container[int], first: int, count: int) -> Iterator[tuple[int, int]]:
    """The runs of chosen tiles among the ``count`` tiles from ``first`` on, as ranges that are counted from there."""
    start = None
    for number in range(count + 1):
        written = number < count and first + number in chosen
        if written and start is None:
            start = number
        elif not written and start is not None:
            yield start, number
            start = None


class DiskTensor(Windowed):
    """A tensor that rests on a disk; see :class:`~lightning_zero.storage.rested.Rested`. At first it is zeros.

    Attributes:
        what: a name for messages.
        sums: checksums of the tiles in the file, by their number. Tiles of zeros have none, and are not in the file.
        tile_bytes: bytes of a tile; the last one may be shorter.

    Args:
        store: in which it rests.
        numel: number of elements.
        dtype: of the elements.
        what: as above.
        apart: see :class:`~lightning_zero.storage.store.TensorStore`.

    Raises:
        DiskError: the disk is full.
    """

    memory: Memory = "disk"
    device = torch.device("cpu")
    tile: int

    def __init__(self, store: DiskStore, numel: int, dtype: torch.dtype, what: str, apart: bool = False) -> None:
        super().__init__()
        assert store.tile is not None
        self.numel, self.dtype, self.what, self.tile = numel, dtype, what, store.tile
        self.tile_bytes = self.tile * dtype.itemsize
        self.sums: dict[int, int] = {}
        self._store = store
        self._apart = apart
        self._offset = store.opened.allocate(numel * dtype.itemsize, what)
        self._writes: dict[int, Ticket] = {}  # the last write of each tile, unless it is known to have ended
        # The last fetch of each tile that nobody has waited for before a write. It ends after earlier ones, because
        # the lane of checks does its jobs in order.
        self._dropped: dict[int, Ticket] = {}
        weakref.finalize(self, store.opened.free, self._offset, numel * dtype.itemsize)

    def commit(self, start: int, stop: int, after: Sequence[Ticket] = ()) -> None:
        for window in self._ending(start, stop):
            self._windows.remove(window)
            follower = self._pass_on(window, after)  # it writes the tiles that both windows have
            first, last = self._tiles_of(window.start, window.stop if follower is None else follower.start)
            memory = window.staged.tensor[: self._bytes(first, last)]
            before = [work.pop(n) for work in (self._dropped, self._writes) for n in range(first, last) if n in work]
            written = self._store.keep(self, first, memory, (window.arrived, *dict.fromkeys(before), *after))
            self._writes |= dict.fromkeys(range(first, last), written)
            self._give(window.staged, written)

    def _let_go(self, window: Window, after: Ticket | None = None) -> None:
        if not window.seen:  # its fetch may go on
            self._dropped |= dict.fromkeys(range(*self._tiles_of(window.start, window.stop)), window.arrived)
        super()._let_go(window, after)

    def settle(self) -> None:
        for write in dict.fromkeys(self._writes.values()):
            write.synchronize()
        self._writes = {}

    def read(self, start: int, stop: int) -> Tensor:
        if start == stop:
            return torch.empty(0, dtype=self.dtype, device="cpu")
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
        """The offset of a tile in the file."""
        return self._offset + tile * self.tile_bytes

    def tiles_in(self, first: int, memory: Tensor) -> Iterator[Tensor]:
        """The bytes of each tile in ``memory``, whose first tile is ``first``, without what fills up the last page."""
        for start in range(0, memory.nbytes, self.tile_bytes):
            end = min(start + self.tile_bytes, self.numel * self.dtype.itemsize - first * self.tile_bytes)
            yield memory[start:end]

    def _fetch(self, start: int, stop: int) -> Window:
        window, tiles = self._blank(start, stop), self._tiles_of(start, stop)
        window.arrived = self._load(*tiles, window.staged.tensor)
        return window

    def _follow(self, front: Window, start: int, stop: int, blank: bool) -> Window:
        window = self._blank(start, stop)
        window.front = front
        if blank:
            window.values.zero_()
        else:
            known = (front.stop - window.start) * self.dtype.itemsize  # bytes
            window.arrived = self._load(*self._tiles_of(front.stop, stop), window.staged.tensor[known:])
        return window

    def _blank(self, start: int, stop: int) -> Window:
        first, last = self._tiles_of(start, stop)
        staged = self._take(self._bytes(first, last))
        values, begin = self._elements(first, last, staged.tensor), first * self.tile
        return Window(begin, begin + values.numel(), staged, values, DONE)

    def _take(self, nbytes: int) -> Staged:
        if not self._apart:
            return self._store.take(nbytes)
        memory = self._store.copy_for(nbytes)
        return Staged(memory, memory)

    def _give(self, staged: Staged, work: Ticket) -> None:
        if not self._apart:  # memory of its own lives as long as a job refers to it
            self._store.give(staged, work)

    def _tiles_of(self, start: int, stop: int) -> tuple[int, int]:
        """The tiles ``[first, last)`` that hold elements ``[start, stop)``."""
        return start // self.tile, -(-stop // self.tile)

    def _load(self, first: int, last: int, memory: Tensor) -> Ticket:
        """Begin to read tiles ``[first, last)``, after all writes of them that have begun."""
        for tile in range(first, last):
            if tile in self._writes and self._writes[tile].done():
                del self._writes[tile]
        # The others stay: a later read may be the first that comes to them, if this one is given up.
        writes = [self._writes[tile] for tile in range(first, last) if tile in self._writes]
        return self._store.load(self, first, memory, [*dict.fromkeys(writes)])

    def _bytes(self, first: int, last: int) -> int:
        return aligned(min(last * self.tile, self.numel) * self.dtype.itemsize - first * self.tile_bytes)

    def _elements(self, first: int, last: int, memory: Tensor) -> Tensor:
        numel = min(last * self.tile, self.numel) - first * self.tile
        return memory[: numel * self.dtype.itemsize].view(self.dtype)
