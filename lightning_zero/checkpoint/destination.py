"""The destination of a folder that all ranks write: a local file system, or one at a URL.

On a local file system the folder has a temporary name until it is complete. At a URL nothing is renamed: each save
writes its files into an inner folder named after the save, and finally replaces the file ``.metadata``, which names the
others, in one step. Before this step the older checkpoint is complete, after it the new one. The ``meta.pt`` that
belongs to ``.metadata`` is the one in the inner folder of the same save.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from pathlib import Path

from typing_extensions import override

from lightning_zero.advice import Case, advice
from lightning_zero.checkpoint.commit import META, METADATA, README, Draft, sync
from lightning_zero.checkpoint.errors import shortened, together
from lightning_zero.checkpoint.lazy import fetch_loaded
from lightning_zero.checkpoint.remote import Location, RemotePath
from lightning_zero.checkpoint.tiles import Appending, Writable
from lightning_zero.sharding import Group

_SAVE = re.compile(r"[0-9a-f]{16}")  # name of the inner folder of a save
_REPLACED = re.compile(rf"{_SAVE.pattern}|.*\.distcp")  # what a save removes; other files may be the user's

# For users whose program, without this package, fails to open the folder as a file.
ABOUT = """\
This folder is one checkpoint of lightning_zero, in the format of torch.distributed.checkpoint. All its files
belong together.

Written as one file:  lightning-zero consolidate FOLDER one.ckpt
What is in it:        lightning-zero inspect FOLDER
"""


class Destination(ABC):
    """The folder that a running save writes, as seen by one rank.

    Attributes:
        save_id: identifies the save; the same on all ranks after rank 0's was sent to them.
        spread: whether there are several folders, because ranks do not see the same file system.
    """

    spread = False

    def __init__(self) -> None:
        self.save_id = secrets.token_hex(8)

    @property
    @abstractmethod
    def is_mine(self) -> bool:
        """Whether this rank completes a folder."""

    @abstractmethod
    def name_of(self, file: str) -> str:
        """The path of a rank's ``file`` relative to the folder, in which :attr:`save_id` occurs."""

    @abstractmethod
    def create(self, name: str) -> contextlib.AbstractContextManager[Writable]:
        """A context that yields a new file in the folder; when the context ends, the file is on the disk."""

    @abstractmethod
    def complete(self, metadata: bytes, meta: bytes, files: Collection[str]) -> None:
        """Add ``.metadata`` and ``meta.pt`` and give the folder its name. All other files must be on the disk.

        Args:
            metadata: contents of ``.metadata``.
            meta: contents of ``meta.pt``.
            files: paths, relative to the folder, of the files of all ranks, which ``.metadata`` names.
        """

    @abstractmethod
    def close(self) -> None:
        """Remove the folder unless it is complete."""


def make_destination(path: Location, world: Group) -> Destination:
    """Begin to write the folder ``path``; each rank gets its destination. Collective."""
    return RemoteDestination(path, world) if isinstance(path, RemotePath) else LocalDestination(path, world)


class LocalDestination(Destination):
    """A local folder: rank 0's or, if this rank does not see that, one on a file system that this rank sees."""

    def __init__(self, path: Path, world: Group) -> None:
        super().__init__()
        self._draft: Draft | None = None
        self._found: Path | None = None
        seen = [False] * world.size
        try:
            while not all(seen):
                first = seen.index(False)
                self.spread = first > 0
                make = functools.partial(self._make, path, mine=world.rank == first)
                made = together(world, make, f"make a folder for {path}")[first]
                assert made is not None
                seen = together(world, functools.partial(self._sees, made), f"look for {made}")
        except BaseException:
            self.close()
            raise

    def _make(self, path: Path, mine: bool) -> Path | None:
        if not mine:
            return None
        self._draft = Draft(path, folder=True)
        return self._draft.temporary

    def _sees(self, made: Path) -> bool:
        if self._found is None and made.is_dir():
            self._found = made
        return self._found is not None

    @property
    @override
    def is_mine(self) -> bool:
        return self._draft is not None

    @override
    def name_of(self, file: str) -> str:
        # A file of another save must not pass for it: people copy files between the folders of several nodes.
        stem, dot, suffix = file.rpartition(".")
        return f"{stem}_{self.save_id}{dot}{suffix}"

    @contextlib.contextmanager
    @override
    def create(self, name: str) -> Iterator[Writable]:
        assert self._found is not None
        file = os.open(self._found / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            yield Appending(file)
            os.fsync(file)
        finally:
            os.close(file)

    @override
    def complete(self, metadata: bytes, meta: bytes, files: Collection[str]) -> None:
        assert self._draft is not None
        folder = self._draft.temporary
        unnamed = folder / f"{META}.tmp"
        about = ABOUT + advice(Case.FOLDER, "\n")
        for file, data in ((folder / README, about.encode()), (folder / METADATA, metadata), (unnamed, meta)):
            file.write_bytes(data)
            sync(file)
        sync(folder)
        unnamed.rename(folder / META)  # now the folder is complete
        sync(folder)
        self._draft.complete()

    @override
    def close(self) -> None:
        if self._draft is not None:
            self._draft.close()


class RemoteDestination(Destination):
    """A folder at a URL that all ranks reach; see the module's docstring. Construction is collective.

    Raises:
        CheckpointError: a rank does not reach the URL, or there is something else at it than a checkpoint or the
            remains of saves; raised on all ranks.
    """

    def __init__(self, path: RemotePath, world: Group) -> None:
        super().__init__()
        self._path = path
        self._first = world.rank == 0
        self._completed = False

        def look() -> None:
            if path.is_file():
                raise FileExistsError(f"{path} is a file; remove it, or save under another name")
            if self._first and not (path / METADATA).is_file():
                found = [child.name for child in path.children()]
                if not all(map(_SAVE.fullmatch, found)):
                    raise IsADirectoryError(f"{path} is a folder; remove it, or save under another name")
            fetch_loaded(str(path))

        together(world, look, f"make a folder for {path}")

    @property
    @override
    def is_mine(self) -> bool:
        return self._first

    @override
    def name_of(self, file: str) -> str:
        return f"{self.save_id}/{file}"

    @contextlib.contextmanager
    @override
    def create(self, name: str) -> Iterator[Writable]:
        with (self._path / name).writing() as file:
            yield file

    @override
    def complete(self, metadata: bytes, meta: bytes, files: Collection[str]) -> None:
        (self._path / self.name_of(META)).write_bytes(meta)
        self._check_presence({*files, self.name_of(META)})
        # If there is no answer, `.metadata` may have arrived and name these files: they must stay.
        self._completed = True
        (self._path / METADATA).write_bytes(metadata)  # now the checkpoint is complete
        (self._path / META).write_bytes(meta)  # for other programs, which expect it here
        for other in self._path.children():
            if _REPLACED.fullmatch(other.name) and other.name != self.save_id:
                other.remove()

    def _check_presence(self, files: Collection[str]) -> None:
        """Raise FileNotFoundError unless the folder still has ``files``, all of this save."""
        present = {self.name_of(child.name) for child in (self._path / self.save_id).children()}
        if lost := sorted(set(files) - present):
            raise FileNotFoundError(
                f"{self._path} no longer has {shortened(lost)}, which this save has written: probably another run has "
                "saved to the same URL. Give each run a URL of its own"
            )

    @override
    def close(self) -> None:
        if self._first and not self._completed:
            # The next save to this path removes files that stay. Clients of object stores raise errors of their own.
            with contextlib.suppress(Exception):
                (self._path / self.save_id).remove()
