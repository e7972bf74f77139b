"""Keeps the parameters outside all units unsharded at stage 3, from the beginning of a forward to the end of backward.

User code computes with them as it likes (``hidden @ self.tokens.weight.T``), so that no module's hook may show where
backward needs them. A backward that user code runs inside the forward is not the last one that may read them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lightning_zero.sharding.bucket import Bucket
from lightning_zero.sharding.bucket_map import BucketMap


class Root:
    """Holds the root's buckets; see the module's docstring.

    Args:
        bucket_map: the buckets of the module.
    """

    def __init__(self, bucket_map: BucketMap) -> None:
        self._map = bucket_map
        self._held: list[Bucket] = []
        self._in_forward = False  # with gradients
        self._backward_ended = False  # inside the forward

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Surrounds a forward: unshards the buckets, and with gradients enabled holds them until backward ends."""
        for bucket in self._map.root:
            bucket.unshard()
        self._in_forward, self._backward_ended = torch.is_grad_enabled(), False
        if self._in_forward and not self._held:
            self._held = [bucket for bucket in self._map.root if bucket.shards_params]
            for bucket in self._held:
                bucket.pin()
        try:
            yield
        finally:
            self._in_forward = False
            if self._backward_ended:
                self._let_go()
                for bucket in self._map.root:
                    bucket.reshard()

    def end_backward(self) -> None:
        """Free all buckets, after backward or a forward without one, but the root's inside a forward at its end."""
        self._backward_ended = True
        if not self._in_forward:
            self._let_go()
        for bucket in self._map.buckets:
            bucket.reshard()

    def _let_go(self) -> None:
        held, self._held = self._held, []
        for bucket in held:
            bucket.unpin()
