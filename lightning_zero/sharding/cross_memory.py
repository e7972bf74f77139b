"""Finds ranks of the same node that can read each other's memory, and connects them.

A large message between two processes of a node costs two copies and their ways through the kernel's sockets if it is
sent. With cross-memory attach (CMA, ``process_vm_readv(2)`` of Linux) it costs one copy. MPI libraries send large
messages in this way, too.

The system decides whether a process may read another's memory: both must belong to the same user, and neither the
container's filter of system calls nor the security module may forbid it. The module Yama (``kernel.yama.ptrace_scope``)
allows it in its mode 1, Ubuntu's default, to a process that the other has named with ``PR_SET_PTRACER``, and to those
that this one has started. Ranks name their parent: the launcher of them all, or rank 0, which launched the others. In
other modes, and without Yama, this has no effect. Whether reading works is found out by reading.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_zero import ops
from lightning_zero.limits import process_number
from lightning_zero.sharding.pieces import Pieces

_PR_SET_PTRACER = 0x59616D61  # see prctl(2)
_SLOT = 64  # bytes: a cache line


class Posted(NamedTuple):
    """The place of a message in its sender's memory.

    Attributes:
        table: address of the table of its pieces.
        pieces: their number.
        nbytes: size of the message.
        tag: its tag.
    """

    table: int
    pieces: int
    nbytes: int
    tag: int


class Slot:
    """A place in shared memory for the message that one rank offers to another, one at a time.

    Attributes:
        posted: announces the number of the message.
        answered: announces the same number when the receiver has read it, or could not.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        size = ops.SIGNAL_BYTES
        self.posted, self.answered = ops.Signal(memory[:size]), ops.Signal(memory[size : 2 * size])
        self._fields = memory[16:56].view(np.int64)

    def write(self, message: Pieces, tag: int) -> NDArray[np.int64]:
        """Says where a message lies in this process's memory; to be announced.

        Returns:
            The table of its pieces, which the receiver reads, too; see :class:`~lightning_zero.ops.RemoteMessage`.
        """
        for _, part in message.parts:
            if not part.is_contiguous():
                raise ValueError(f"the message has strides {part.stride()}; expected a contiguous tensor")
        size = message.dtype.itemsize
        rows = [(start * size, part.data_ptr(), part.nbytes) for start, part in message.parts]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        self._fields[:4] = table.ctypes.data, len(rows), message.nbytes, tag
        return table

    def read(self) -> Posted:
        """The place of the message; to be read after the announcement."""
        return Posted(*self._fields[:4].tolist())

    @property
    def refused(self) -> bool:
        """Whether the receiver could not read the message; to be set before, and read after the answer."""
        return bool(self._fields[4])

    @refused.setter
    def refused(self, refused: bool) -> None:
        self._fields[4] = refused


class Neighbor(NamedTuple):
    """Another rank whose memory this rank reads, and that reads this rank's.

    Attributes:
        process: the number of its process.
        slots: by channel, those in which it finds this rank's messages, and answers.
        own_slots: by channel, those in which this rank finds its messages, and answers.
    """

    process: int
    slots: Sequence[Slot]
    own_slots: Sequence[Slot]


class Offer(NamedTuple):
    """Tells another process how to find this one's board, and how to try whether it can read this one's memory."""

    file: int
    address: int
    secret: bytes  # what lies there


class SlotBoard:
    """The slots in which a rank finds the messages of others, in memory that these can map.

    Args:
        size: number of ranks.
        channels: number of slots for each of them.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self, size: int, channels: int) -> None:
        self._size, self._channels = size, channels
        self._memory = ops.SharedMemory.make(_SLOT * (1 + size * channels))
        self._secret = secrets.token_bytes(_SLOT)
        self._memory.bytes[:_SLOT] = np.frombuffer(self._secret, dtype=np.uint8)

    def offer(self) -> Offer:
        """Lets other ranks read this process's memory."""
        # 0: the parent is in another namespace. Its own children can still read this process then.
        reader = os.getppid() or os.getpid()
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(reader), 0, 0, 0)  # fails where there is no Yama
        return Offer(self._memory.file, self._memory.bytes.ctypes.data, self._secret)

    def find_neighbors(self, processes: Sequence[str], offers: Sequence[Offer | None], own: int) -> dict[int, Neighbor]:
        """Finds the ranks whose memory this process can read. Those must find this rank, too.

        Args:
            processes: :func:`~lightning_zero.limits.process_name` of each rank.
            offers: of each rank; ``None``: it does without.
            own: this rank, which is left out.
        """
        found = {}
        for rank, (process, offer) in enumerate(zip(processes, offers, strict=True)):
            number = process_number(process)
            if rank != own and offer is not None and number is not None and (board := self._open(number, offer)):
                found[rank] = Neighbor(number, self._slots(board, own), self._slots(self._memory, rank))
        return found

    def _open(self, process: int, offer: Offer) -> ops.SharedMemory | None:
        """The board of another process, which has as many slots; ``None`` if its memory cannot be read."""
        read = torch.zeros(_SLOT, dtype=torch.uint8, device="cpu")
        try:
            ops.read_memory(process, offer.address, read)
            board = ops.SharedMemory.open(process, offer.file, len(self._memory.bytes))
        except OSError:
            return None
        return board if bytes(read.tolist()) == board.bytes[:_SLOT].tobytes() == offer.secret else None

    def _slots(self, board: ops.SharedMemory, rank: int) -> list[Slot]:
        rows = board.bytes[_SLOT:].reshape(self._channels, self._size, _SLOT)
        return [Slot(rows[channel, rank]) for channel in range(self._channels)]

    def close(self) -> None:
        """Lets no other rank find the board any more. Those that have keep it."""
        self._memory.close_file()
