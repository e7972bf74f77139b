"""What ranks hold of the masters and the optimizer state, to be gathered, or written in parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.archive import TILE, tiles
from lightning_zero.checkpoint.errors import CheckpointError
from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.engine import Bucket, Engine, Shadow
from lightning_zero.optim import ShardUpdater


class Key(NamedTuple):
    """Names one value per element of a bucket, on all ranks alike: its masters, a shadow's, or an optimizer's state."""

    engine: int
    bucket: int
    dtype: torch.dtype
    optimizer: int | None = None
    state: str = ""
    shadow: int | None = None


class Slice(NamedTuple):
    """A run of a tensor's elements, in the order in which they lie in memory, and where it is in this rank's shard."""

    first: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class ShardedValues:
    """One value for every element of a bucket, of which each rank holds a shard: a source of lazy tensors."""

    engine: Engine
    key: Key

    @property
    def bucket(self) -> Bucket:
        return self.engine.buckets[self.key.bucket]

    @property
    def live(self) -> bool:
        """Whether parameters that are whole on every rank are the values."""
        weights = self.key.optimizer is None and self.key.shadow is None
        return weights and not self.bucket.shards_params and self.bucket.dtype == self.key.dtype

    def tensor(self, param: int) -> LazyTensor:
        """The values of parameter ``param``, not looked up yet."""
        if self.live:
            return LazyTensor(self, param, self.bucket.parameters[param].detach())
        form = self.bucket.formats[param]
        return LazyTensor(
            self, param, torch.empty_strided(form.shape, form.strides, dtype=self.key.dtype, device="meta")
        )

    def fetch(self, param: int) -> Tensor:
        """The values of parameter ``param``, whole: the live tensor, or a copy on the CPU. Collective unless live."""
        if self.live:
            return self.bucket.parameters[param].detach()
        full = follow_first(self.engine, self.key)
        assert full is not None
        return self.cut(full, param)

    def cut(self, full: Tensor, param: int) -> Tensor:
        """A copy of parameter ``param`` in what :meth:`gather` gave; on the CPU."""
        return self.bucket.view(full, param).to("cpu", copy=True)

    @torch.no_grad()
    def gather(self) -> Tensor:
        """All values, laid out as the flat buffer; 1-D, on the device. Collective."""
        return self.bucket.gather_full(self.read(0, self.bucket.layout.shard_numel))

    def read(self, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` of this rank's shard, 1-D."""
        if self.live:
            return self.bucket.shard[start:stop]  # with what a hook has changed in the parameters
        if self.key.shadow is not None:
            return self.engine.shadows[self.key.shadow].shards[self.key.bucket][start:stop]
        if self.key.optimizer is None:
            return self.bucket.master.read(start, stop)
        updater = self.engine.updaters[self.key.optimizer]
        assert isinstance(updater, ShardUpdater)
        return updater.state_of(self.bucket).zeros(self.key.state, self.key.dtype)[start:stop]

    def tiles(self, start: int, stop: int) -> Iterator[Tensor]:
        """As :meth:`read`, a tile at a time."""
        for low, high in tiles(start, stop, TILE // self.key.dtype.itemsize):
            yield self.read(low, high)

    def slices(self, param: int) -> Iterator[Slice]:
        """What this rank is to write of parameter ``param``; replicas, which hold the same, share the work."""
        replica, numel = self.bucket.placement.mesh.replica, self.bucket.layout.shard_numel
        low, high = (numel * rank // replica.size for rank in (replica.rank, replica.rank + 1))
        for segment in self.bucket.segments:
            start, stop = max(segment.start, low), min(segment.stop, high)
            if segment.param == param and start < stop:
                yield Slice(segment.param_start + start - segment.start, start, stop)


def source_of(tensor: LazyTensor, engine: Engine | None) -> ShardedValues:
    """Where the values of a tensor in a checkpoint of ``engine`` come from.

    Raises:
        ValueError: from elsewhere.
    """
    source = tensor.source
    if not isinstance(source, ShardedValues) or source.engine is not engine:
        raise ValueError(f"{tensor} belongs to another Trainer's strategy; put a clone into the checkpoint")
    return source


def masters(engine: Engine, shadow: Shadow | None = None) -> list[ShardedValues]:
    """The full-precision weights, bucket by bucket, or what a shadow of the engine has in their place."""
    if shadow is None:
        keys = [Key(engine.number, number, bucket.master.dtype) for number, bucket in enumerate(engine.buckets)]
    else:
        shards = enumerate(shadow.shards)
        keys = [Key(engine.number, number, shard.dtype, shadow=shadow.number) for number, shard in shards]
    return [ShardedValues(engine, key) for key in keys]


def follow_first(engine: Engine, wanted: Key | None = None) -> Tensor | None:
    """Gather what rank 0 reads of a checkpoint, until it reads what this rank wants, too. Collective.

    Hooks that add to a checkpoint may run on rank 0 alone. The other ranks wait for it before they write, and gather
    meanwhile what it asks for.

    Args:
        engine: holds the values.
        wanted: what to return, gathered; ``None``: rank 0 reads no more, the checkpoint is to be written.

    Raises:
        CheckpointError: on all ranks, where another rank reads what rank 0 does not.
    """
    while True:
        intents = engine.placement.mesh.world.all_gather_object(wanted, "read a checkpoint")
        first = intents[0]
        if first is None:
            if others := [rank for rank, key in enumerate(intents) if key is not None]:
                raise CheckpointError(
                    f"rank {others[0]} reads sharded values of the checkpoint, {intents[others[0]]}, which rank 0 does "
                    "not: read them on rank 0 alone, or on all ranks in one order. See `on_save_checkpoint`"
                )
            return None
        full = ShardedValues(engine, first).gather()
        if first == wanted:
            return full
