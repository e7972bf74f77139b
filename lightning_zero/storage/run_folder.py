"""The folder of a rank's files on a disk. The rank removes it at its end; if it was killed, the next run does.

A run has a folder ``lightning_zero-<run id>`` at the path, and each of its ranks has a folder ``rank<k>`` in that. The
rank locks the file ``owner`` in it (flock) as long as it lives. A folder whose file is not locked, or missing, is left
over from a run that has died. It is a file since network file systems lock folders for one machine alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import socket
import time
import weakref
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path
from typing import NamedTuple

from lightning_zero.advice import Case, advice
from lightning_zero.storage.disk_file import DiskError

log = logging.getLogger(__name__)

_PREFIX = "lightning_zero-"
_OWNER = "owner"
_NEW = ".new-"  # prefix of a folder that its owner is about to lock
_NEW_SECONDS = 60.0  # an owner that has not locked its folder by then has died

# File systems, as the table of mounts calls them.
_IN_MEMORY = {"tmpfs", "ramfs"}
_ON_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs"),
    *("fuse.ceph-fuse", "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse"),
}


class RunFolder:
    """A folder for this rank alone.

    Attributes:
        path: of the folder.

    Args:
        base: an existing folder, which other runs may use, too.
        run: the same text on all ranks of the run, and different from every other run's.
        rank: of this process.

    Raises:
        DiskError: ``base`` is missing or cannot be written to, or the run has such a folder already.
    """

    def __init__(self, base: Path, run: str, rank: int) -> None:
        _check_base(base)
        remove_stale(base)
        self.path = self.place(base, run, rank)
        folder = self.path.parent
        new = folder / f"{_NEW}rank{rank}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            new.mkdir(mode=0o700)
            lock = os.open(new / _OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(OSError):  # where it cannot be locked, no other run can lock and remove it
                fcntl.flock(lock, fcntl.LOCK_EX)
            os.write(lock, b"process %d" % os.getpid() + _of_this_host())
            new.rename(self.path)  # others see it only when it is locked; it fails if the place has an owner
        except OSError as error:
            shutil.rmtree(new, ignore_errors=True)
            raise DiskError(
                error.errno, f"{self.path} cannot be made: {error.strerror}{advice(Case.DISK_PATH, '. ')}", str(base)
            ) from error
        self.remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())
        util.Finalize(self, self.remove, exitpriority=0)  # a process of `multiprocessing` ends without `atexit`

    @staticmethod
    def place(base: Path, run: str, rank: int) -> Path:
        """The path of such a folder."""
        return base / f"{_PREFIX}{run}" / f"rank{rank}"


def _check_base(base: Path) -> None:
    if not base.is_dir():
        code = errno.ENOTDIR if base.exists() else errno.ENOENT
        raise DiskError(code, f"{base} is not a folder that exists{advice(Case.DISK_PATH, '. ')}", str(base))
    if not os.access(base, os.W_OK | os.X_OK):
        raise DiskError(errno.EACCES, f"{base} cannot be written to{advice(Case.DISK_PATH, '. ')}", str(base))


def _remove(path: Path, lock: int, process: int) -> None:
    if os.getpid() != process:
        return  # in the child of a fork, which has inherited the lock
    with contextlib.suppress(OSError):
        for file in path.iterdir():
            if file.name != _OWNER:  # it says until the end that nobody else need remove them
                file.unlink()
    os.close(lock)  # before the rest: NFS keeps a file that is open
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()  # by the last rank


def remove_stale(base: Path) -> list[Path]:
    """Remove the folders that ranks which have died have left at ``base``; returns them.

    On a network file system those of other machines stay: some let each machine lock files for itself.
    """
    removed, of = [], _of_this_host() if file_system(base).on_network else b""
    for run in sorted(base.glob(f"{_PREFIX}*")):
        found = [folder for folder in _rank_folders(run) if _remove_if_dead(folder, of)]
        if found:
            log.warning("removed %s, which a run that has died had left", ", ".join(map(str, found)))
            with contextlib.suppress(OSError):
                run.rmdir()
        removed += found
    return removed


def _rank_folders(run: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):  # its owner has just removed it, or it is another user's
        yield from run.glob("rank*")
        for folder in run.glob(f"{_NEW}rank*"):
            if time.time() - folder.stat().st_mtime > _NEW_SECONDS:
                yield folder


def _of_this_host() -> bytes:
    """The end of what a rank of this machine writes into the file ``owner``."""
    return f" of {socket.gethostname()}\n".encode()


def _remove_if_dead(folder: Path, of: bytes) -> bool:
    """Remove the folder if nobody has locked it, and what its owner has written ends so."""
    try:
        with (folder / _OWNER).open("r+b") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not owner.read().endswith(of):
                return False
    except FileNotFoundError:
        pass  # it died while it made or removed the folder
    except OSError:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


class FileSystem(NamedTuple):
    """The file system that a path is on.

    Attributes:
        kind: its name in the table of mounts; empty where the system has no such table.
    """

    kind: str

    @property
    def in_memory(self) -> bool:
        """Whether its files are in host memory."""
        return self.kind in _IN_MEMORY

    @property
    def on_network(self) -> bool:
        """Whether its files are on another machine."""
        return self.kind in _ON_NETWORK


def file_system(path: Path) -> FileSystem:
    """The file system of ``path``, by the mounts of this process."""
    path = path.resolve()
    best, kind = -1, ""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:  # not on this system
        return FileSystem("")
    for line in mounts:
        point, name = (field.encode().decode("unicode_escape") for field in line.split()[1:3])
        if path.is_relative_to(point) and len(Path(point).parts) >= best:  # the last mount there hides others
            best, kind = len(Path(point).parts), name
    return FileSystem(kind)
