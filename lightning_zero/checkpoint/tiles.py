"""Bytes between tensors and files, a tile at a time, so that no copy of a large tensor is ever in memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from zlib_ng.zlib_ng import crc32

from lightning_zero.storage import Executor, HostStore, Ticket

TILE = 1 << 23  # bytes that are read or written at a time
_CACHED = 1 << 19  # bytes that are read to be summed up: they are still in the core's cache then
_MAPPED = 1 << 20  # bytes of a copy that has a mapping of its own: there may be only so many


def tiles(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """``[start, stop)`` in tiles of at most ``size``."""
    for first in range(start, stop, size):
        yield first, min(first + size, stop)


def snapshot(tiles: Iterable[Tensor], executor: Executor) -> list[Tensor]:
    """Copies of the tiles in host memory, made by the executor, which stay as the tiles are now."""
    copies = [_host_copy(tile.detach(), executor) for tile in tiles]
    for _, copied in copies:
        copied.synchronize()
    return [copy for copy, _ in copies]


def _host_copy(tile: Tensor, executor: Executor) -> tuple[Tensor, Ticket]:
    if tile.nbytes < _MAPPED:
        copy = torch.empty_like(tile, device="cpu")
    else:  # the C allocator might keep the memory of a freed copy of the full state
        copy = HostStore().zeros(tile.numel(), tile.dtype)
    return copy, executor.commit(copy, tile, "the copy of a checkpoint")


class Writable(Protocol):
    """A file that is written from its beginning to its end."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Append all of ``data``."""


class Readable(Protocol):
    """A file of which ranges are read."""

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill the beginning of ``buffer`` with what is at ``offset``; returns how many bytes, 0 at the end."""
        ...


class Appending:
    """Appends to an open file of this machine: a :class:`Writable`.

    Args:
        file: descriptor.
        end: where to begin.
    """

    def __init__(self, file: int, end: int = 0) -> None:
        self._file, self._end = file, end

    def write(self, data: bytes | memoryview) -> None:
        write_at(self._file, data, self._end)
        self._end += len(data)


class OpenFile:
    """A file of this machine: a :class:`Readable` that stays the file it is when another takes its name.

    Args:
        path: of the file.
        folder: descriptor of the folder to which ``path`` is relative; ``None``: to the working directory.
    """

    def __init__(self, path: Path | str, folder: int | None = None) -> None:
        self._file = os.open(path, os.O_RDONLY, dir_fd=folder)
        weakref.finalize(self, os.close, self._file)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        return os.preadv(self._file, [buffer], offset)


def write_tiles(file: Writable, tiles: Iterable[Tensor], checksums: bool) -> tuple[int, int]:
    """Append 1-D tensors of any device one after the other.

    Args:
        file: where to.
        tiles: each is on the host only while it is written.
        checksums: compute one.

    Returns:
        The number of bytes, and their CRC-32 or 0.
    """
    nbytes, crc = 0, 0
    for tile in tiles:
        data = bytes_of(tile.detach().to("cpu").contiguous())
        file.write(data)
        crc = crc32(data, crc) if checksums else 0
        nbytes += data.nbytes
    return nbytes, crc


def write_at(file: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    data = memoryview(data)
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def read_at(file: Readable, buffer: memoryview, offset: int) -> None:
    """Fill ``buffer`` from ``offset`` on.

    Raises:
        EOFError: the file ends before.
    """
    while buffer:
        read = file.read_into(buffer, offset)
        if not read:
            raise EOFError(f"the file ends at {offset}")
        buffer, offset = buffer[read:], offset + read


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous 1-D tensor on the CPU."""
    return values.detach().view(torch.uint8).numpy().data


def checksum_of(file: Readable, start: int, stop: int) -> int:
    """CRC-32 of the file's bytes ``[start, stop)``."""
    crc, buffer = 0, bytearray(min(_CACHED, stop - start))
    view = memoryview(buffer)
    while start < stop:
        read = file.read_into(view[: stop - start], start)
        if not read:
            raise EOFError(f"the file ends at {start}, before {stop}")
        crc, start = crc32(view[:read], crc), start + read
    return crc
