"""Messages between the ranks of a process group, in host memory.

A message to a rank of the same node is not sent, if the two can read each other's memory (see
:mod:`~lightning_zero.sharding.cross_memory`). The sender posts where its pieces lie, in a slot that both share. The
receiver reads them there, and answers in the slot; until then the sender's memory must stay as it is. If the read
fails, the receiver answers that, and gets the message in the ordinary way: that works with memory that cannot be read,
and if the sender has ended, it says so.

A receiver that needs the messages' elements only once, to sum them, reads them tile by tile. A tile is used while it is
in the processor's cache, and messages that are read need memory for one tile only.

A rank waits for a post or an answer in shared memory for a fifth of a second. Then it falls asleep, and waits for a
byte from the other rank, by the backend of the process group: this knows whether a rank has ended, or takes too long.

All other messages are sent and received by the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lightning_zero import ops
from lightning_zero.sharding.collective_errors import MismatchError
from lightning_zero.sharding.cross_memory import Neighbor, Posted
from lightning_zero.sharding.pieces import Pieces

_PATIENCE = 0.2  # seconds

# Bytes. Larger tiles leave the caches of processors; for smaller ones, calls of the system take much of the time.
_TILE = 1 << 21


def bytes_of_tile(nbytes: int) -> int:
    """Bytes of a tile of a message of ``nbytes`` bytes."""
    return min(nbytes, _TILE)


# Takes a tile of messages; see `Exchange.run_in_tiles`.
UseTile = Callable[[int, Pieces, Mapping[int, Tensor]], object]


class Channel:
    """The slots for the exchanges of a group, one at a time.

    Attributes:
        neighbors: the ranks whose messages are read, and that read this rank's, by the group's rank.
        index: of the slots.
        failure: the error that ended an exchange. Slots are left as they are then, and cannot be used again.
    """

    def __init__(self, neighbors: Mapping[int, Neighbor], index: int) -> None:
        self.neighbors, self.index = neighbors, index
        self.failure: BaseException | None = None
        self._exchanges = 0

    def next_number(self) -> int:
        """The number of the next exchange, which is the same on all ranks; at least 1."""
        self._exchanges += 1
        return self._exchanges


class Exchange:
    """Sends a message to every other rank of a group, and receives one from each.

    Attributes:
        awaited: the group's rank for which this one waits, or to which an error belongs.

    Args:
        group: the ranks. Its backend matches messages by tag, and those with the same tag in their order.
        outgoing: by the group's rank, what it gets from this one.
        incoming: by the group's rank, where to put what comes from it; contiguous, in host memory. :meth:`run_in_tiles`
            does not use those of ranks whose messages are read.
        tag: of the messages.
        channel: the slots for messages that are read, the same on all ranks; ``None``: all are sent.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        outgoing: Sequence[Pieces],
        incoming: Sequence[Tensor],
        tag: int,
        channel: Channel | None = None,
    ) -> None:
        self._group, self._tag = group, tag
        self._outgoing, self._incoming = outgoing, incoming
        own, size = group.rank(), group.size()
        # Each rank begins with the one after it, so that not all ranks send to the same rank first.
        self._others = [(own + step) % size for step in range(1, size)]
        self._channel = channel or Channel({}, 0)
        self._neighbors, self._index = self._channel.neighbors, self._channel.index
        self._number = self._channel.next_number()
        self._works: list[tuple[int, dist.Work]] = []
        self._used: list[Tensor | NDArray[np.int64]] = []  # memory that others read, or that is sent
        self.awaited: int | None = None

    def run(self) -> None:
        """Exchanges the messages."""
        self.begin()
        self.finish()

    def begin(self) -> None:
        """Begins to send and to receive. Until the exchange has ended, nobody may touch or free the tensors."""
        strangers = [rank for rank in self._others if rank not in self._neighbors]
        for rank in strangers:
            self._send(rank, self._outgoing[rank].join())
        for rank in strangers:
            self._works.append((rank, self._receive(rank, self._incoming[rank])))

    def finish(self) -> None:
        """Waits until this rank has received all messages, and the others have received its own.

        Other exchanges of the channel must not run meanwhile.

        Raises:
            MismatchError: a rank offers a message of another size or tag.
            RuntimeError: the backend has failed, or an earlier exchange of the channel.
        """
        with self._using_channel():
            self._post()
            self._complete(self._incoming)

    def run_in_tiles(self, use: UseTile) -> None:
        """Exchanges messages of one length, and calls ``use`` for consecutive tiles of them.

        Args:
            use: takes the index of a tile's first element, the tile of the message from this rank to itself and, by the
                group's rank, those of the others' messages to it, which are valid until it returns. It should not
                raise: the channel could not be used again.

        Raises:
            MismatchError, RuntimeError: as :meth:`finish`. Some tiles may have been used then.
        """
        self.begin()
        own = self._outgoing[self._group.rank()]
        size = max(bytes_of_tile(own.nbytes) // own.dtype.itemsize, 1)
        tiles = own.split(size) or [own]  # messages without elements are opened, too
        with self._using_channel():
            self._post()
            for rank, work in self._works:
                self._finish(rank, work)
            self._works = []
            received = {rank: self._incoming[rank] for rank in self._others if rank not in self._neighbors}
            done = self._read_tiles(tiles, size, received, use)
            if done < len(tiles):  # a message cannot be read
                received |= {rank: torch.empty(own.numel, dtype=own.dtype, device="cpu") for rank in self._neighbors}
                self._used += received.values()
                self._complete(received)
            else:
                self._complete({})
            for index in range(done, len(tiles)):
                start, tile = index * size, tiles[index]
                others = {rank: whole[start : start + tile.numel] for rank, whole in received.items()}
                use(start, tile, others)

    def _read_tiles(self, tiles: Sequence[Pieces], size: int, received: Mapping[int, Tensor], use: UseTile) -> int:
        """Calls ``use`` for tiles, as long as the neighbors' messages can be read; returns the number of tiles used."""
        dtype, nbytes = tiles[0].dtype, sum(tile.nbytes for tile in tiles)
        posted = {rank: self._await(rank, nbytes) for rank in self._others if rank in self._neighbors}
        buffers = {rank: torch.empty(tiles[0].numel, dtype=dtype, device="cpu") for rank in posted}
        messages: dict[int, ops.RemoteMessage] = {}
        for index, tile in enumerate(tiles):
            start, others = index * size, {rank: buffer[: tile.numel] for rank, buffer in buffers.items()}
            try:
                messages = messages or {rank: self._open(rank, where) for rank, where in posted.items()}
                for rank, message in messages.items():
                    message.read(start * dtype.itemsize, others[rank])
            except OSError:
                return index
            others |= {rank: whole[start : start + tile.numel] for rank, whole in received.items()}
            use(start, tile, others)
        return len(tiles)

    def _post(self) -> None:
        """Offers the neighbors their messages."""
        for rank, neighbor in self._neighbors.items():
            slot = neighbor.slots[self._index]
            self._used.append(slot.write(self._outgoing[rank], self._tag))
            if slot.posted.announce(self._number):
                self._wake(rank)

    def _complete(self, incoming: Mapping[int, Tensor] | Sequence[Tensor]) -> None:
        """Reads the neighbors' messages, answers, and receives what could not be read; waits for the answers.

        Args:
            incoming: by the group's rank, where to put what comes from it; empty: all messages have been read.
        """
        # The other rank wakes this one, if it must, before it sends again what could not be read.
        neighbors = [rank for rank in self._others if rank in self._neighbors]
        refused = [rank for rank in neighbors if not self._answer(rank, incoming[rank] if incoming else None)]
        for rank, neighbor in self._neighbors.items():
            slot = neighbor.slots[self._index]
            self._wait(rank, slot.answered)
            if slot.refused:
                self._send(rank, self._outgoing[rank].join())
        received = [(rank, self._receive(rank, incoming[rank])) for rank in refused]
        for rank, work in (*self._works, *received):
            self._finish(rank, work)

    def _answer(self, rank: int, target: Tensor | None) -> bool:
        """Reads a neighbor's message to ``target``, if that is given, and answers; returns whether it was read."""
        slot = self._neighbors[rank].own_slots[self._index]
        slot.refused = False
        if target is not None:
            posted = self._await(rank, target.nbytes)
            try:
                self._open(rank, posted).read(0, target)
            except OSError:
                slot.refused = True
        if slot.answered.announce(self._number):
            self._wake(rank)
        return not slot.refused

    def _await(self, rank: int, nbytes: int) -> Posted:
        """Waits for a neighbor's message, which must have ``nbytes`` bytes; returns its place."""
        slot = self._neighbors[rank].own_slots[self._index]
        self._wait(rank, slot.posted)
        posted = slot.read()
        if posted.tag != self._tag:
            raise MismatchError
        if posted.nbytes != nbytes:
            raise MismatchError(f": {posted.nbytes} bytes where {nbytes} were expected")
        return posted

    def _open(self, rank: int, posted: Posted) -> ops.RemoteMessage:
        return ops.RemoteMessage(self._neighbors[rank].process, posted.table, posted.pieces, posted.nbytes)

    def _wait(self, rank: int, signal: ops.Signal) -> None:
        self.awaited = rank
        if not signal.wait(self._number, _PATIENCE) and signal.sleep(self._number):
            self._finish(rank, self._receive(rank, _byte()))

    def _wake(self, rank: int) -> None:
        """Wakes a rank that has fallen asleep in :meth:`_wait`."""
        self._send(rank, _byte())

    def _send(self, rank: int, message: Tensor) -> None:
        self.awaited = rank
        self._used.append(message)  # not every backend keeps it
        self._works.append((rank, self._group.send([message], rank, self._tag)))

    def _receive(self, rank: int, target: Tensor) -> dist.Work:
        self.awaited = rank
        return self._group.recv([target], rank, self._tag)

    def _finish(self, rank: int, work: dist.Work) -> None:
        self.awaited = rank
        work.wait()

    @contextmanager
    def _using_channel(self) -> Iterator[None]:
        """Ends the channel on an error in the exchange, and keeps the tensors: another rank may still read them."""
        if self._channel.failure is not None:
            raise RuntimeError(f"an exchange before it has failed: {self._channel.failure}")
        try:
            yield
        except BaseException as error:
            if self._neighbors:
                self._channel.failure = error
                _kept.append(self)
            raise


def _byte() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8, device="cpu")


_kept: list[Exchange] = []
