"""How a checkpoint of any container gets its name: drafts under temporary names, locks, renames, recovery.

At every moment the older checkpoint or the new one has the name, or :func:`recover` gives it back. A draft is locked as
long as its save goes on; others are leftovers of saves that were killed, which the next save removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint.errors import together
from lightning_zero.checkpoint.remote import Location
from lightning_zero.sharding import Group
from lightning_zero.storage import Executor

INCOMPLETE = ".incomplete"  # how the name of a checkpoint ends until it is complete
_DRAFT = re.compile(rf"\.[0-9a-f]{{16}}\.[0-9a-f]{{8}}{re.escape(INCOMPLETE)}")
README = "README.txt"  # says whoever looks into a folder what it is
METADATA, META = ".metadata", "meta.pt"  # files of a folder beside those of the ranks; `META` is written last
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Save(ABC):
    """A save that all ranks have begun.

    Attributes:
        path: of the checkpoint.
        spread: whether ranks do not see one folder: there is one under the same name on each file system.
        in_background: whether it can be written while training goes on, after :meth:`hold`.
    """

    path: Location
    spread: bool = False
    in_background: bool = True

    def write(self, world: Group) -> None:
        """Write the checkpoint, and give it its name when it is complete and on the disk. Collective.

        Args:
            world: all ranks; from another thread than the one that trains, a group of its own.

        Raises:
            CheckpointError: on all ranks, if one of them fails; what was at the path is still there then. (Where only
                the last flush fails, that of the folder around it, the new one is.)
        """
        try:
            written = together(world, lambda: self._write(world.rank), f"write the checkpoint {self.path}")
            together(world, lambda: self._complete(written), f"complete the checkpoint {self.path}")
        finally:
            self.abandon()

    @abstractmethod
    def hold(self, executor: Executor) -> None:
        """Replace what this rank will write by a snapshot on the host: what it comes from may change from then on.

        Args:
            executor: makes the copies.
        """

    @abstractmethod
    def _write(self, rank: int) -> Any:
        """Write what this rank has, until it is on the disk; returns what the rank that completes needs of it."""

    @abstractmethod
    def _complete(self, written: Sequence[Any]) -> None:
        """Complete the checkpoint and give it its name, with what :meth:`_write` returned on each rank."""

    @abstractmethod
    def abandon(self) -> None:
        """Remove what is there so far."""


def is_sharded(path: Path) -> bool:
    """Whether ``path`` is the folder of a complete checkpoint."""
    return (path / METADATA).is_file() and (path / META).is_file()


class Draft:
    """A file or a folder under a temporary name beside its own, locked; :meth:`close` removes it unless it is complete.

    Args:
        path: the name that it will have.
        folder: which of the two it is.

    Raises:
        IsADirectoryError: at ``path`` is a folder that is no checkpoint.
        ValueError: ``path`` is inside a checkpoint.
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, folder: bool = False) -> None:
        if path.is_dir() and not is_sharded(path):
            raise IsADirectoryError(f"{path} is a folder; remove it, or save under another name")
        if is_sharded(path.parent):
            raise ValueError(f"{path.parent} is a checkpoint; save beside it")
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        self.path = path
        while True:
            self.temporary = _temporary_name(path)
            if folder:
                self.temporary.mkdir()
            locked = _locked_file(self.temporary)
            self.file = os.open(locked, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            _lock(self.file)  # as long as it is open, it is no leftover
            if locked.exists() and locked.stat().st_ino == os.fstat(self.file).st_ino:
                break
            os.close(self.file)  # another run took it for a leftover before it was locked
        if folder:
            os.write(self.file, os.fsencode(path.name))  # for who finds it complete, without its name
            os.fsync(self.file)

    def complete(self) -> None:
        """Give it its name, which removes what had it before. All of it must be on the disk."""
        _put_in_place(self.temporary, self.path)
        if self.path.is_dir():
            _locked_file(self.path).unlink()
        sync(self.path.parent)

    def close(self) -> None:
        """Unlock it, and remove what has the temporary name now: the draft, or what it was exchanged with."""
        _remove(self.temporary)
        os.close(self.file)


def _begin_of_name(path: Path) -> str:
    """The beginning of all temporary names of ``path``, without its own name: others look for parts of names."""
    return f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}."


def _temporary_name(path: Path) -> Path:
    return path.with_name(f"{_begin_of_name(path)}{secrets.token_hex(4)}{INCOMPLETE}")


def _put_in_place(temporary: Path, path: Path) -> None:
    """Rename, so that at every moment a complete checkpoint has the name, or :func:`recover` finds one."""
    if not (temporary.is_dir() or path.is_dir()):
        temporary.replace(path)
    elif not os.path.lexists(path):
        temporary.rename(path)
    elif not _exchange(temporary, path):
        aside = _temporary_name(path)
        path.rename(aside)
        temporary.rename(path)
        _remove(aside)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot (Linux can, NFS cannot)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    if (number := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(second))


def remove(path: Path) -> None:
    """Remove a checkpoint; a folder is gone in one step, or a leftover."""
    if path.is_dir() and not path.is_symlink():
        aside = _temporary_name(path)
        path.rename(aside)
        path = aside
    _remove(path)


def recover(path: Path) -> None:
    """Give the name to the newest complete draft, where a save was killed between two renames and nothing has it."""
    if not os.path.lexists(path) and path.parent.is_dir():
        for draft in _drafts(path.parent):
            with contextlib.suppress(FileNotFoundError), _unlocked(draft) as free:  # or another rank was first
                if free and draft.name.startswith(_begin_of_name(path)) and is_sharded(draft):
                    draft.rename(path)
                    _locked_file(path).unlink(missing_ok=True)
                    return


def recover_all(folder: Path) -> None:
    """Recover every name in a folder. Ranks of a node take turns: all find the same afterwards.

    Another node may look while this one renames, and find nothing yet.
    """
    if not folder.is_dir():
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        for draft in _drafts(folder):
            with contextlib.suppress(OSError):  # another user's
                _recover_draft(draft)
    finally:
        os.close(file)


def _recover_draft(draft: Path) -> None:
    if is_sharded(draft) and (lock := _locked_file(draft)).exists() and (name := lock.read_bytes()):
        recover(draft.with_name(os.fsdecode(name)))


def remove_leftovers(folder: Path) -> None:
    """Remove the drafts of saves that were killed; those that are going on hold a lock."""
    for leftover in _drafts(folder):
        # Another run was first, or it is another user's: nothing that a save should fail for.
        with contextlib.suppress(OSError):
            _recover_draft(leftover)
            with _unlocked(leftover) as free:
                if free:
                    _remove(leftover)


def _drafts(folder: Path) -> list[Path]:
    """Everything with a temporary name; complete folders first, the newest."""
    found = []
    for path in folder.glob(f".*{INCOMPLETE}"):
        if _DRAFT.fullmatch(path.name):
            with contextlib.suppress(OSError):  # gone, or another user's
                found.append(((path / META).stat().st_mtime if is_sharded(path) else 0.0, path))
    return [path for _, path in sorted(found, reverse=True)]


@contextlib.contextmanager
def _unlocked(path: Path) -> Iterator[bool]:
    """Whether nobody writes the draft ``path``; nobody begins to inside."""
    locked = _locked_file(path)
    if not locked.exists():  # a folder that was replaced has none
        yield True
        return
    file = os.open(locked, os.O_WRONLY)
    try:
        yield _lock(file)
    finally:
        os.close(file)


def _locked_file(path: Path) -> Path:
    """The file that is locked for the draft ``path``."""
    return path / "lock" if path.is_dir() else path


def _remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)  # what stays is a leftover
    else:
        path.unlink(missing_ok=True)


def _lock(file: int) -> bool:
    """Lock a file until it is closed; False where another process has it, or the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
