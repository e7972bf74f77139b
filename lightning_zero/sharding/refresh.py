"""Stages 1 and 2: what an update made stale is gathered when it is needed, in one order on all ranks.

After a step of several ranks every bucket waits for shards of the others. A unit that computes has its buckets gathered
after all those that come before them in forward order, and the next one is begun. So ranks that enter their units in
other orders, or not all of them, issue the same gathers, some earlier than others; and the rest is gathered before the
next collective of any other kind. Nothing that differs between ranks changes the order.

Code of the training step that reads a parameter before its unit has computed counts as that unit. Elsewhere a read
raises: it may be one rank's alone, which would wait for the others in vain.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

from lightning_zero.advice import Case, advice
from lightning_zero.sharding.bucket import Bucket, BucketState
from lightning_zero.sharding.mesh import Mesh


class Refresher:
    """Gathers stale buckets; see the module's docstring.

    Args:
        mesh: whose collectives come after.
        buckets: in forward order.
    """

    def __init__(self, mesh: Mesh, buckets: Sequence[Bucket]) -> None:
        self._mesh = mesh
        self._buckets = buckets
        self._stale: deque[Bucket] = deque()  # that are to be gathered; the first may be under way
        self._reading = False

    def defer(self) -> None:
        """Leave what is stale to those who need it. The same call on all ranks."""
        self._stale.extend(bucket for bucket in self._buckets if bucket.state is BucketState.STALE)
        for bucket in self._stale:
            bucket.defer(partial(self.need, bucket), partial(self._read, bucket))
        self._hold_others()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, all ranks run the same code, which may read parameters."""
        self._reading = True
        try:
            yield
        finally:
            self._reading = False

    def need(self, bucket: Bucket) -> None:
        """Gather a bucket now, after those before it, and begin with the next."""
        with self._gathering():
            while bucket in self._stale:
                self._stale[0].end_deferred()
                self._stale.popleft()
            if self._stale:
                self._stale[0].begin_unshard()

    def gather(self) -> None:
        """Gather all that is stale now."""
        self.finish()
        stale = [bucket for bucket in self._buckets if bucket.state is BucketState.STALE]
        for act in (Bucket.begin_unshard, Bucket.unshard):  # nobody waits for one before the next is on its way
            for bucket in stale:
                act(bucket)

    def finish(self) -> None:
        """Gather all that is left of what was deferred."""
        with self._gathering():
            for bucket in self._stale:  # nobody waits for one before the next is on its way
                bucket.begin_unshard()
            while self._stale:
                self._stale[0].end_deferred()
                self._stale.popleft()

    def _read(self, bucket: Bucket) -> None:
        if not self._reading:
            raise RuntimeError(
                f"a parameter of {bucket.name} is read after a step whose values the ranks have not gathered yet, and "
                f"one rank cannot do so alone outside of the training step{advice(Case.FREED, '. ')}"
            )
        bucket.unshard()

    @contextlib.contextmanager
    def _gathering(self) -> Iterator[None]:
        self._mesh.before_next(None)
        try:
            yield
        finally:
            self._hold_others()

    def _hold_others(self) -> None:
        self._mesh.before_next(self.finish if self._stale else None)
