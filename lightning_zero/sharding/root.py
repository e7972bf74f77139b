"""Keeps the parameters outside all units unsharded at stage 3, from the beginning of a forward to the end of backward.

User code computes with them as it likes (``hidden @ self.tokens.weight.T``), so that no module's hook may show where
backward needs them. A backward that user code runs inside the forward is not the last one that may read them. The same
holds for parameters with which user code has computed in a ``gathered_parameters`` context (a penalty on weights).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from lightning_zero.sharding.bucket import Bucket
from lightning_zero.sharding.bucket_map import BucketMap


class Root:
    """Holds the root's buckets, and those of contexts; see the module's docstring.

    Args:
        bucket_map: the buckets of the module.
    """

    def __init__(self, bucket_map: BucketMap) -> None:
        self._map = bucket_map
        self._held: list[Bucket] = []
        self._awaits_backward = False  # since a forward with gradients
        self._in_forward = False  # with gradients
        self._backward_ended = False  # inside the forward

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Surrounds a forward: unshards the buckets, and with gradients enabled holds them until backward ends."""
        for bucket in self._map.root:
            bucket.unshard()
        self._in_forward, self._backward_ended = torch.is_grad_enabled(), False
        if self._in_forward:
            self._awaits_backward = True
            self._hold(self._map.root)
        try:
            yield
        finally:
            self._in_forward = False
            if self._backward_ended:
                for bucket in self._let_go():
                    bucket.reshard()

    def hold_saved(self, buckets: Iterable[Bucket]) -> None:
        """Hold what autograd may have saved in a context that held ``buckets``, since backward reads it.

        Frozen parameters may be factors of others. With gradients disabled, and where no forward awaits its backward,
        nothing is held.
        """
        if self._awaits_backward and torch.is_grad_enabled():
            self._hold(buckets)

    def end_backward(self) -> None:
        """Free all buckets, after backward or a forward without one; inside a forward those it holds at its end."""
        self._backward_ended = True
        if not self._in_forward:
            self._let_go()
        for bucket in self._map.buckets:
            bucket.reshard()

    def _hold(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            if bucket.shards_params and bucket not in self._held:
                bucket.pin()
                self._held.append(bucket)

    def _let_go(self) -> list[Bucket]:
        held, self._held, self._awaits_backward = self._held, [], False
        for bucket in held:
            bucket.unpin()
        return held
