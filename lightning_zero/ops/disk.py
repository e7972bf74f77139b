"""Reads and writes of files, many blocks at a time."""

from __future__ import annotations

from typing import NamedTuple

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


class DiskPool:
    """Threads that read and write blocks of files, with the GIL released.

    Every result is checked: what was interrupted, refused for now or came short goes on where it stopped.

    Args:
        threads: blocks at a time.
        block: bytes of a block; a multiple of every alignment.

    Raises:
        TypeError: not an int.
        ValueError: less than 1.
    """

    def __init__(self, threads: int = 8, block: int = 1 << 19) -> None:
        self._pool = _C.DiskPool(threads=positive("threads", threads), block=positive("block", block))

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
