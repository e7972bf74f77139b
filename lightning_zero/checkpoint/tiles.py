"""Moves bytes between tensors and files in tiles, so that no copy of a large tensor is ever in memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Protocol

import torch
from torch import Tensor
from zlib_ng.zlib_ng import crc32

from lightning_zero.storage import Executor, HostStore, Ticket

TILE = 1 << 23  # bytes that are read or written at a time
_CACHED = 1 << 19  # bytes that are read at a time from a local file, so few that they stay in the core's cache
_MAPPED = 1 << 20  # bytes; smaller copies get no memory mapping of their own, since the system limits their number


def split_range(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Split ``[start, stop)`` into ranges of at most ``size``."""
    for first in range(start, stop, size):
        yield first, min(first + size, stop)


def copy_to_host(tiles: Iterable[Tensor], executor: Executor) -> list[Tensor]:
    """Copy the tiles to host memory by the executor, and wait for the copies."""
    copies = [_host_copy(tile.detach(), executor) for tile in tiles]
    for _, copied in copies:
        copied.synchronize()
    return [copy for copy, _ in copies]


def _host_copy(tile: Tensor, executor: Executor) -> tuple[Tensor, Ticket]:
    if tile.nbytes < _MAPPED:
        copy = torch.empty_like(tile, device="cpu")
    else:  # not by the C allocator, which might keep the memory after the copy is freed
        copy = HostStore().zeros(tile.numel(), tile.dtype)
    return copy, executor.commit(copy, tile, "the copy of a checkpoint")


class Writable(Protocol):
    """A file that is written sequentially."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Append all of ``data``."""


class Readable(Protocol):
    """A file that can be read in ranges.

    Attributes:
        portion: number of bytes to read at a time, where all are read from one end to the other.
    """

    portion: int

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Read bytes at ``offset`` into the beginning of ``buffer``; returns their number, 0 at the end of the file."""
        ...


class Appending:
    """Appends to an open local file: a :class:`Writable`.

    Args:
        file: file descriptor.
        end: position of the first write.
    """

    def __init__(self, file: int, end: int = 0) -> None:
        self._file, self._end = file, end

    def write(self, data: bytes | memoryview) -> None:
        write_at(self._file, data, self._end)
        self._end += len(data)


class OpenFile:
    """An open local file: a :class:`Readable` that does not change when another file takes its name.

    Args:
        path: path of the file.
        folder: descriptor of the folder that ``path`` is relative to; ``None``: the working directory.
    """

    portion = _CACHED

    def __init__(self, path: Path | str, folder: int | None = None) -> None:
        self._file = os.open(path, os.O_RDONLY, dir_fd=folder)
        weakref.finalize(self, os.close, self._file)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        return os.preadv(self._file, [buffer], offset)


class FileObject:
    """Reads ranges of a file object: a :class:`Readable`."""

    portion = _CACHED

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read_into(self, buffer: memoryview, offset: int) -> int:
        self._file.seek(offset)
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def write_tiles(file: Writable, tiles: Iterable[Tensor], checksums: bool) -> tuple[int, int]:
    """Append 1-D tensors, on any device, to a file.

    Args:
        file: the file to append to.
        tiles: the tensors; a copy of each on the host exists only while it is written.
        checksums: whether to compute the CRC-32.

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
    """Write all of ``data`` at ``offset`` to the file with the descriptor ``file``."""
    data = memoryview(data)
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def read_at(file: Readable, buffer: memoryview, offset: int) -> None:
    """Fill ``buffer`` with the bytes of the file from ``offset`` on.

    Raises:
        EOFError: the file ends before ``buffer`` is full.
    """
    while buffer:
        read = file.read_into(buffer, offset)
        if not read:
            raise EOFError(f"the file ends at {offset}")
        buffer, offset = buffer[read:], offset + read


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a contiguous 1-D tensor on the CPU, without a copy."""
    return values.detach().view(torch.uint8).numpy().data


def checksum_of(file: Readable, start: int, stop: int) -> int:
    """The CRC-32 of the file's bytes ``[start, stop)``.

    Raises:
        EOFError: the file ends before ``stop``.
    """
    crc, buffer = 0, bytearray(min(file.portion, stop - start))
    view = memoryview(buffer)
    while start < stop:
        read = file.read_into(view[: stop - start], start)
        if not read:
            raise EOFError(f"the file ends at {start}, before {stop}")
        crc, start = crc32(view[:read], crc), start + read
    return crc
