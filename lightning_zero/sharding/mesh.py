"""The world as shard groups x replica groups of ranks."""

from __future__ import annotations

import atexit
import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor

from lightning_zero import ops
from lightning_zero.limits import process_name
from lightning_zero.sharding.board import Board
from lightning_zero.sharding.collective_errors import CollectiveError, disagreement
from lightning_zero.sharding.collectives import CHANNELS, Group
from lightning_zero.sharding.cross_memory import Neighbor, SlotBoard
from lightning_zero.sharding.gloo_exit import wait_for_gloo
from lightning_zero.storage import Executor, Lane, Ticket
from lightning_zero.storage.timers import Timers
from lightning_zero.torch_private import default_store

_GROUPS = 3  # of a mesh

atexit.register(wait_for_gloo)


@dataclass(frozen=True)
class Mesh:
    """The world as shard groups of S ranks x replica groups of R ranks.

    Ranks ``[i * S, (i + 1) * S)`` form a shard group; ranks that own the same shard form a replica group.

    Attributes:
        world: the group of all ranks.
        shard: this rank's shard group.
        replica: this rank's replica group.
        timers: measure this rank's work between collectives, and its waits for them.
        board: notes of all ranks, which explain errors.
        engine_numbers: numbers the engines of this mesh, alike on all ranks, and gives no number twice.
    """

    world: Group
    shard: Group
    replica: Group
    timers: Timers = field(default_factory=Timers)
    board: Board = field(default_factory=Board)
    engine_numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        for group in (self.world, self.shard, self.replica):
            group.timers, group.board = self.timers, self.board

    def check(self, enabled: bool) -> None:
        """Turn the comparison of the ranks before each collective on or off. The same call on all ranks."""
        for group in (self.world, self.shard, self.replica):
            group.checked = enabled

    def note(self, what: str) -> None:
        """See :meth:`Group.note`."""
        for group in (self.world, self.shard, self.replica):
            group.note(what)

    def before_next(self, act: Callable[[], None] | None) -> None:
        """Let ``act`` run before the next collective of any group, or nothing (``None``). ``act`` must reset this."""
        for group in (self.world, self.shard, self.replica):
            group.before = act

    def issue_preceding(self) -> None:
        """Issue what must precede a collective on all ranks, or wait until a lane has issued it. Collective.

        The mesh's groups do so themselves. Call it before a collective of code that does not use them, and before the
        digests are read.
        """
        for group in (self.world, self.shard, self.replica):
            group.issue_preceding()

    def submit(
        self, executor: Executor, job: Callable[[], object], lane: Lane, what: str, after: Sequence[Ticket] = ()
    ) -> Ticket:
        """Submit a job with collectives to a lane of communication.

        Its collectives are issued after those that the training thread has issued, and before its next ones.

        Args:
            executor: the executor with the lane.
            job: issues the collectives.
            lane: ``COMM``, ``GATHER`` or ``REDUCE``.
            what: description for messages and traces.
            after: tickets of work that must end before the job begins.

        Returns:
            The ticket of the job.
        """
        if self.world.before is not None:
            self.world.before()  # gathers that were deferred: other ranks may have issued them already
        ticket = executor.submit(job, lane, what, after)
        if lane is Lane.COMM:  # a thread issues them
            for group in (self.world, self.shard, self.replica):
                group.issuing = ticket
        return ticket

    def position(self) -> str | None:
        """The position in the order of collectives, the same on all ranks that have issued the same ones.

        Returns:
            ``None`` while a lane has collectives to issue.

        Raises:
            Exception: a lane's work has failed.
        """
        groups = (self.world, self.shard, self.replica)
        return " ".join(f"{group.digest:08x}" for group in groups) if all(g.issuing.done() for g in groups) else None

    def digests(self) -> Tensor:
        """This rank's digests of its shard and replica groups, and zeros for other ranks: [2 * world size] float64.

        A collective that a lane is still to issue on some ranks, and has issued on others, is issued first.

        The sum over the world is the argument of :meth:`check_digests`.
        """
        self.issue_preceding()
        values = torch.zeros(self.world.size, 2, dtype=torch.float64, device="cpu")
        own = [self.shard.digest, self.replica.digest]
        values[self.world.rank] = torch.tensor(own, dtype=torch.float64, device="cpu")
        return values.view(-1)

    def check_digests(self, digests: Sequence[float]) -> None:
        """Check that the ranks of each group have issued the same collectives. Collective only if they have not.

        Args:
            digests: the sum of :meth:`digests` over the world.

        Raises:
            CollectiveError: they have not; raised on all ranks, and lists the last collectives of each rank.
        """
        shard, replica = digests[::2], digests[1::2]
        size = self.shard.size
        same = all(shard[rank] == shard[rank - rank % size] for rank in range(self.world.size))
        same &= all(replica[rank] == replica[rank % size] for rank in range(self.world.size))
        if not same:
            own = ", ".join([*self.shard.recent, *(self.replica.recent if self.replica is not self.shard else ())])
            wants = self.world.all_gather_object(own, "compare what ranks did")
            raise CollectiveError(disagreement(dict(enumerate(wants)), self.board))

    @classmethod
    def single(cls) -> Mesh:
        """A mesh of one process, without communication."""
        return cls(Group(), Group(), Group())

    @classmethod
    def imagined(cls, shard_size: int, replicas: int = 1, rank: int = 0) -> Mesh:
        """A mesh of S x R ranks for planning, as seen by ``rank`` of the world; it cannot communicate."""
        world = Group.imagined(shard_size * replicas, rank)
        return cls(world, Group.imagined(shard_size, rank % shard_size), Group.imagined(replicas, rank // shard_size))

    @classmethod
    def create(cls, shard_size: int | None = None, timeout: timedelta | None = None) -> Mesh:
        """Create process groups from the initialized default group. Collective.

        Args:
            shard_size: S; ``None`` shards over the whole world, 1 replicates everything (stage 0).
            timeout: time after which a collective fails if some rank does not join it.

        Raises:
            ValueError: ``shard_size`` does not divide the world size.
        """
        world_size = torch.distributed.get_world_size()
        size = world_size if shard_size is None else shard_size
        if size < 1 or world_size % size:
            raise ValueError(
                f"shard_size={shard_size} does not divide the world size {world_size}; "
                f"choose one of {[n for n in range(1, world_size + 1) if world_size % n == 0]}"
            )
        shards = [list(range(first, first + size)) for first in range(0, world_size, size)]
        replicas = [list(range(first, world_size, size)) for first in range(size)]
        world = Group.create([list(range(world_size))], timeout)
        shard = world if size == world_size else Group.create(shards, timeout)
        replica = world if size == 1 else Group.create(replicas, timeout)
        board, neighbors = _introduce(world)
        for number, group in enumerate((world, shard, replica)):
            group.meet(neighbors, range(number * CHANNELS, (number + 1) * CHANNELS))
        return cls(world, shard, replica, board=board)


def _introduce(world: Group) -> tuple[Board, dict[int, Neighbor]]:
    """Let the ranks learn about each other. Collective.

    Returns:
        The board of a mesh, named after the process group, whose name is the same on all ranks, and the ranks with
        which this one can exchange messages by reading each other's memory.
    """
    if world.process_group is None:
        return Board(), {}
    slots, own_host = _make_slots(world), socket.gethostname()
    ranks = world.all_gather_object((own_host, process_name(), slots and slots.offer()), "name the nodes")
    hosts, processes, offers = zip(*ranks, strict=True)
    board = Board(world.rank, world.size, default_store(), world.process_group.group_name, hosts, processes)
    of_node = [offer if host == own_host else None for host, offer in zip(hosts, offers, strict=True)]
    found = {} if slots is None else slots.find_neighbors(processes, of_node, world.rank)
    finders = world.all_gather_object([*found], "say whose memory can be read")
    if slots is not None:
        slots.close()
    return board, {rank: neighbor for rank, neighbor in found.items() if world.rank in finders[rank]}


def _make_slots(world: Group) -> SlotBoard | None:
    """The slots for messages that are read; ``None`` where there are no such messages, or the system refuses it."""
    if not world.exchanges_messages or ops.cma_refusal():
        return None
    try:
        return SlotBoard(world.size, _GROUPS * CHANNELS)
    except OSError:
        return None
