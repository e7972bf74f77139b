"""Reads and writes of files, many blocks at a time."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

from torch import Tensor

from lightning_zero.ops import _C
from lightning_zero.ops.threads import positive


class TransferFailure(NamedTuple):
    """Where a transfer failed.

    Attributes:
        code: the system's error number; 0: the file ends there.
        offset: in the file, in bytes.
    """

    code: int
    offset: int


DiskBackend = Literal["threads", "io_uring"]
_BACKENDS: dict[DiskBackend, type[_C.DiskThreads | _C.DiskRings]] = {
    "threads": _C.DiskThreads,
    "io_uring": _C.DiskRings,
}


def io_uring_refusal() -> str:
    """Returns why there is no io_uring, as the system says it; empty where there is.

    The environment variable ``LIGHTNING_ZERO_IO_URING=off`` is a reason, too.

    Raises:
        ValueError: the variable has another value.
    """
    asked = os.environ.get("LIGHTNING_ZERO_IO_URING", "")
    if asked not in ("", "off"):
        raise ValueError(f"LIGHTNING_ZERO_IO_URING={asked!r} must be 'off', or unset")
    return f"LIGHTNING_ZERO_IO_URING={asked}" if asked else _C.io_uring_refusal()


class DiskPool:
    """Reads and writes blocks of files, many at a time, with the GIL released.

    Every result is checked: what was interrupted, refused for now or came short goes on where it stopped. Not for
    the child of a fork, which has neither threads nor a ring of its own.

    Attributes:
        backend: as below.

    Args:
        depth: blocks at a time; with io_uring, of each call.
        block: bytes of a block; a multiple of every alignment.
        backend: ``threads`` that call ``pread`` and ``pwrite``, or ``io_uring`` of the Linux kernel.

    Raises:
        OSError: the system refuses the backend.
        TypeError: not an int.
        ValueError: less than 1.
    """

    def __init__(self, depth: int = 8, block: int = 1 << 19, backend: DiskBackend = "threads") -> None:
        self.backend = backend
        self._pool = _BACKENDS[backend](depth=positive("depth", depth), block=positive("block", block))

    def read(self, file: int, memory: Tensor, offset: int, alignment: int = 1) -> TransferFailure | None:
        """Fill ``memory`` from a file.

        Args:
            file: its descriptor.
            memory: uint8, 1-D, contiguous, on the CPU.
            offset: in the file, in bytes.
            alignment: of a file that was opened with ``O_DIRECT``; divides offset, length and address.

        Returns:
            The first place that failed; ``None``: all was read.

        Raises:
            RuntimeError: in the child of a fork.
            ValueError: something is not aligned.
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
        failure = self._pool.transfer([(file, address, nbytes, offset)], alignment=alignment, write=write)
        return None if failure is None else TransferFailure(failure[0], failure[2])
