"""A second value of everything that a rank owns, such as a moving average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lightning_zero.engine.bucket import Bucket
from lightning_zero.engine.bucket_map import BucketMap
from lightning_zero.engine.stores import Store

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
        shards: by bucket; 1-D, Ψ/S, in the dtype that masters have.
        swapped: whether the module has the second values now, and the shadow the module's.

    Args:
        bucket_map: of the module.
        number: as above.
        store: where the values rest; ``None``: where optimizer state does, and buffers where the module has them.
    """

    def __init__(self, bucket_map: BucketMap, number: int, store: Store | None = None) -> None:
        self._map = bucket_map
        self.number = number
        self.swapped = False
        self.shards = [
            (store or bucket.placement.optimizer_store).zeros(bucket.layout.shard_numel, _dtype(bucket))
            for bucket in bucket_map.buckets
        ]
        self._store = store
        self._buffers: dict[str, Tensor] = {}
        self.update(follow)

    @property
    def buffers(self) -> dict[int, Tensor]:
        """The second values of the buffers, by id of the module's."""
        return {id(live): second for live, second in self._pairs()}

    @torch.no_grad()
    def update(self, rule: Rule, buffer_rule: Rule | None = None) -> None:
        """Second values become what a rule makes of them and the module's; padding may be among them.

        Integers, such as indices and counts, are copied: what lies between two of them means nothing.

        Args:
            rule: element by element; of tensors of one shape, both on the shadow's device and in its dtype.
            buffer_rule: for buffers; ``None``: the same.
        """
        self._map.absorb_edits()
        for bucket, second, start, stop in self._tiles():
            _apply(rule, second, bucket.master.read(start, stop))
        for live, second in self._pairs():
            _apply(buffer_rule or rule, second, live.detach())

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange second values and the module's. Parameters elsewhere are out of date until the engine settles.

        Twice, it restores all that masters have held, to the bit. The second values come back as masters can hold
        them: a split master of fp16 rounds what is not in fp16's range of normal numbers.
        """
        self._map.absorb_edits()
        for bucket, second, start, stop in self._tiles():
            live = bucket.master.read(start, stop)
            before = live.to(second.device, copy=True)
            bucket.master.keep(start, live.copy_(second))
            second.copy_(before)
        for bucket in self._map.buckets:
            bucket.publish(0, bucket.layout.shard_numel)
            bucket.mark_updated(range(len(bucket.parameters)))
        for live, second in self._pairs():
            before = live.detach().to(second.device, copy=True)
            live.detach().copy_(second)
            second.copy_(before)
        self.swapped = not self.swapped

    def load(self, bucket: Bucket, index: int, values: Tensor) -> None:
        """Overwrite the second values of parameter ``index`` of ``bucket`` from whole ones of its shape."""
        shard = self.shards[self._map.buckets.index(bucket)]
        for segment in bucket.segments:
            if segment.param == index:
                bucket.formats[index].read(values, segment.param_start, shard[segment.start : segment.stop])

    def release(self) -> None:
        """Free everything."""
        self.shards, self._buffers = [], {}

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The module's buffers with their second values; one that is new, or has another shape, begins as a copy."""
        for name, live in self._map.module.named_buffers():
            if name not in self._buffers or self._buffers[name].shape != live.shape:
                device = self._store.device if self._store else live.device
                self._buffers[name] = live.detach().to(device, copy=True)
            yield live, self._buffers[name]

    def _tiles(self) -> Iterator[tuple[Bucket, Tensor, int, int]]:
        """Pieces of the second values, with the bucket and the range of its shard that they belong to."""
        for bucket, shard in zip(self._map.buckets, self.shards, strict=True):
            tile = _HOST_TILE if shard.device.type == "cpu" else _DEVICE_TILE
            for start in range(0, shard.numel(), tile):
                stop = min(start + tile, shard.numel())
                yield bucket, shard[start:stop], start, stop


def _apply(rule: Rule, second: Tensor, live: Tensor) -> None:
    averaged = second.is_floating_point() or second.is_complex()
    second.copy_((rule if averaged else follow)(second, live.to(second)))


def _dtype(bucket: Bucket) -> torch.dtype:
    """Of the master, also of one that the bucket will only have when an optimizer takes its parameters."""
    return bucket.placement.master(bucket.dtype, bucket.dtype, optimized=True).dtype
