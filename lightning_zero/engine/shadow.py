"""A second value of everything that a rank owns, such as a moving average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lightning_zero import ops
from lightning_zero.sharding.bucket import Bucket
from lightning_zero.sharding.bucket_map import BucketMap
from lightning_zero.storage import Lane, Memory, TensorStore, Ticket

# The second values, which it may change in place, and the module's: what the second ones become.
Rule = Callable[[Tensor, Tensor], Tensor]

# Elements at a time: those of a CPU stay in its cache, those of a GPU are worth a launch.
_HOST_TILE, _DEVICE_TILE = 1 << 17, 1 << 24


def follow(second: Tensor, live: Tensor) -> Tensor:
    """The rule by which second values are copies."""
    return live


class Shadow:
    """Second values of this rank's masters and of the module's buffers. They begin as copies.

    Nothing here communicates: every rank treats what it owns.

    Attributes:
        number: of the engine's shadows, in the order of their making: the same on all ranks.
        swapped: whether the module has the second values now, and the shadow the module's.

    Args:
        bucket_map: of the module.
        number: as above.
        store: where the values rest; ``None``: where optimizer state does, and buffers where the module has them.
    """

    def __init__(self, bucket_map: BucketMap, number: int, store: TensorStore | None = None) -> None:
        self._map = bucket_map
        self.number = number
        self.swapped = False
        self._work: list[Ticket] = []  # on second values, for which nobody has waited
        self._store = store
        self._shards = [self._zeros_for(bucket) for bucket in bucket_map.buckets]
        self._buffers_memory: Memory = store.memory if store else "device"
        self._buffers: dict[str, Tensor] = {}
        self.update(follow)

    def _zeros_for(self, bucket: Bucket) -> Tensor:
        """Room for the second values of a bucket's masters, which swap with these wherever they are."""
        store = self._store or bucket.placement.optimizer_store
        crosses = store.memory != bucket.master.memory
        return store.zeros(bucket.layout.shard_numel, _dtype(bucket), crosses=crosses)

    def memory_of(self, bucket: Bucket) -> Memory:
        """The memory in which the second values of a bucket's masters rest."""
        return (self._store or bucket.placement.optimizer_store).memory

    @property
    def shards(self) -> list[Tensor]:
        """The second values by bucket; 1-D, Ψ/S, in the dtype that masters have. Waits for their update."""
        for ticket in self._work:
            ticket.synchronize()
        self._work = []
        return self._shards

    @property
    def buffers(self) -> dict[int, Tensor]:
        """The second values of the buffers, by id of the module's."""
        return {id(live): second for live, second in self._pairs()}

    @torch.no_grad()
    def update(self, rule: Rule, buffer_rule: Rule | None = None) -> None:
        """Second values become what a rule makes of them and the module's; padding may be among them.

        Integers, such as indices and counts, are copied: what lies between two of them means nothing. Of masters in
        host memory it goes on beside the training, after the update that may be under way, unless a part of them is in
        the gathered parameters. Whoever asks for the second values waits for it, and the next call comes after it.

        Args:
            rule: element by element; of tensors of one shape, both on the shadow's device and in its dtype.
            buffer_rule: for buffers; ``None``: the same.
        """
        self._map.absorb_edits()
        self._work = [work for work in self._work if not work.done()]
        for bucket, shard in zip(self._map.buckets, self._shards, strict=True):
            job = partial(self._update_shard, bucket, shard, rule)
            lane, what = _lane(self.memory_of(bucket)), f"the second values of {bucket.name}"
            work = bucket.placement.executor.submit(job, lane, what, after=[bucket.moving, bucket.reading])
            bucket.reading = work
            if bucket.master.memory == "device" or (bucket.master.in_shard and not bucket.shards_params):
                work.synchronize()  # what trains may write to it at any time
            else:
                self._work.append(work)
        if next(self._map.module.buffers(), None) is not None:
            job, executor = partial(self._update_buffers, buffer_rule or rule), self._map.placement.executor
            executor.submit(job, _lane(self._buffers_memory), "the second values of buffers").synchronize()

    def _update_shard(self, bucket: Bucket, shard: Tensor, rule: Rule) -> None:
        for second, start, stop in _tiles(shard):
            _apply(rule, second, self._taken(bucket, bucket.master.read(start, stop), second))

    def _update_buffers(self, rule: Rule) -> None:
        for live, second in self._pairs():
            _apply(rule, second, self._buffer_taken(live, second))

    def _taken(self, bucket: Bucket, live: Tensor, second: Tensor) -> Tensor:
        """Values of a master, to be read where the second ones are."""
        if live.device.type == second.device.type:
            return live
        copy = torch.empty_like(live, device=second.device)
        bucket.placement.copy(copy, live, (bucket.master.memory, self.memory_of(bucket)), bucket.name)
        return copy

    def _buffer_taken(self, live: Tensor, second: Tensor) -> Tensor:
        """A buffer of the module, to be read where its second value is."""
        if live.device.type == second.device.type:
            return live.detach()
        copy = torch.empty_like(live, device=second.device)
        self._map.placement.copy(copy, live.detach(), ("device", self._buffers_memory), "a buffer")
        return copy

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange second values and the module's. Parameters elsewhere are out of date until the engine settles.

        Twice, it restores all that masters have held, to the bit. The second values come back as masters can hold
        them: a split master of fp16 rounds what is not in fp16's range of normal numbers.
        """
        self._map.absorb_edits()
        for bucket, shard in zip(self._map.buckets, self._shards, strict=True):
            bucket.await_moves()  # and for what is under way on its second values, which reads its master
            memories = self.memory_of(bucket), bucket.master.memory
            for second, start, stop in _tiles(shard):
                live = bucket.master.read(start, stop)
                before = self._taken(bucket, live, second)
                before = before.clone() if before is live else before
                bucket.placement.copy(live, second, memories, bucket.name)
                bucket.master.keep(start, live)
                second.copy_(before)
        for bucket in self._map.buckets:
            bucket.publish(0, bucket.layout.shard_numel)
            bucket.mark_updated(range(len(bucket.parameters)))
        for live, second in self._pairs():
            before = self._buffer_taken(live, second)
            before = before.clone() if before.data_ptr() == live.data_ptr() else before
            self._map.placement.copy(live.detach(), second, (self._buffers_memory, "device"), "a buffer")
            second.copy_(before)
        self.swapped = not self.swapped

    def load(self, bucket: Bucket, index: int, values: Tensor) -> None:
        """Overwrite the second values of parameter ``index`` of ``bucket`` from full ones of its shape."""
        shard = self.shards[self._map.buckets.index(bucket)]
        for segment in bucket.segments:
            if segment.param == index:
                bucket.formats[index].read(values, segment.param_start, shard[segment.start : segment.stop])

    def release(self) -> None:
        """Free everything."""
        self._work, self._shards, self._buffers = [], [], {}

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The module's buffers with their second values; one that is new, or has another shape, begins as a copy."""
        for name, live in self._map.module.named_buffers():
            if name not in self._buffers or self._buffers[name].shape != live.shape:
                device = self._store.device if self._store else live.device
                self._buffers[name] = live.detach().to(device, copy=True)
            yield live, self._buffers[name]


def _tiles(shard: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    """Pieces of the second values of a bucket, with the range of its shard that they belong to."""
    tile = _HOST_TILE if ops.runs_on(shard.device) else _DEVICE_TILE
    for start in range(0, shard.numel(), tile):
        stop = min(start + tile, shard.numel())
        yield shard[start:stop], start, stop


def _lane(memory: Memory) -> Lane:
    return Lane.HOST if memory == "host" else Lane.COMPUTE


def _apply(rule: Rule, second: Tensor, live: Tensor) -> None:
    averaged = second.is_floating_point() or second.is_complex()
    second.copy_((rule if averaged else follow)(second, live.to(second)))


def _dtype(bucket: Bucket) -> torch.dtype:
    """The dtype of the master, also of one that the bucket will only have when an optimizer takes its parameters."""
    return bucket.placement.master(bucket.dtype, bucket.dtype, optimized=True).dtype
