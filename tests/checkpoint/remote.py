"""A file system at a URL which ranks share, and that can fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from fsspec.spec import AbstractBufferedFile


class RefusedError(Exception):
    """An error of its own, as clients of object stores have them."""


class _Written(LocalFileOpener):
    """A file of :class:`Shared` that is written."""

    def write(self, data: Any) -> int:
        if Shared.room is not None:
            Shared.room -= len(data)
            if Shared.room < 0:
                raise OSError(5, "the connection was cut")
        return int(super().write(data))

    def commit(self) -> None:
        super().commit()
        if self.path.rpartition("/")[2] == Shared.unanswered:
            raise TimeoutError(110, "no answer came")


class _Read(AbstractBufferedFile):
    """A file of :class:`Shared` that is read, as much at a time as fsspec's caches ask for."""

    def __init__(self, fs: Any, path: str, **options: Any) -> None:
        self._file = Path(path).open("rb")  # noqa: SIM115
        super().__init__(fs, path, **options)

    def _fetch_range(self, start: int, end: int) -> bytes:
        if os.fstat(self._file.fileno()).st_ino != Path(self.path).stat().st_ino:
            raise FileNotFoundError(2, "the object was replaced", self.path)
        self._file.seek(start)
        data = self._file.read(end - start)
        Shared.read += len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


class Shared(LocalFileSystem):
    """Files of this machine, reached only by fsspec, as those of an object store.

    Attributes:
        room: bytes that may still be written; `None`: any number.
        read: bytes that were read.
        unanswered: name of files that arrive, although whoever writes them gets an error.
        keeps: whether nothing may be removed.
    """

    protocol = "shared"
    room: int | None = None
    read = 0
    unanswered: str | None = None
    keeps = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(str(path).removeprefix("shared://"))

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        if mode == "rb":
            return _Read(self, path, block_size=block_size, **options)
        return _Written(path, mode, fs=self, **{k: v for k, v in options.items() if k == "autocommit"})

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        found = super().ls(path, detail, **options)
        return found if detail else [*found, f"{self._strip_protocol(path)}/"]  # as with an object for the folder

    def rm(self, *args: Any, **kwargs: Any) -> None:
        if Shared.keeps:
            raise RefusedError("nobody may remove it")
        super().rm(*args, **kwargs)

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("an object store renames nothing")


def register() -> None:
    """Let fsspec know it, in this process."""
    fsspec.register_implementation("shared", Shared, clobber=True)
