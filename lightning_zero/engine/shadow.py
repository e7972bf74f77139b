"""Second values of the weights and buffers that a rank owns, such as a moving average."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lightning_zero import ops
from lightning_zero.sharding.bucket import Bucket
from lightning_zero.sharding.bucket_map import BucketMap
from lightning_zero.storage import Lane, Memory, TensorStore, Ticket
from lightning_zero.storage.rested import pieces

# Takes the second values, which it may change in place, and the module's; returns the new second values.
Rule = Callable[[Tensor, Tensor], Tensor]

# Number of elements at a time: on a CPU they stay in its cache, on a GPU they are worth a kernel launch.
_HOST_PIECE, _DEVICE_PIECE = 1 << 17, 1 << 24


def follow(second: Tensor, live: Tensor) -> Tensor:
    """The rule by which second values are copies of the module's."""
    return live


class Shadow:
    """Second values of this rank's masters and of the module's buffers, initially copies of these.

    Nothing here communicates: each rank processes its own shards.

    Attributes:
        number: number among the engine's shadows, in the order in which they were made; the same on all ranks.
        swapped: whether the module currently has the second values, and the shadow the module's.

    Args:
        bucket_map: the buckets of the module.
        number: as above.
        store: store of the values; ``None``: the optimizer's store, and for buffers the device of the module's.
    """

    def __init__(self, bucket_map: BucketMap, number: int, store: TensorStore | None = None) -> None:
        self._map = bucket_map
        self.number = number
        self.swapped = False
        self._work: list[Ticket] = []  # tickets of work on second values that nobody has waited for
        self._store = store
        self._shards = [self._zeros_for(bucket) for bucket in bucket_map.buckets]
        self._buffers_memory: Memory = store.memory if store else "device"
        self._buffers: dict[str, Tensor] = {}
        self.update(follow)

    def _zeros_for(self, bucket: Bucket) -> Tensor:
        """Memory for the second values of a bucket's masters, pinned if they will be copied to another memory."""
        store = self._store or bucket.placement.optimizer_store
        crosses = store.memory != bucket.master.memory
        return store.zeros(bucket.layout.shard_numel, _dtype(bucket), crosses=crosses)

    def memory_of(self, bucket: Bucket) -> Memory:
        """The memory in which the second values of a bucket's masters rest."""
        return (self._store or bucket.placement.optimizer_store).memory

    @property
    def shards(self) -> list[Tensor]:
        """The second values by bucket: 1-D, Ψ/S, in the dtype of masters. Waits for their update."""
        for ticket in self._work:
            ticket.synchronize()
        self._work = []
        return self._shards

    def held(self) -> Iterator[tuple[Memory, Tensor]]:
        """Yields all tensors of second values, each with its memory, for their sizes: their update may be running."""
        for bucket, shard in zip(self._map.buckets, self._shards, strict=True):
            yield self.memory_of(bucket), shard
        for buffer in self._buffers.values():
            yield self._buffers_memory, buffer

    @property
    def buffers(self) -> dict[int, Tensor]:
        """The second values of the buffers, by id of the module's buffer."""
        return {id(live): second for live, second in self._pairs()}

    @torch.no_grad()
    def update(self, rule: Rule, buffer_rule: Rule | None = None) -> None:
        """Update the second values by a rule.

        Integers, such as indices and counts, are copied, since averages of them have no meaning. For masters in host
        memory this runs beside the training, after an update that may be running, unless the gathered parameters
        contain a part of the master. Reading the second values waits for it, and so does the next call.

        Args:
            rule: an element-wise function of two tensors of equal shape on the shadow's device, in its dtype; they may
                include padding.
            buffer_rule: the rule for buffers; ``None``: the same.
        """
        self._map.absorb_edits()
        self._work = [work for work in self._work if not work.done()]
        for bucket, shard in zip(self._map.buckets, self._shards, strict=True):
            job = partial(self._update_shard, bucket, shard, rule)
            lane, what = _lane(self.memory_of(bucket)), f"the second values of {bucket.name}"
            work = bucket.placement.executor.submit(job, lane, what, after=[bucket.moving, bucket.reading])
            bucket.reading = work
            if bucket.master.memory == "device" or (bucket.master.in_shard and not bucket.shards_params):
                work.synchronize()  # the training may change the master at any time
            else:
                self._work.append(work)
        if next(self._map.module.buffers(), None) is not None:
            job, executor = partial(self._update_buffers, buffer_rule or rule), self._map.placement.executor
            executor.submit(job, _lane(self._buffers_memory), "the second values of buffers").synchronize()

    def _update_shard(self, bucket: Bucket, shard: Tensor, rule: Rule) -> None:
        # A tile of a disk is read as a whole, whatever part of it is asked for.
        for low, high in pieces(bucket.placement.optimizer_store.tile or _piece(shard), 0, shard.numel()):
            live = bucket.master.read(low, high)
            for start, stop in pieces(_piece(shard), low, high):
                second = shard[start:stop]
                _apply(rule, second, self._taken(bucket, live[start - low : stop - low], second))

    def _update_buffers(self, rule: Rule) -> None:
        for live, second in self._pairs():
            _apply(rule, second, self._buffer_taken(live, second))

    def _taken(self, bucket: Bucket, live: Tensor, second: Tensor) -> Tensor:
        """Values of a master on the device of the second values: ``live`` itself, or a copy."""
        if live.device.type == second.device.type:
            return live
        copy = torch.empty_like(live, device=second.device)
        bucket.placement.copy(copy, live, (bucket.master.memory, self.memory_of(bucket)), bucket.name)
        return copy

    def _buffer_taken(self, live: Tensor, second: Tensor) -> Tensor:
        """A buffer of the module on the device of its second value: ``live`` itself, or a copy."""
        if live.device.type == second.device.type:
            return live.detach()
        copy = torch.empty_like(live, device=second.device)
        self._map.placement.copy(copy, live.detach(), ("device", self._buffers_memory), "a buffer")
        return copy

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the second values and the module's; gathered parameters are stale until the engine settles.

        Calling it twice restores the masters bit for bit, and the second values as far as masters can represent them: a
        split fp16 master rounds values outside fp16's range of normal numbers.
        """
        self._map.absorb_edits()
        for bucket, shard in zip(self._map.buckets, self._shards, strict=True):
            bucket.await_moves()  # this includes updates of the second values, which read the master
            tiles = [*pieces(bucket.master.tile, 0, shard.numel())]
            for number, (low, high) in enumerate(tiles):
                for coming in tiles[number : number + 2]:  # the next one is fetched meanwhile
                    bucket.master.expect(*coming, complete=True)
                for start, stop in pieces(_piece(shard), low, high):
                    self._exchange(bucket, start, shard[start:stop])
                bucket.publish(low, high)
                bucket.master.commit(low, high)
            bucket.mark_updated(range(len(bucket.parameters)))
        for live, second in self._pairs():
            before = self._buffer_taken(live, second)
            before = before.clone() if before.data_ptr() == live.data_ptr() else before
            self._map.placement.copy(live.detach(), second, (self._buffers_memory, "device"), "a buffer")
            second.copy_(before)
        self.swapped = not self.swapped

    def _exchange(self, bucket: Bucket, start: int, second: Tensor) -> None:
        """Exchange second values and those of the master from ``start`` on."""
        live = bucket.master.read(start, start + second.numel())
        before = self._taken(bucket, live, second)
        before = before.clone() if before is live else before
        bucket.placement.copy(live, second, (self.memory_of(bucket), bucket.master.memory), bucket.name)
        bucket.master.keep(start, live)
        second.copy_(before)

    def load(self, bucket: Bucket, index: int, values: Tensor) -> None:
        """Overwrite this rank's second values of parameter ``index`` of ``bucket`` from full values of its shape."""
        shard = self.shards[self._map.buckets.index(bucket)]
        for segment in bucket.segments:
            if segment.param == index:
                bucket.formats[index].read(values, segment.param_start, shard[segment.start : segment.stop])

    def release(self) -> None:
        """Free all second values."""
        self._work, self._shards, self._buffers = [], [], {}

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The module's buffers with their second values; a new buffer, or one of another shape, gets a copy."""
        for name, live in self._map.module.named_buffers():
            if name not in self._buffers or self._buffers[name].shape != live.shape:
                device = self._store.device if self._store else live.device
                with torch.inference_mode(False):  # updates follow outside of the validation that may run now
                    second = torch.empty_like(live, device=device)
                    second.copy_(self._buffer_taken(live, second))
                self._buffers[name] = second
            yield live, self._buffers[name]


def _piece(shard: Tensor) -> int:
    """The number of elements of a bucket's second values that are computed at a time."""
    return _HOST_PIECE if ops.runs_on(shard.device) else _DEVICE_PIECE


def _lane(memory: Memory) -> Lane:
    return Lane.HOST if memory == "host" else Lane.COMPUTE


def _apply(rule: Rule, second: Tensor, live: Tensor) -> None:
    averaged = second.is_floating_point() or second.is_complex()
    second.copy_((rule if averaged else follow)(second, live.to(second)))


def _dtype(bucket: Bucket) -> torch.dtype:
    """The dtype of the bucket's master, or of the one that it will have when an optimizer gets its parameters."""
    return bucket.placement.master(bucket.dtype, bucket.dtype, optimized=True).dtype
