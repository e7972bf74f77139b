"""One file of a rank on a disk, given out in extents, with what the system says where it fails."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from lightning_zero import ops
from lightning_zero.advice import Case, advice
from lightning_zero.storage.host import HostStore

# Of addresses, offsets and lengths; no file system asks for more than the size of a page.
ALIGNMENT = 4096
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # of Linux


class DiskError(OSError):
    """A disk could not keep or give back state.

    The attributes are those of :class:`OSError`: ``errno``, ``strerror`` and ``filename``.
    """


def aligned(nbytes: int) -> int:
    """The bytes of an extent for so many."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class DiskFile:
    """A new file in which extents are reserved before they are written. Any thread may read and write.

    Attributes:
        path: of the file.
        direct: whether transfers pass by the page cache (``O_DIRECT``); not where the file system refuses that.
        refusal: why they do not, as the system says it; empty where they do, or were not meant to.
        given: bytes of the extents that are given out now, without what fills these up to pages.
        pool: reads and writes; another one may take over between two transfers.

    Args:
        path: as above; no such file may be there.
        pool: as above.
        direct: whether to try.

    Raises:
        DiskError: the file cannot be made.
    """

    def __init__(self, path: Path, pool: ops.DiskPool, direct: bool = True) -> None:
        self.path = path
        self.pool = pool
        self.given = 0
        self._size = 0  # of what was given out, and is reserved
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # offsets of extents given back, by their size
        self._lock = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags, 0o600)
        except OSError as error:
            raise _error(error.errno or errno.EIO, path, f"{path} cannot be made") from error
        self.refusal = ""
        self.direct = direct and _O_DIRECT != 0 and self._reopen(flags & ~(os.O_CREAT | os.O_EXCL) | _O_DIRECT)
        # When nobody refers to the file any more. Not at the exit of the process: a lane may still be writing then.
        weakref.finalize(self, os.close, self._file).atexit = False

    def _reopen(self, flags: int) -> bool:
        """Open the file with ``O_DIRECT``, where the file system lets it: some refuse only a transfer."""
        try:
            file = os.open(self.path, flags)
        except OSError as error:
            self.refusal = f"opening a file: {os.strerror(error.errno or errno.EIO)}"
            return False
        block = HostStore().zeros(ALIGNMENT, torch.uint8)
        failure = self.pool.write(file, block, 0, ALIGNMENT) or self.pool.read(file, block, 0, ALIGNMENT)
        if failure is not None:
            self.refusal = f"a transfer: {os.strerror(failure.code)}"
            os.close(file)
            return False
        os.close(self._file)
        self._file = file
        return True

    def reserve(self, nbytes: int, what: str) -> None:
        """Make sure that the disk has room for ``nbytes`` from the beginning of the file.

        Raises:
            DiskError: it has not; with the bytes that are needed and free.
        """
        size = os.fstat(self._file).st_size
        if nbytes <= size:
            return
        try:
            os.posix_fallocate(self._file, 0, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)  # give back what there was
            message = (
                f"{self.path} needs {nbytes - size:,} bytes more for {what}; the file system has {self._room:,} free"
            )
            raise _error(error.errno or errno.EIO, self.path, message + advice(Case.DISK_FULL, ". ")) from error

    def allocate(self, nbytes: int, what: str) -> int:
        """Give out an extent for ``nbytes``, whose contents are arbitrary; returns its offset.

        Raises:
            DiskError: as :meth:`reserve`.
        """
        size = aligned(nbytes)
        with self._lock:
            if not self._free[size]:
                self.reserve(self._size + size, what)
                self._free[size].append(self._size)
                self._size += size
            self.given += nbytes
            return self._free[size].pop()

    def free(self, offset: int, nbytes: int) -> None:
        """Take an extent back."""
        with self._lock:
            self.given -= nbytes
            self._free[aligned(nbytes)].append(offset)

    def read(self, memory: Tensor, offset: int, what: str) -> None:
        """Fill ``memory`` from the file.

        Args:
            memory: uint8, 1-D, on the CPU; address and length are multiples of :data:`ALIGNMENT`.
            offset: in the file; another multiple.
            what: is read, for messages.

        Raises:
            DiskError: the system reports an error, or the file ends before.
        """
        failure = self.pool.read(self._file, memory, offset, ALIGNMENT if self.direct else 1)
        if failure is not None:
            where = f"{what} could not be read from {self.path} at byte {failure.offset:,}"
            if failure.code:
                raise _error(failure.code, self.path, where)
            raise _error(errno.EIO, self.path, f"{where}: the file ends there; someone has truncated it")

    def write(self, memory: Tensor, offset: int, what: str) -> None:
        """Write ``memory`` to the file; see :meth:`read`.

        Raises:
            DiskError: the system reports an error.
        """
        failure = self.pool.write(self._file, memory, offset, ALIGNMENT if self.direct else 1)
        if failure is not None:
            where = f"{what} could not be written to {self.path} at byte {failure.offset:,}"
            full = ""
            if failure.code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                needed = memory.nbytes - (failure.offset - offset)
                full = f"; it needs {needed:,} bytes, and the file system has {self._room:,} free"
                full += advice(Case.DISK_FULL, ". ")
            raise _error(failure.code, self.path, where, full)

    def settle(self) -> None:
        """Write what the page cache has of the file to the disk, and have it forget that; nothing with ``O_DIRECT``.

        Raises:
            DiskError: the system reports an error.
        """
        if self.direct:
            return
        try:
            os.fdatasync(self._file)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise _error(error.errno or errno.EIO, self.path, f"{self.path} could not be written") from error

    @property
    def _room(self) -> int:
        """Bytes that are free beside it."""
        found = os.statvfs(self.path.parent)
        return found.f_bavail * found.f_frsize

    @property
    def nbytes(self) -> int:
        """Its size, all of which is reserved."""
        return os.fstat(self._file).st_size

    @property
    def descriptor(self) -> int:
        """Of the open file."""
        return self._file


def _error(code: int, path: Path, message: str, after: str = "") -> DiskError:
    reason = os.strerror(code)
    text = f"{message}: {reason}{after}" if reason not in message else f"{message}{after}"
    return DiskError(code, text, str(path))
