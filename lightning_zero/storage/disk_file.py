"""The file of a rank on a disk. Parts of it, called extents, are given out; errors say what the system reports."""

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

# Addresses, offsets and lengths of transfers are multiples of it. No file system asks for more than a page.
ALIGNMENT = 4096
_O_DIRECT = getattr(os, "O_DIRECT", 0)  # of Linux


class DiskError(OSError):
    """A disk failed, or is full.

    The attributes are those of :class:`OSError`: ``errno``, ``strerror`` and ``filename``.
    """


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to what an extent takes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class DiskFile:
    """A new file whose extents are reserved on the disk before they are written. Any thread may read and write.

    Attributes:
        path: of the file.
        direct: whether transfers bypass the page cache (``O_DIRECT``).
        refusal: why they do not although they should, in the system's words; empty otherwise.
        given: bytes of the extents in use, as they were asked for.
        pool: does the transfers. It may be replaced between two of them.

    Args:
        path: as above; the file must not exist.
        pool: as above.
        direct: whether to try ``O_DIRECT``.

    Raises:
        DiskError: the file cannot be created.
    """

    def __init__(self, path: Path, pool: ops.DiskPool, direct: bool = True) -> None:
        self.path = path
        self.pool = pool
        self.given = 0
        self._size = 0  # of all extents so far
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # offsets of extents that were given back, by size
        self._lock = threading.RLock()  # the thread that holds it may collect garbage, whose extents are given back
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags, 0o600)
        except OSError as error:
            raise _error(error.errno or errno.EIO, path, f"{path} cannot be made") from error
        # It is closed when nothing refers to it, but not at the exit of the process: a lane may still be writing then.
        weakref.finalize(self, os.close, self._file).atexit = False
        # Without `O_DIRECT`: where a file system cannot reserve, the C library writes a byte to each block instead.
        self._plain = os.dup(self._file)
        weakref.finalize(self, os.close, self._plain).atexit = False
        self.refusal = ""
        self.direct = direct and _O_DIRECT != 0 and self._reopen(flags & ~(os.O_CREAT | os.O_EXCL) | _O_DIRECT)

    def _reopen(self, flags: int) -> bool:
        """Open the file with ``O_DIRECT``; ``False`` where the file system refuses it, at once or at a transfer."""
        try:
            file = os.open(self.path, flags)
        except OSError as error:
            self.refusal = f"opening a file: {os.strerror(error.errno or errno.EIO)}"
            return False
        try:
            block = HostStore().zeros(ALIGNMENT, torch.uint8)
            failure = self.pool.write(file, block, 0, ALIGNMENT) or self.pool.read(file, block, 0, ALIGNMENT)
            if failure is not None:
                self.refusal = f"a transfer: {os.strerror(failure.code)}"
                return False
            os.dup2(file, self._file, inheritable=False)
            return True
        finally:
            os.close(file)

    def reserve(self, nbytes: int, what: str) -> None:
        """Reserve disk space for the first ``nbytes`` of the file; where the system cannot, see that there is as much.

        Args:
            nbytes: as above.
            what: a name for messages.

        Raises:
            DiskError: there is not enough; it states the bytes needed and free.
        """
        size = os.fstat(self._file).st_size
        if nbytes <= size:
            return
        try:
            self._extend(nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)  # free what was reserved until it failed
            message = (
                f"{self.path} needs {nbytes - size:,} bytes more for {what}; the file system has {self._room:,} free"
            )
            raise _error(error.errno or errno.EIO, self.path, message + advice(Case.DISK_FULL, ". ")) from error

    def _extend(self, nbytes: int) -> None:
        try:
            os.posix_fallocate(self._plain, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            written = os.fstat(self._plain).st_blocks * 512  # what was only promised takes no room yet
            if nbytes - written > self._room:  # nothing can be reserved, but what does not fit is known
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            os.ftruncate(self._plain, nbytes)

    def allocate(self, nbytes: int, what: str) -> int:
        """Give out an extent for ``nbytes``; its contents are arbitrary.

        Args:
            nbytes: as above.
            what: a name for messages.

        Returns:
            Its offset.

        Raises:
            DiskError: see :meth:`reserve`.
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
        """Take back an extent, which may be given out again."""
        with self._lock:
            self.given -= nbytes
            self._free[aligned(nbytes)].append(offset)

    def read(self, memory: Tensor, offset: int, what: str) -> None:
        """Fill ``memory`` from the file.

        Args:
            memory: uint8, 1-D, on the CPU; address and length are multiples of :data:`ALIGNMENT`.
            offset: in the file; a multiple of it, too.
            what: a name for messages.

        Raises:
            DiskError: the system reports an error, or the file is too short.
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
        """Write the file's pages in the page cache to the disk and remove them there. With ``O_DIRECT`` there are none.

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
        """Free bytes of its file system."""
        found = os.fstatvfs(self._file)  # not by name: the folder may be gone
        return found.f_bavail * found.f_frsize

    @property
    def nbytes(self) -> int:
        """The size of the file, all of which is reserved."""
        return os.fstat(self._file).st_size

    @property
    def descriptor(self) -> int:
        """The descriptor of the open file."""
        return self._file


def _error(code: int, path: Path, message: str, after: str = "") -> DiskError:
    reason = os.strerror(code)
    text = f"{message}: {reason}{after}" if reason not in message else f"{message}{after}"
    return DiskError(code, text, str(path))
