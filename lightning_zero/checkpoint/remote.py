"""Checkpoints on file systems that are reached by a URL, such as object stores, through fsspec.

Nothing there is renamed or changed in place. A file has its name once all of it has arrived, by fsspec's transaction:
an object store completes an upload of many parts then. How a folder becomes complete:
:mod:`lightning_zero.checkpoint.destination`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

import fsspec
from fsspec.core import url_to_fs

from lightning_zero.checkpoint.tiles import TILE, OpenFile, Readable

_CACHED_BLOCKS = 8  # of a file that is read; most ranges are short, and near those that were read before


class RemotePath:
    """A file or a folder at a URL, with those methods of :class:`pathlib.Path` that checkpoints need.

    Args:
        url: as fsspec takes it, with a protocol: ``s3://bucket/last.ckpt``.

    Raises:
        ImportError: the package for this protocol is not installed; fsspec's message names it.
        ValueError: fsspec does not know the protocol.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    @cached_property
    def _place(self) -> tuple[fsspec.AbstractFileSystem, str]:
        """The file system, and the path in it."""
        # An instance of its own: the transactions of others are not touched, nor seen.
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
        """Whether there is a file or a folder."""
        return bool(self._filesystem.exists(self._path))

    def is_file(self) -> bool:
        return bool(self._filesystem.isfile(self._path))

    def is_dir(self) -> bool:
        return bool(self._filesystem.isdir(self._path))

    def nbytes(self) -> int | None:
        """The size of the file; ``None`` where there is none."""
        try:
            return int(self._filesystem.size(self._path))
        except FileNotFoundError:
            return None

    def children(self) -> list[RemotePath]:
        """Lists what is in the folder; nothing where there is none."""
        if not self.is_dir():
            return []
        found = self._filesystem.ls(self._path, detail=False)
        return [self / path.rstrip("/").rpartition("/")[2] for path in found]

    def open(self, mode: str = "rb") -> IO[bytes]:
        """The file, to be read; ranges that were read stay in a small cache."""
        assert mode == "rb"
        options: dict[str, Any] = {"cache_type": "blockcache", "cache_options": {"maxblocks": _CACHED_BLOCKS}}
        return cast("IO[bytes]", self._filesystem.open(self._path, mode, block_size=TILE, **options))

    @contextlib.contextmanager
    def writing(self) -> Iterator[IO[bytes]]:
        """A file to write from its beginning to its end; it has its name after the context, and never if that fails."""
        if (parent := self._path.rpartition("/")[0]) and not self._filesystem.exists(parent):
            self._filesystem.makedirs(parent, exist_ok=True)  # object stores have no folders, and ignore it
        with self._filesystem.transaction, self._filesystem.open(self._path, "wb", block_size=TILE) as file:
            yield file

    def write_bytes(self, data: bytes) -> None:
        """Put a file there, or replace the one that is there, in one step."""
        with self.writing() as file:
            file.write(data)

    def remove(self) -> None:
        """Remove the file, or the folder with all that is in it."""
        self._filesystem.rm(self._path, recursive=True)


class RemoteFile:
    """A file at a URL, of which ranges are read: a :class:`~lightning_zero.checkpoint.tiles.Readable`."""

    def __init__(self, path: RemotePath) -> None:
        self._file = path.open()
        self._lock = threading.Lock()  # a save in the background may read what the training reads

    def read_into(self, buffer: memoryview, offset: int) -> int:
        with self._lock:
            self._file.seek(offset)
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


Location = Path | RemotePath


def locate(path: str | Path | os.PathLike[str]) -> Location:
    """Where a checkpoint is: a path of this machine, also from a ``file://`` URL, or a remote one."""
    text = os.fspath(path)
    if "://" not in text:
        return Path(text).expanduser()
    if text.startswith("file://"):
        return Path(url_to_fs(text)[1])
    return RemotePath(text)


def nbytes_of(location: Location) -> int | None:
    """The size of the file at ``location``; ``None`` where there is none."""
    if isinstance(location, RemotePath):
        return location.nbytes()
    return location.stat().st_size if location.is_file() else None


def readable(location: Location) -> Readable:
    """The file at ``location``, to be read by ranges."""
    return RemoteFile(location) if isinstance(location, RemotePath) else OpenFile(location)
