"""The sequence of operations on a bucket's gradients, from their accumulation to the sharded gradient.

It is written once, generic in the type of values. In training these are tensors
(:class:`~lightning_zero.sharding.gradients.BucketGradients`); in a plan they are records of a size and dtype. So a plan
allocates and frees memory at the same points as training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from lightning_zero.sharding.placement import BucketPlacement


class Values(Protocol):
    """A tensor, or a record that represents one in a plan."""

    @property
    def dtype(self) -> torch.dtype: ...


T = TypeVar("T", bound=Values)
U = TypeVar("U")


class Reduction(ABC, Generic[T, U]):
    """Reduces the gradients of one bucket.

    ``T`` is the type of 1-D tensors of the bucket's or the shard's length, ``U`` that of unsharded gradients where they
    are reduced from where they lie, and not collected in a tensor.

    Args:
        dtype: dtype of the parameters.
        placement: placement of the bucket.
    """

    def __init__(self, dtype: torch.dtype, placement: BucketPlacement) -> None:
        self._dtype = dtype
        self._placement = placement
        self._sum: T | None = None  # Ψ: micro-batches summed before the reduction
        self._window: T | None = None  # Ψ/S: micro-batches that are not in the sharded gradient yet

    @property
    def _is_beside(self) -> bool:
        """Whether gradients are reduced on a stream of their own, beside the backward."""
        return self._placement.executor.overlaps and self._placement.mesh.world.size > 1

    def accumulate(self) -> None:
        """Add 16-bit gradients to a sum in fp32 and leave others in ``grad``.

        Called at stages 0 and 1 after every micro-batch before the last.
        """
        dtype = self._placement.sum_dtype(self._dtype)
        if dtype != self._dtype:
            # On every rank, even without gradients, since the sum determines the dtype of the reduction.
            if self._sum is None:
                self._sum = self._zeros(dtype)
            self._add_unsharded(self._sum)

    def reduce(self, last: bool) -> None:
        """Average the unsharded gradients over all ranks and add this rank's slice to the sharded gradient. Collective.

        Args:
            last: whether this is the last micro-batch before the step. Before, slices may be collected in a window on
                the device instead of being summed over replicas and copied to where the sharded gradient rests.
        """
        placement = self._placement
        dtype = placement.reduce_dtype(self._dtype, self._sum is not None)
        if placement.sums_where_kept(dtype):
            self._reduce_to_sharded(self._collect(dtype))
        else:
            collected = [self._collect(dtype)]
            if self._is_beside and (last or not placement.collects_slices):
                # Here, since the stream that computes may convert the sharded gradient later, and free it then.
                kept = dtype if self._window is None else placement.sum_dtype(dtype)
                self._make_room(kept, more=not last)
            self._beside(lambda: self._reduce(collected, last))

    def _reduce(self, collected: list[T | U], last: bool) -> None:
        """Do :meth:`reduce` with gradients that are taken from a list of one."""
        placement = self._placement
        # No variable refers to what is reduced, so it is freed before its slice is kept.
        fresh = self._reduce_scatter(collected.pop())
        if placement.collects_slices:
            # Micro-batches are summed in fp32, as in the sharded gradient.
            if self._window is not None:
                fresh = self._merge(self._window, fresh)
            elif not last:
                fresh = self._convert(fresh, placement.sum_dtype(fresh.dtype))
            self._window = None if last else fresh
            if not last:
                return
        if placement.mesh.replica.size > 1:
            self._sum_replicas(fresh)
        self._keep(fresh, more=not last)

    def _collect(self, dtype: torch.dtype) -> T | U:
        """The unsharded gradients, with their sum over micro-batches, in ``dtype``."""
        if self._sum is None:
            return self._take_unsharded(dtype)
        self._add_unsharded(self._sum)
        buffer, self._sum = self._sum, None  # without this reference the sum is freed after its conversion
        return self._convert(buffer, dtype)

    @abstractmethod
    def _beside(self, job: Callable[[], None]) -> None:
        """Do the work of ``job`` beside the backward if :attr:`_is_beside`, else at once."""

    @abstractmethod
    def _make_room(self, dtype: torch.dtype, more: bool) -> None:
        """Make the sharded gradient to which :meth:`_keep` will add a slice of ``dtype``."""

    @abstractmethod
    def _zeros(self, dtype: torch.dtype) -> T:
        """Allocate zeros of the bucket's length on the device."""

    @abstractmethod
    def _add_unsharded(self, total: T) -> None:
        """Add the unsharded gradients to ``total``, whose dtype is theirs or a wider one, and free them."""

    @abstractmethod
    def _take_unsharded(self, dtype: torch.dtype) -> T | U:
        """Take the unsharded gradients, in ``dtype``: in pieces, or moved into one tensor."""

    @abstractmethod
    def _merge(self, total: T, values: T) -> T:
        """Add ``values`` to ``total`` in place, and return it; ``values`` is not used afterwards."""

    @abstractmethod
    def _convert(self, values: T, dtype: torch.dtype) -> T:
        """Convert values to ``dtype``; returns the same object if they have it, else the old one is not used again."""

    @abstractmethod
    def _reduce_scatter(self, gradients: T | U) -> T:
        """Divide by the world size, sum over the shard group, return this rank's slice. Collective."""

    @abstractmethod
    def _reduce_to_sharded(self, gradients: T | U) -> None:
        """Do :meth:`_reduce_scatter`, and add the slice to the sharded gradient in the same pass. Collective."""

    @abstractmethod
    def _sum_replicas(self, shard: T) -> None:
        """Sum a slice over the replica group, in place. Collective."""

    @abstractmethod
    def _keep(self, shard: T, more: bool) -> None:
        """Add a slice to the sharded gradient; ``more`` tells whether further ones follow before the step."""
