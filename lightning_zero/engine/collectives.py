"""The only module that calls ``torch.distributed``.

A :class:`Mesh` arranges the world as shard groups x replica groups, each a process group of the package's own, so that
its collectives never interleave with Lightning's. Sums on CPU run in rank order (an all-to-all and a local sum): the
result is the same on every rank and in every run, equal bit for bit to one process that adds the ranks' values in
order, and faster than gloo's own reduce-scatter. Bytes are counted where they are sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the flat collectives; 2.10 to 2.12 have the old names only.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Group:
    """A set of ranks that communicate; a group of one rank needs no process group and sends nothing.

    Attributes:
        size: number of ranks.
        rank: this process's rank inside the group.
        sent: bytes that this rank has sent, by collective, for a ring or direct exchange.
        calls: number of collectives issued, by collective.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.size = process_group.size() if process_group is not None else 1
        self.rank = process_group.rank() if process_group is not None else 0
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def _count(self, name: str, nbytes: float) -> None:
        self.calls[name] += 1
        self.sent[name] += int(nbytes)

    def reset_counters(self) -> None:
        self.sent.clear()
        self.calls.clear()

    def all_gather_(self, flat: Tensor) -> None:
        """Fill ``flat`` (1-D, a multiple of ``size``) from every rank's own slice of it, in place."""
        if self.size == 1:
            return
        data = flat.view(torch.uint8)  # backends do not know every dtype
        shard = data.chunk(self.size)[self.rank]
        _all_gather_flat(data, shard, group=self.process_group)
        self._count("all_gather", (self.size - 1) * shard.nbytes)

    def reduce_scatter(self, flat: Tensor) -> Tensor:
        """Sum ``flat`` (1-D, a multiple of ``size``) over the ranks and return this rank's slice of the sum.

        The result has the dtype of ``flat``; on CPU 16-bit values are added in fp32 and rounded once. ``flat`` may be
        overwritten, and the result may share its memory.
        """
        if self.size == 1:
            return flat
        self._count("reduce_scatter", flat.nbytes * (self.size - 1) / self.size)
        if flat.device.type == "cpu":
            return self._rank_ordered_sum(flat)
        out = flat.new_empty(flat.numel() // self.size)
        _reduce_scatter_flat(out, flat, group=self.process_group)
        return out

    def _rank_ordered_sum(self, flat: Tensor) -> Tensor:
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat, group=self.process_group)
        first, *others = received.chunk(self.size)
        total = first.float() if first.dtype.itemsize < 4 else first
        for other in others:
            total += other
        # A view of one slice would keep all S slices alive for as long as the gradient is.
        return total.to(first.dtype) if total.dtype != first.dtype else total.clone()

    def all_reduce_(self, flat: Tensor) -> Tensor:
        """Sum ``flat`` (1-D) over the ranks, in place; every rank gets the same bits."""
        if self.size == 1:
            return flat
        if flat.device.type != "cpu":
            dist.all_reduce(flat, group=self.process_group)
            self._count("all_reduce", 2 * flat.nbytes * (self.size - 1) / self.size)
            return flat
        padding = -flat.numel() % self.size
        padded = torch.nn.functional.pad(flat, (0, padding)) if padding else flat
        slices = padded.chunk(self.size)
        slices[self.rank].copy_(self._rank_ordered_sum(padded))
        _all_gather_flat(padded, slices[self.rank], group=self.process_group)
        self._count("all_reduce", 2 * padded.nbytes * (self.size - 1) / self.size)
        if padding:
            flat.copy_(padded[: flat.numel()])
        return flat

    def broadcast_(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite ``tensor`` (contiguous) with that of the group's rank ``src``."""
        if self.size > 1 and tensor.numel():
            dist.broadcast(tensor.view(-1).view(torch.uint8), group=self.process_group, group_src=src)
            self._count("broadcast", tensor.nbytes if self.rank == src else 0)
        return tensor

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's small picklable ``value``, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        return values


@dataclass(frozen=True)
class Mesh:
    """The world as shard groups of S ranks x replica groups of R ranks.

    Ranks ``[i * S, (i + 1) * S)`` form a shard group; ranks that own the same shard form a replica group.
    """

    world: Group
    shard: Group
    replica: Group

    @classmethod
    def single(cls) -> Mesh:
        """One process, no communication."""
        return cls(Group(), Group(), Group())

    @classmethod
    def create(cls, shard_size: int | None = None, timeout: timedelta | None = None) -> Mesh:
        """Process groups for the initialized default group; a collective call: all ranks must make it.

        Args:
            shard_size: S; ``None`` shards over the whole world, 1 replicates everything (stage 0).
            timeout: after which a collective that some rank never joins fails.

        Raises:
            ValueError: where ``shard_size`` does not divide the world size.
        """
        world_size, rank = dist.get_world_size(), dist.get_rank()
        size = world_size if shard_size is None else shard_size
        if size < 1 or world_size % size:
            raise ValueError(
                f"shard_size={shard_size} does not divide the world size {world_size}; "
                f"choose one of {[n for n in range(1, world_size + 1) if world_size % n == 0]}"
            )
        shards = [list(range(first, first + size)) for first in range(0, world_size, size)]
        replicas = [list(range(first, world_size, size)) for first in range(size)]
        world = _new_groups([list(range(world_size))], rank, timeout)
        shard = world if size == world_size else _new_groups(shards, rank, timeout)
        replica = world if size == 1 else _new_groups(replicas, rank, timeout)
        return cls(world, shard, replica)


def _new_groups(partition: Sequence[list[int]], rank: int, timeout: timedelta | None) -> Group:
    """Create one process group per list, in the same order on all ranks, and return the one that holds ``rank``."""
    if len(partition[0]) == 1:
        return Group()
    groups = [(ranks, dist.new_group(ranks, timeout=timeout)) for ranks in partition]
    return next(Group(group) for ranks, group in groups if rank in ranks)
