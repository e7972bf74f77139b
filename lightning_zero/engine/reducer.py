"""When buckets are reduced: in one order on all ranks, whichever parameters each of them used.

Stages 0-2 reduce in reverse module order, each bucket as soon as it and all before it have all their gradients. Stage 3
cannot: a rank that uses all parameters of a unit would reduce it before the next unit is gathered, one that does not
would do so after. There a unit is reduced when all its backward has run, an event that comes on every rank between the
same two gathers. What is left is reduced by the flush.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from lightning_zero.engine.bucket import Bucket
from lightning_zero.engine.policies import ShardingPolicy


class Reducer:
    """Launches the reduction of buckets during and after backward.

    Args:
        buckets: in forward order.
        sharding: whether gradients are sharded after every micro-batch, and whether parameters are.
    """

    def __init__(self, buckets: Sequence[Bucket], sharding: ShardingPolicy) -> None:
        self._buckets = tuple(buckets)
        self._sharding = sharding
        self.in_backward = False
        self._last_micro_batch = True
        self._eager = False  # reduce during backward, not only at its flush
        self._pending: list[Bucket] = []  # not yet reduced in this backward, in launch order
        self._expected: dict[int, int] = {}  # by id of the bucket: parameters that require a gradient
        self._ready: dict[int, set[int]] = {}  # by id of the bucket: parameters whose gradient has arrived
        self._open: dict[int, Bucket] = {}  # by id: took part in an earlier micro-batch of this step

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around the backward of every micro-batch but the last of a step."""
        previous, self._last_micro_batch = self._last_micro_batch, False
        try:
            yield
        finally:
            self._last_micro_batch = previous

    def begin(self, eager: bool) -> None:
        """Before a backward; see :meth:`Engine.begin_backward`."""
        self.in_backward = True
        self._eager = eager and self._reduces_now
        self._ready = {id(b): set() for b in self._buckets}
        # `toggle_optimizer` and frozen parts turn `requires_grad` off, on all ranks alike; a bucket that is left out of
        # the last micro-batch may still hold gradients of earlier ones.
        self._expected = {id(b): sum(p.requires_grad for p in b.parameters) for b in self._buckets if b.optimized}
        self._pending = [b for b in reversed(self._buckets) if self._expected.get(id(b)) or id(b) in self._open]

    @property
    def _reduces_now(self) -> bool:
        return self._sharding.shard_grads or self._last_micro_batch

    def mark_ready(self, bucket: Bucket, index: int) -> None:
        """The gradient of a bucket's parameter ``index`` has been accumulated."""
        self._ready[id(bucket)].add(index)
        if self._eager and not self._sharding.shard_params:
            while self._pending and self._complete(self._pending[0]):
                self._reduce(self._pending[0])

    def _complete(self, bucket: Bucket) -> bool:
        return len(self._ready[id(bucket)]) >= self._expected.get(id(bucket), 0)

    def end_unit(self, buckets: Sequence[Bucket]) -> None:
        """Stage 3: all backward of a unit has run."""
        for bucket in buckets:
            if self._eager and self._expected.get(id(bucket)):
                self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        bucket.reduce(self._last_micro_batch)
        if bucket in self._pending:  # a unit that is called twice is reduced twice
            self._pending.remove(bucket)
        self._open[id(bucket)] = bucket

    def flush(self) -> None:
        """After the outermost backward: reduce what is left, or keep it for the last micro-batch."""
        self.in_backward = self._eager = False
        for bucket in list(self._pending):
            if self._reduces_now:
                self._reduce(bucket)
            else:
                bucket.keep_local()
                self._open[id(bucket)] = bucket
        self._pending = []
        if self._last_micro_batch:
            self._open = {}
