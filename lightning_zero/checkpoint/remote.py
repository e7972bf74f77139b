"""Access through fsspec to checkpoints at URLs, such as those in object stores.

There nothing is renamed or changed in place. A file becomes visible when all of it has arrived, by fsspec's
transactions: an object store then completes a multipart upload. :mod:`lightning_zero.checkpoint.destination` describes
how a folder becomes complete.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

import fsspec
from fsspec.core import url_to_fs

from lightning_zero.checkpoint.tiles import TILE, FileObject, OpenFile, Readable
from lightning_zero.sharding import Group

BLOCK = 1 << 18  # bytes that are fetched for a shorter range: most of these are near ranges that are read next
_CACHED = 32 * BLOCK  # bytes per file that is read, in two blocks at least


class RemotePath:
    """A file or folder at a URL, with the methods of :class:`pathlib.Path` that checkpoints need.

    Args:
        url: URL for fsspec, with a protocol: ``s3://bucket/last.ckpt``.

    Raises:
        ImportError: the package for this protocol is not installed; fsspec's message names it.
        ValueError: fsspec does not know the protocol.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    @cached_property
    def _place(self) -> tuple[fsspec.AbstractFileSystem, str]:
        """The file system, and the path in it."""
        # A separate instance, since transactions belong to an instance.
        filesystem, path = url_to_fs(self._url, skip_instance_cache=True, use_listings_cache=False)
        return filesystem, str(path)

    @property
    def _filesystem(self) -> fsspec.AbstractFileSystem:
        return self._place[0]

    @property
    def _path(self) -> str:
        return self._place[1]

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    def __str__(self) -> str:
        return self._url

    def __truediv__(self, name: str) -> RemotePath:
        inside = RemotePath(f"{self._url}/{name}")
        inside._place = self._filesystem, f"{self._path}/{name}"
        return inside

    def exists(self) -> bool:
        """Whether there is a file or folder."""
        return bool(self._filesystem.exists(self._path))

    def is_file(self) -> bool:
        return bool(self._filesystem.isfile(self._path))

    def is_dir(self) -> bool:
        return bool(self._filesystem.isdir(self._path))

    def nbytes(self) -> int | None:
        """The size of the file; ``None`` if there is no file."""
        try:
            return int(self._filesystem.size(self._path))
        except FileNotFoundError:
            return None

    def modified(self) -> datetime:
        """The time at which the file was written."""
        return cast("datetime", self._filesystem.modified(self._path))

    def children(self) -> list[RemotePath]:
        """Lists the contents of the folder; empty if there is no folder."""
        if not self.is_dir():
            return []
        found = {path.rstrip("/") for path in self._filesystem.ls(self._path, detail=False)}
        # Object stores may list the folder itself: an empty object with its name, which other programs make.
        return [self / path.rpartition("/")[2] for path in sorted(found - {self._path})]

    def open(self, mode: str = "rb", block: int | None = None) -> IO[bytes]:
        """Open the file for reading.

        Args:
            mode: "rb".
            block: number of bytes to fetch at a time, which stay in a small cache; ``None``: :data:`BLOCK`; 0: as many
                as are read, and none stays.
        """
        assert mode == "rb"
        block = BLOCK if block is None else block
        options: dict[str, Any] = {"cache_type": "none"}
        if block:
            options = {"cache_type": "blockcache", "cache_options": {"maxblocks": max(2, _CACHED // block)}}
        return cast("IO[bytes]", self._filesystem.open(self._path, mode, block_size=block or TILE, **options))

    @contextlib.contextmanager
    def writing(self) -> Iterator[IO[bytes]]:
        """A context that yields a file to write sequentially; it becomes visible at the end, and not after an error."""
        if (parent := self._path.rpartition("/")[0]) and not self._filesystem.exists(parent):
            self._filesystem.makedirs(parent, exist_ok=True)  # object stores have no folders, and ignore it
        with self._filesystem.transaction, self._filesystem.open(self._path, "wb", block_size=TILE) as file:
            yield file

    def write_bytes(self, data: bytes) -> None:
        """Create or replace the file in one step."""
        with self.writing() as file:
            file.write(data)

    def remove(self) -> None:
        """Remove the file, or the folder and its contents."""
        self._filesystem.rm(self._path, recursive=True)


class RemoteFile:
    """Reads ranges of a file at a URL: a :class:`~lightning_zero.checkpoint.tiles.Readable`."""

    portion = TILE

    def __init__(self, path: RemotePath) -> None:
        self._in_blocks, self._exactly = FileObject(path.open()), FileObject(path.open(block=0))
        self._lock = threading.Lock()  # a background save and the training thread may read at the same time

    def read_into(self, buffer: memoryview, offset: int) -> int:
        file = self._in_blocks if len(buffer) < BLOCK else self._exactly
        with self._lock:
            return file.read_into(buffer[:TILE], offset)


Location = Path | RemotePath


def locate(path: str | Path | os.PathLike[str]) -> Location:
    """Convert a path or URL to a location: a local path, also for ``file://`` URLs, or a remote path.

    A local path becomes absolute: a save in the background may end in another current folder.
    """
    text = os.fspath(path)
    if "://" not in text:
        return Path(text).expanduser().absolute()
    if text.startswith("file://"):
        return Path(url_to_fs(text)[1])
    return RemotePath(text)


def locate_first(path: str | Path | os.PathLike[str], world: Group) -> Location:
    """The location of rank 0's path or URL, on all ranks: a name may have a metric that differs in it. Collective."""
    return locate(world.broadcast_object(os.fspath(path), "tell where the checkpoint goes"))


def nbytes_of(location: Location) -> int | None:
    """The size of the file at ``location``; ``None`` if there is no file."""
    if isinstance(location, RemotePath):
        return location.nbytes()
    return location.stat().st_size if location.is_file() else None


def readable(location: Location) -> Readable:
    """Open the file at ``location`` for reading ranges."""
    return RemoteFile(location) if isinstance(location, RemotePath) else OpenFile(location)
