"""Commits checkpoints of any container atomically, by drafts under temporary names, locks, renames and recovery.

At every moment either the older or the new checkpoint has the final name, or :func:`recover` can restore it. A draft is
locked while its save is running. Unlocked drafts are leftovers of killed saves, and the next save removes them.
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
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint.errors import together
from lightning_zero.checkpoint.remote import Location, RemotePath
from lightning_zero.sharding import Group
from lightning_zero.storage import Executor

INCOMPLETE = ".incomplete"  # suffix of a checkpoint's temporary name, until it is complete
_DRAFT = re.compile(rf"\.[0-9a-f]{{16}}\.[0-9a-f]{{8}}{re.escape(INCOMPLETE)}")
README = "README.txt"  # explains to users what the folder is
METADATA, META = ".metadata", "meta.pt"  # files of a folder besides those of the ranks; `META` is written last
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# Errors of renaming a folder that is gone, or to a name that something has.
_ANOTHER_WAS_FIRST = (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


class Save(ABC):
    """A save that all ranks have begun.

    Attributes:
        path: path of the checkpoint.
        spread: whether the ranks are on several file systems, so that each of these gets a folder of the same name.
        gathered: whether rank 0 has gathered the whole checkpoint and writes it alone, since some rank does not see its
            file.
        in_background: whether it can be written while training continues, after :meth:`hold`.
    """

    path: Location
    spread: bool = False
    gathered: bool = False
    in_background: bool = True

    def write(self, world: Group) -> None:
        """Write the checkpoint, and rename it to its final name when it is complete and on the disk. Collective.

        Args:
            world: a group of all ranks; in another thread than the training thread, a group that only it uses.

        Raises:
            CheckpointError: a rank has failed; raised on all ranks. The older checkpoint is then still at the path,
                unless only the last flush, that of the parent folder, has failed: then the new one is there. At a URL
                it may be the new one if no answer came to the request that completes it.
        """
        try:
            written = together(world, lambda: self._write(world.rank), f"write the checkpoint {self.path}")
            together(world, lambda: self._complete(written), f"complete the checkpoint {self.path}")
        finally:
            self.abandon()

    @abstractmethod
    def hold(self, executor: Executor) -> None:
        """Copy the values that this rank will write to host memory, so that the originals may change afterwards.

        Args:
            executor: makes the copies.
        """

    @abstractmethod
    def _write(self, rank: int) -> Any:
        """Write this rank's part and flush it to the disk.

        Returns:
            What :meth:`_complete` needs of this rank; it must be picklable.
        """

    @abstractmethod
    def _complete(self, written: Sequence[Any]) -> None:
        """Complete the checkpoint and give it its name; ``written`` has the results of :meth:`_write` by rank."""

    @abstractmethod
    def abandon(self) -> None:
        """Remove the draft, unless it is complete, and release its lock."""


def is_sharded(path: Path) -> bool:
    """Whether ``path`` is a folder with a complete checkpoint."""
    return (path / METADATA).is_file() and (path / META).is_file()


def completed_at(path: RemotePath) -> datetime | None:
    """The time at which the checkpoint at a URL was completed; ``None`` if none is complete there."""
    # A save replaces it when all else is there, and an object store has no time of a folder.
    file = path / METADATA if path.is_dir() else path
    return file.modified() if file.is_file() else None


class Draft:
    """A locked file or folder under a temporary name in the parent folder of its final name.

    Args:
        path: the final name.
        folder: whether to make a folder; otherwise a file.

    Raises:
        IsADirectoryError: there is a folder at ``path`` that is no checkpoint.
        ValueError: ``path`` is inside a checkpoint.
        OSError: the draft cannot be made.
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
            # Held while the file is open: other saves do not take it for a leftover.
            ours = _lock(self.file) is not False
            if ours and locked.exists() and locked.stat().st_ino == os.fstat(self.file).st_ino:
                break
            os.close(self.file)  # another run removed it as a leftover before it was locked
        try:
            if folder:
                os.write(self.file, os.fsencode(path.name))  # `recover_all` needs the final name of a complete draft
                os.fsync(self.file)
            self._inode = self.temporary.stat().st_ino
        except BaseException:
            self.close()
            raise

    def complete(self) -> None:
        """Rename the draft to its final name, replacing an older checkpoint. All of it must be on the disk."""
        if not self._was_recovered():
            try:
                _put_in_place(self.temporary, self.path)
            except FileNotFoundError:
                if not self._was_recovered():
                    raise
        if self.path.is_dir():
            _locked_file(self.path).unlink(missing_ok=True)
        sync(self.path.parent)

    def _was_recovered(self) -> bool:
        """Whether a reader took the complete draft for that of a killed save, as it may where there are no locks."""
        return not self.temporary.exists() and self.path.exists() and self.path.stat().st_ino == self._inode

    def close(self) -> None:
        """Release the lock and remove what has the temporary name now: the draft or the exchanged older checkpoint.

        Where it cannot be removed, it is a leftover for the next save. The save's own error, which all ranks raise, or
        its success is not replaced by an error of this rank.
        """
        try:
            with contextlib.suppress(OSError):
                _remove(self.temporary)
        finally:
            os.close(self.file)


def _begin_of_name(path: Path) -> str:
    """The prefix of all temporary names of ``path``: a hash, since other programs may search for parts of its name."""
    return f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}."


def _temporary_name(path: Path) -> Path:
    return path.with_name(f"{_begin_of_name(path)}{secrets.token_hex(4)}{INCOMPLETE}")


def _put_in_place(temporary: Path, path: Path) -> None:
    """Rename so that at every moment a complete checkpoint has the name ``path``, or :func:`recover` finds one."""
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
    """Exchange two names atomically; False if the system or file system cannot (Linux can, NFS cannot)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    if (number := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(second))


def remove(path: Path) -> None:
    """Remove a checkpoint; a folder is renamed first, so that a partly removed one is only a leftover."""
    if path.is_dir() and not path.is_symlink():
        aside = _temporary_name(path.with_name(secrets.token_hex(8)))  # not `path`'s: `recover` must not find it
        path.rename(aside)
        path = aside
    _remove(path)


def recover(path: Path) -> None:
    """Rename the newest complete draft to ``path`` if nothing has that name: a save was killed between two renames."""
    if os.path.lexists(path) or not path.parent.is_dir():
        return
    drafts = [draft for draft in _drafts(path.parent) if draft.name.startswith(_begin_of_name(path))]
    if not drafts or not is_sharded(drafts[0]):
        return
    with contextlib.ExitStack() as locks:
        # Where another process holds a lock, it recovers the same name, or its save is between the two renames.
        if any(locks.enter_context(_unlocked(draft)) is False for draft in drafts):
            return
        try:
            drafts[0].rename(path)
        except OSError as error:
            if error.errno not in _ANOTHER_WAS_FIRST:
                raise
        else:
            _locked_file(path).unlink(missing_ok=True)


def recover_all(folder: Path) -> None:
    """Call :func:`recover` for every name in a folder.

    The ranks of a node take turns, so that all see the same afterwards. A rank of another node may look during a rename
    and find nothing.
    """
    if not folder.is_dir():
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # the file system may have no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        for draft in _drafts(folder):
            with contextlib.suppress(OSError):  # the draft may be another user's
                _recover_draft(draft)
    finally:
        os.close(file)


def _recover_draft(draft: Path) -> None:
    if is_sharded(draft) and (lock := _locked_file(draft)).exists() and (name := lock.read_bytes()):
        recover(draft.with_name(os.fsdecode(name)))


def remove_leftovers(folder: Path) -> None:
    """Remove the drafts of saves that were killed; drafts of running saves are locked and stay."""
    for leftover in _drafts(folder):
        # The draft may be another user's, or another run may remove it first; a save must not fail for that.
        with contextlib.suppress(OSError):
            _recover_draft(leftover)
            with _unlocked(leftover) as free:
                if free:
                    _remove(leftover)


def _drafts(folder: Path) -> list[Path]:
    """Everything in ``folder`` with a temporary name; complete folders come first, the newest of them first."""
    found = []
    for path in folder.glob(f".*{INCOMPLETE}"):
        if _DRAFT.fullmatch(path.name):
            with contextlib.suppress(OSError):  # it may be gone, or another user's
                found.append(((path / META).stat().st_mtime if is_sharded(path) else 0.0, path))
    return [path for _, path in sorted(found, reverse=True)]


@contextlib.contextmanager
def _unlocked(path: Path) -> Iterator[bool | None]:
    """A context that holds the lock of the draft ``path``, if no other process does.

    It yields what :func:`_lock` returns, and True if there is no lock file: nobody is writing the draft.
    """
    try:
        file = os.open(_locked_file(path), os.O_WRONLY)
    except FileNotFoundError:  # an older checkpoint that was replaced has none
        yield True
        return
    try:
        yield _lock(file)
    finally:
        os.close(file)


def _locked_file(path: Path) -> Path:
    """The file that is locked on behalf of the draft ``path``."""
    return path / "lock" if path.is_dir() else path


def _remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)  # files that stay are leftovers for the next save
    else:
        path.unlink(missing_ok=True)


def _lock(file: int) -> bool | None:
    """Lock a file until it is closed; False if another process holds the lock, None if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def sync(path: Path) -> None:
    """Flush a file, or the directory entries of a folder, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
