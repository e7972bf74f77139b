"""What ranks hold of the masters and the optimizer state, to be gathered or written in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint.lazy import LazyTensor
from lightning_zero.engine import Bucket, Engine
from lightning_zero.optim import ShardUpdater


class Slice(NamedTuple):
    """A run of a tensor's elements, in the order in which they lie in memory, and where it is in this rank's shard."""

    first: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class ShardedValues:
    """One value for every element of a bucket, of which each rank holds a shard: a :class:`Source`.

    Args:
        key: tells it from all others; the same on all ranks.
        bucket: whose elements.
        dtype: of the values.
        read: elements ``[start, stop)`` of this rank's shard, 1-D, on any device.
        whole: whether the live parameters are the values.
    """

    key: str
    bucket: Bucket
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]
    whole: bool = False

    def tensor(self, param: int) -> LazyTensor:
        """The values of parameter ``param``, not looked up yet."""
        parameter = self.bucket.parameters[param]
        if self.whole:
            return LazyTensor(self, param, parameter.detach())
        form = self.bucket.formats[param]
        like = torch.empty_strided(form.shape, form.strides, dtype=self.dtype, device="meta")
        return LazyTensor(self, param, like)

    def fetch(self, param: int) -> Tensor:
        """The values of parameter ``param``, whole: the live tensor if it has them, else a copy on the CPU.

        Collective, unless they are live.
        """
        if self.whole:
            return self.bucket.parameters[param].detach()
        return self.cut(self.gather(), param)

    def cut(self, full: Tensor, param: int) -> Tensor:
        """A copy of parameter ``param`` in what :meth:`gather` gave; on the CPU."""
        return self.bucket.view(full, param).to("cpu", copy=True)

    @torch.no_grad()
    def gather(self) -> Tensor:
        """All values, laid out as the flat buffer; 1-D, on the device. Collective."""
        return self.bucket.gather_full(self.read(0, self.bucket.layout.shard_numel))

    def parts(self, param: int) -> Iterator[Slice]:
        """What this rank is to write of parameter ``param``; replicas, which hold the same, share the work."""
        replica, numel = self.bucket.placement.mesh.replica, self.bucket.layout.shard_numel
        low, high = (numel * rank // replica.size for rank in (replica.rank, replica.rank + 1))
        for segment in self.bucket.segments:
            start, stop = max(segment.start, low), min(segment.stop, high)
            if segment.param == param and start < stop:
                yield Slice(segment.param_start + start - segment.start, start, stop)


def masters(engine: Engine) -> list[ShardedValues]:
    """The full-precision weights, bucket by bucket."""
    return [
        ShardedValues(
            f"engine {engine.number} bucket {number} weights",
            bucket,
            bucket.master.dtype,
            bucket.master.read,
            whole=not bucket.shards_params and bucket.master.dtype == bucket.dtype,
        )
        for number, bucket in enumerate(engine.buckets)
    ]


def state_values(engine: Engine, updater: ShardUpdater, bucket: Bucket, name: str, dtype: torch.dtype) -> ShardedValues:
    """The per-element optimizer state called ``name``, which this rank may not have."""
    owner = f"optimizer {engine.updaters.index(updater)} bucket {engine.buckets.index(bucket)}"

    def read(start: int, stop: int) -> Tensor:
        return updater.state_of(bucket).zeros(name, dtype)[start:stop]

    return ShardedValues(f"engine {engine.number} {owner} {name}", bucket, dtype, read)


def all_values(engine: Engine) -> dict[str, ShardedValues]:
    """All of them by key, the same on all ranks. Collective."""
    found = masters(engine)
    for updater in engine.updaters:
        assert isinstance(updater, ShardUpdater)
        for bucket, form in zip(engine.buckets, updater.describe_state(engine.buckets), strict=True):
            found += [state_values(engine, updater, bucket, name, dtype) for name, dtype in form.dtypes.items()]
    return {values.key: values for values in found}
