"""Gathers stale buckets at stages 1 and 2 when they are needed, in the same order on all ranks.

After a step on several ranks all buckets are stale. When a unit computes, its buckets are gathered, after all buckets
that come before them in forward order, and the gather of the next bucket is begun. The remaining buckets are gathered
before the next collective of any other kind. So all ranks issue the same gathers in the same order, even if they enter
different units or enter them in different orders; only the times differ.

If code of the training step reads a parameter before its unit has computed, the read gathers the parameter's bucket in
the same way. A read outside the training step raises, since a single rank may do it, and would wait for the others
without end.
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
        mesh: groups whose other collectives must wait until all deferred gathers have been issued.
        buckets: in forward order.
    """

    def __init__(self, mesh: Mesh, buckets: Sequence[Bucket]) -> None:
        self._mesh = mesh
        self._buckets = buckets
        self._stale: deque[Bucket] = deque()  # buckets still to be gathered; the gather of the first may have begun
        self._reading = False

    def defer(self) -> None:
        """Defer the gathers of all stale buckets until they are needed. The same call on all ranks."""
        self._stale.extend(bucket for bucket in self._buckets if bucket.state is BucketState.STALE)
        for bucket in self._stale:
            bucket.defer(partial(self.need, bucket), partial(self._read, bucket))
        self._hold_others()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which all ranks run the same code, so that reading a parameter may gather it."""
        self._reading = True
        try:
            yield
        finally:
            self._reading = False

    def need(self, bucket: Bucket) -> None:
        """Gather a bucket now, after those before it in forward order, and begin to gather the next."""
        with self._gathering():
            while bucket in self._stale:
                self._stale[0].end_deferred()
                self._stale.popleft()
            if self._stale:
                self._stale[0].begin_unshard()

    def gather(self) -> None:
        """Gather all stale buckets now, whether their gather was deferred or not."""
        self.finish()
        stale = [bucket for bucket in self._buckets if bucket.state is BucketState.STALE]
        for act in (Bucket.begin_unshard, Bucket.unshard):  # begin all gathers before waiting for the first
            for bucket in stale:
                act(bucket)

    def finish(self) -> None:
        """Gather the remaining deferred buckets."""
        with self._gathering():
            for bucket in self._stale:  # begin all gathers before waiting for the first
                bucket.begin_unshard()
            while self._stale:
                self._stale[0].end_deferred()
                self._stale.popleft()

    def _read(self, bucket: Bucket) -> None:
        if not self._reading:
            raise RuntimeError(
                f"a parameter of {bucket.name} is read outside of the training step, before the ranks have gathered "
                f"its values of the last step; one rank cannot gather them alone{advice(Case.FREED, '. ')}"
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
