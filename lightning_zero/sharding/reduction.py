"""The order of the work on a bucket's gradients, from their accumulation to the sharded gradient.

It is written once, for values of any kind: tensors in a training
(:class:`~lightning_zero.sharding.gradients.BucketGradients`), tensors of which only the size is known in a plan. So a
plan takes and gives back memory where the training does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

import torch

from lightning_zero.sharding.placement import BucketPlacement


class Values(Protocol):
    """A tensor, or what stands for one."""

    @property
    def dtype(self) -> torch.dtype: ...


T = TypeVar("T", bound=Values)


class Reduction(ABC, Generic[T]):
    """The gradients of one bucket on their way; ``T`` are tensors of the bucket's length or its shard's.

    Args:
        dtype: of the parameters.
        placement: of the bucket.
    """

    def __init__(self, dtype: torch.dtype, placement: BucketPlacement) -> None:
        self._dtype = dtype
        self._placement = placement
        self._sum: T | None = None  # Ψ: micro-batches summed before the reduction
        self._window: T | None = None  # Ψ/S: micro-batches that replicas have not summed yet

    def accumulate(self) -> None:
        """Before the last micro-batch at stages 0 and 1: sum 16-bit gradients in fp32, leave others in ``grad``."""
        dtype = self._placement.sum_dtype(self._dtype)
        if dtype != self._dtype:
            # On every rank, with gradients or without: it decides the dtype of the reduction.
            if self._sum is None:
                self._sum = self._zeros(dtype)
            self._add_unsharded(self._sum)

    def reduce(self, last: bool) -> None:
        """Average what is unsharded over all ranks, add this rank's slice to the sharded gradient. Collective.

        Args:
            last: whether the step follows. Before that, replicas do not sum: their slices wait in a window.
        """
        placement, summed = self._placement, self._sum is not None
        # Nothing here refers to the buffer any more while its slice is kept.
        fresh = self._reduce_scatter(self._collect(placement.reduce_dtype(self._dtype, summed)))
        if placement.mesh.replica.size > 1:
            if not last or self._window is not None:
                # As in the sharded gradient: micro-batches add up in fp32.
                fresh = self._convert(fresh, placement.sum_dtype(fresh.dtype))
            if self._window is not None:
                fresh = self._merge(self._window, fresh)
            self._window = None if last else fresh
            if not last:
                return
            self._sum_replicas(fresh)
        self._keep(fresh, more=not last)

    def _collect(self, dtype: torch.dtype) -> T:
        """The unsharded gradients and their sum in one buffer of ``dtype``; all of them are freed."""
        buffer = self._zeros(dtype)
        self._take_unsharded(buffer)
        if self._sum is not None:
            buffer = self._merge(self._sum, buffer)
            self._sum = None  # one tensor less while it is converted
            buffer = self._convert(buffer, dtype)
        return buffer

    @abstractmethod
    def _zeros(self, dtype: torch.dtype) -> T:
        """Zeros of the bucket's length, on the device."""

    @abstractmethod
    def _add_unsharded(self, total: T) -> None:
        """Add the unsharded gradients to ``total``, which they share a dtype or a narrower one with, and free them."""

    @abstractmethod
    def _take_unsharded(self, buffer: T) -> None:
        """Move the unsharded gradients into ``buffer``, which holds zeros."""

    @abstractmethod
    def _merge(self, total: T, values: T) -> T:
        """Add ``values``, which nobody needs any more, to ``total`` in place."""

    @abstractmethod
    def _convert(self, values: T, dtype: torch.dtype) -> T:
        """Values in ``dtype``; the same ones where they have it, otherwise nobody needs the old ones any more."""

    @abstractmethod
    def _reduce_scatter(self, buffer: T) -> T:
        """Average ``buffer`` over the ranks of the shard group; this rank's slice. Collective."""

    @abstractmethod
    def _sum_replicas(self, shard: T) -> None:
        """Sum slices over replicas, in place. Collective."""

    @abstractmethod
    def _keep(self, shard: T, more: bool) -> None:
        """Add a slice to the sharded gradient; ``more``: others will follow before the step."""
