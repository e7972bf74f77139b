"""Reads and writes files, many blocks at a time."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

from torch import Tensor

from lightning_zero.ops import _C
from lightning_zero.ops.threads import positive


class TransferFailure(NamedTuple):
    """The failure of a transfer.

    Attributes:
        code: the system's error number (errno); 0: the file ends there.
        offset: position of the failure in the file, in bytes.
    """

    code: int
    offset: int


DiskBackend = Literal["threads", "io_uring"]
_BACKENDS: dict[DiskBackend, type[_C.DiskThreads | _C.DiskRings]] = {
    "threads": _C.DiskThreads,
    "io_uring": _C.DiskRings,
}


def io_uring_refusal() -> str:
    """Returns the system's reason why io_uring is not available; an empty string if it is.

    The environment variable ``LIGHTNING_ZERO_IO_URING=off`` counts as a reason.

    Raises:
        ValueError: the variable has another value.
    """
    asked = os.environ.get("LIGHTNING_ZERO_IO_URING", "")
    if asked not in ("", "off"):
        raise ValueError(f"LIGHTNING_ZERO_IO_URING={asked!r} must be 'off', or unset")
    return f"LIGHTNING_ZERO_IO_URING={asked}" if asked else _C.io_uring_refusal()


class DiskPool:
    """Reads and writes blocks of files, many at a time, with the GIL released.

    Every result is checked: a transfer that was interrupted, refused temporarily or incomplete continues where it
    stopped. The child of a fork cannot use the pool, since it has neither its threads nor its ring.

    Attributes:
        backend: as below.

    Args:
        depth: number of blocks at a time; with io_uring, for each call.
        block: bytes per block; must be a multiple of every alignment.
        backend: ``threads`` that call ``pread`` and ``pwrite``, or ``io_uring`` of the Linux kernel.

    Raises:
        OSError: the system refuses the backend.
        TypeError: ``depth`` or ``block`` is not an int.
        ValueError: ``depth`` or ``block`` is less than 1.
    """

    def __init__(self, depth: int = 8, block: int = 1 << 19, backend: DiskBackend = "threads") -> None:
        self.backend = backend
        self._pool = _BACKENDS[backend](depth=positive("depth", depth), block=positive("block", block))

    def read(self, file: int, memory: Tensor, offset: int, alignment: int = 1) -> TransferFailure | None:
        """Fill ``memory`` from a file.

        Args:
            file: descriptor of the file.
            memory: uint8, 1-D, contiguous, on the CPU.
            offset: position in the file, in bytes.
            alignment: alignment in bytes that ``O_DIRECT`` requires of offset, length and address; 1 without it.

        Returns:
            The failure with the smallest offset; ``None`` if everything was read.

        Raises:
            RuntimeError: this process is the child of a fork.
            ValueError: address, length or offset is not aligned.
        """
        return self._transfer(file, memory, offset, alignment, write=False)

    def write(self, file: int, memory: Tensor, offset: int, alignment: int = 1) -> TransferFailure | None:
        """Write ``memory`` to a file; see :meth:`read`."""
        return self._transfer(file, memory, offset, alignment, write=True)

    def _transfer(self, file: int, memory: Tensor, offset: int, alignment: int, write: bool) -> TransferFailure | None:
        address, nbytes = memory.data_ptr(), memory.nbytes
        if address % alignment or nbytes % alignment or offset % alignment:
            raise ValueError(
                f"address {address}, length {nbytes} and offset {offset} must be multiples of {alignment} bytes"
            )
        failure = self._pool.transfer(
            file=file, address=address, nbytes=nbytes, offset=offset, alignment=alignment, write=write
        )
        return None if failure is None else TransferFailure(*failure)
