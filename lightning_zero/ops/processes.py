"""Memory and signals that processes of a machine share, and reads of another process's memory.

The last is called cross-memory attach (CMA): ``process_vm_readv(2)`` of Linux.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_zero.ops import _C

SIGNAL_BYTES = 4
_VALUES = 1 << 31
_SWITCH = "LIGHTNING_ZERO_CMA"  # the environment variable that switches it off
_FILE = "/memfd:lightning_zero"  # beginning of what /proc says of the file of shared memory


class SharedMemory:
    """Memory that processes share.

    Attributes:
        bytes: the memory, uint8. At first it holds zeros.
    """

    bytes: NDArray[np.uint8]

    def __init__(self, memory: _C.SharedMemory) -> None:
        self._memory = memory
        self.bytes = np.frombuffer(memoryview(memory), dtype=np.uint8)

    @classmethod
    def make(cls, nbytes: int) -> SharedMemory:
        """Makes memory, which others can open until :meth:`close_file`.

        Raises:
            OSError: the system refuses it.
        """
        return cls(_C.SharedMemory(nbytes))

    @classmethod
    def open(cls, process: int, file: int, nbytes: int) -> SharedMemory:
        """Maps the memory that another process has made.

        Args:
            process: the process's number.
            file: its :attr:`file`.
            nbytes: the size of the memory.

        Raises:
            OSError: there is no such memory, or the system refuses it.
        """
        path = Path(f"/proc/{process}/fd/{file}")
        if not (found := str(path.readlink())).startswith(_FILE):  # opening it could do anything
            raise OSError(f"{path} is {found}; expected {_FILE}")
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(_C.SharedMemory(nbytes, opened))
        finally:
            os.close(opened)

    @property
    def file(self) -> int:
        """The number by which others open the memory; -1 if this process did not make it, or has closed it."""
        return self._memory.file

    def close_file(self) -> None:
        """Lets no other process open the memory any more. Those that have keep it."""
        self._memory.close_file()


class Signal:
    """A number in shared memory: one process announces numbers there, another waits for them.

    A waiter that has waited for long can fall asleep for good. Whoever announces the number learns of it, and must wake
    the waiter by other means. So a waiter need not look again and again, and can wait where it is told of errors.

    Args:
        memory: ``SIGNAL_BYTES`` of uint8, aligned to as many bytes, zeros at first.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory  # keeps the mapping alive
        self._address = memory.ctypes.data

    def announce(self, number: int) -> bool:
        """Announces a number, which counts modulo 2^31 and differs from the last; returns whether the waiter sleeps."""
        return _C.announce(self._address, number % _VALUES)

    def wait(self, number: int, seconds: float) -> bool:
        """Waits until ``number`` is announced, for ``seconds`` at most; returns whether it was. Releases the GIL."""
        return _C.wait_for(self._address, number % _VALUES, seconds)

    def sleep(self, number: int) -> bool:
        """Falls asleep unless ``number`` was announced; returns whether it does."""
        return _C.sleep_for(self._address, number % _VALUES)


def read_memory(process: int, address: int, target: Tensor) -> None:
    """Fills ``target`` with memory of another process. Releases the GIL.

    Args:
        process: the process's number.
        address: where the memory begins in that process.
        target: contiguous, in host memory.

    Raises:
        ValueError: ``target`` is not contiguous, or not in host memory.
        OSError: the process has ended, or does not let this one read its memory, or has none there that can be read;
            memory that a driver has mapped cannot. Or the system is not Linux.
    """
    _check_target(target)
    if error := _C.read_memory(process, address, target.data_ptr(), target.nbytes):
        raise _unreadable(error, process)


class RemoteMessage:
    """A message that lies in pieces in another process's memory, which must stay as it is while it is read.

    The GIL is released while memory of the other process is read.

    Args:
        process: the process's number.
        table: where its table of the pieces begins: [count, 3] int64, where a piece begins in the message, its address
            and its size, in bytes; pieces are in order and do not overlap, and between them the message is zero.
        count: number of pieces.
        nbytes: size of the message.

    Raises:
        ValueError: the table is not as described.
        OSError: as :func:`read_memory`.
    """

    def __init__(self, process: int, table: int, count: int, nbytes: int) -> None:
        self._process = process
        self._nbytes = nbytes
        self._pieces = np.empty((min(count, nbytes), 3), dtype=np.int64)
        error = errno.EINVAL
        if count <= nbytes:  # one for each byte at most
            error = _C.read_table(process, table, count, nbytes, self._pieces.ctypes.data)
        if error == errno.EINVAL:
            raise ValueError(f"process {process} has no {count} pieces of {nbytes} bytes, in order, at {table}")
        if error:
            raise _unreadable(error, process)

    def read(self, start: int, target: Tensor) -> None:
        """Fills ``target`` with the message from byte ``start`` on.

        Args:
            start: at least 0.
            target: contiguous, in host memory; not larger than what is left of the message.

        Raises:
            ValueError, OSError: as :func:`read_memory`; a `ValueError` also if the message ends before.
        """
        _check_target(target)
        if not 0 <= start <= self._nbytes - target.nbytes:
            raise ValueError(f"the message has {self._nbytes} bytes; expected {target.nbytes} from byte {start} on")
        address, count = self._pieces.ctypes.data, len(self._pieces)
        if error := _C.read_pieces(self._process, address, count, start, target.data_ptr(), target.nbytes):
            raise _unreadable(error, self._process)


def _unreadable(error: int, process: int) -> OSError:
    return OSError(error, f"{os.strerror(error)} (memory of process {process})")


def _check_target(target: Tensor) -> None:
    if target.device.type != "cpu" or not target.is_contiguous():
        raise ValueError(
            f"the target has shape {tuple(target.shape)} and strides {target.stride()} on {target.device}; expected a "
            "contiguous tensor in host memory"
        )


def cma_refusal() -> str:
    """Returns why this process cannot read others' memory, or does not try; an empty string if it does.

    Raises:
        ValueError: the environment variable ``LIGHTNING_ZERO_CMA`` is neither ``off`` nor empty.
    """
    asked = os.environ.get(_SWITCH, "")
    if asked not in ("", "off"):
        raise ValueError(f"{_SWITCH}={asked!r} must be 'off', or unset")
    if asked:
        return f"{_SWITCH}={asked}"
    if sys.platform != "linux":
        return "only Linux has process_vm_readv"
    own = torch.ones(1, dtype=torch.float32, device="cpu")
    try:
        read_memory(os.getpid(), own.data_ptr(), torch.empty(1, dtype=torch.float32, device="cpu"))
    except OSError as error:  # by a container's filter of system calls
        return error.strerror or str(error)
    return ""
