"""The gradients of a bucket, from their accumulation until they are cleared.

Tensors of one bucket on one rank (Ψ elements, padded to S shards):

    part        tensor                                     held from                       until
    UNSHARDED   the local gradient, parameter dtype        a backward, or user code        accumulated or reduced
    SUM         1-D, Ψ, fp32 or wider, device              the first micro-batch that is   reduced
                                                           accumulated (16-bit parameters
                                                           at stages 0 and 1)
    WINDOW      1-D, Ψ/S, fp32 or wider, device            a reduction before the last     the last one, which sums
                                                           micro-batch (several replicas)  over replicas
    SHARDED     1-D, Ψ/S, gradient dtype, optimizer store  the first reduction             cleared by ``zero_grad``
                (see ``sharded_gradient.py``)

Clearing ends all of them. Until then several may exist at once, such as UNSHARDED gradients of a second micro-batch
beside the SHARDED gradient of the first. Between steps only the memory of the sharded gradient stays allocated. A flag
for each parameter tells whether it *received* a gradient on this rank since it was cleared; an optimizer updates only
parameters that received one on some rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Flag, auto
from functools import partial
from operator import itemgetter

import torch
from torch import Tensor

from lightning_zero import ops
from lightning_zero.advice import Case, advice
from lightning_zero.sharding.bucket import Bucket
from lightning_zero.sharding.held import local_grad, set_local_grad
from lightning_zero.sharding.pieces import Pieces
from lightning_zero.sharding.reduction import Reduction
from lightning_zero.sharding.sharded_gradient import ShardedGradient
from lightning_zero.storage import Lane, temporary_zeros
from lightning_zero.storage.timers import Phase, timed
from lightning_zero.torch_private import copy_each


class Held(Flag):
    """The parts of a bucket's gradients that exist; see the module's docstring."""

    NONE = 0
    UNSHARDED = auto()
    SUM = auto()
    WINDOW = auto()
    SHARDED = auto()


class BucketGradients(Reduction[Tensor, Pieces]):
    """The gradients of one bucket; see the module's docstring.

    Attributes:
        bucket: the bucket.
        sharded: this rank's slice of the gradients reduced so far.
        received: by parameter index, whether a gradient has arrived on this rank since the last clearing.

    Args:
        bucket: the bucket of the parameters.
    """

    def __init__(self, bucket: Bucket) -> None:
        placement, layout = bucket.placement, bucket.layout
        super().__init__(bucket.dtype, placement)
        self.bucket = bucket
        self.timers = placement.mesh.timers
        self.sharded = ShardedGradient(bucket.name, layout.shard_numel, placement, bucket.segments, layout.align - 1)
        self.received = [False] * len(bucket.parameters)
        self._cleared: set[int] = set()  # indices of parameters that were cleared since a gradient arrived last

    @property
    def held(self) -> Held:
        """The parts that are held."""
        held = Held.NONE
        if any(local_grad(p) is not None for p in self.bucket.parameters):
            held |= Held.UNSHARDED
        if self._sum is not None:
            held |= Held.SUM
        if self._window is not None:
            held |= Held.WINDOW
        return held if self.sharded.empty else held | Held.SHARDED

    @property
    def expected(self) -> int:
        """The largest number of gradients that a backward brings for parameters that an optimizer may update."""
        return sum(p.requires_grad for p in self.bucket.parameters) if self.bucket.optimized else 0

    @property
    def left_over(self) -> bool:
        """Whether the bucket holds a gradient that has not been reduced and that an optimizer may use."""
        return self.bucket.optimized and self.held not in (Held.NONE, Held.SHARDED)

    @timed(Phase.REDUCE)
    @torch.no_grad()
    def accumulate(self) -> None:
        self._note_received()
        super().accumulate()

    @timed(Phase.REDUCE)
    @torch.no_grad()
    def reduce(self, last: bool) -> None:
        self._note_received()
        super().reduce(last)

    def local_sum(self, index: int) -> Tensor | None:
        """This rank's sum of one parameter's gradients over micro-batches, as a view in fp32 or wider.

        ``None`` if there is no such sum.
        """
        return None if self._sum is None or not self.received[index] else self.bucket.view(self._sum, index)

    def _note_received(self) -> None:
        for i, parameter in enumerate(self.bucket.parameters):
            if (gradient := local_grad(parameter)) is not None:
                if gradient.layout is not torch.strided:
                    raise TypeError(
                        f"the gradient of parameter {self.bucket.names[i]!r} has layout {gradient.layout}, as one of "
                        "F.embedding(..., sparse=True) has; sharding needs dense gradients. Use sparse=False"
                        f"{advice(Case.CANNOT_BE_SHARDED, ', ')}"
                    )
                self.received[i] = True
        self._cleared = set()

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        return temporary_zeros(self.bucket.layout.padded_numel, dtype, self._placement.device)

    def _add_unsharded(self, total: Tensor) -> None:
        for view, parameter in zip(self.bucket.views(total), self.bucket.parameters, strict=True):
            if (gradient := local_grad(parameter)) is not None:
                ops.accumulate_(view, gradient)
                set_local_grad(parameter, None)

    def _take_unsharded(self, dtype: torch.dtype) -> Tensor | Pieces:
        bucket, taken = self.bucket, []
        for index, parameter in enumerate(bucket.parameters):
            if (gradient := local_grad(parameter)) is not None:
                taken.append((index, gradient))
                set_local_grad(parameter, None)
        if self._placement.reduces_pieces:
            offsets = bucket.layout.offsets
            parts = [(offsets[i], self._piece(i, gradient, dtype)) for i, gradient in taken if gradient.numel()]
            return Pieces(bucket.layout.padded_numel, dtype, sorted(parts, key=itemgetter(0)))
        buffer = self._zeros(dtype)
        if taken:
            copy_each([bucket.view(buffer, index) for index, _ in taken], [gradient for _, gradient in taken])
        return buffer

    def _piece(self, index: int, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """A gradient as it lies in the flat buffer, 1-D: the same memory, if it lies so and has the dtype."""
        return self.bucket.formats[index].flatten(gradient).resolve_neg().to(dtype).contiguous()

    def _merge(self, total: Tensor, values: Tensor) -> Tensor:
        if self._placement.mesh.shard.size == 1:  # then it is the buffer of an earlier micro-batch
            self._placement.executor.keep(total)
        ops.accumulate_(total, values)
        return total

    def _convert(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(dtype)

    def _beside(self, job: Callable[[], None]) -> None:
        placement = self._placement
        if not self._is_beside:
            job()
            return
        what = f"the gradients of {self.bucket.name}"
        self.sharded.reduced = placement.mesh.submit(placement.executor, job, Lane.REDUCE, what)

    def _make_room(self, dtype: torch.dtype, more: bool) -> None:
        self.sharded.make_room(dtype, more)

    def _reduce_scatter(self, gradients: Tensor | Pieces, out: Tensor | None = None, add: bool = False) -> Tensor:
        mesh, what = self._placement.mesh, f"reduce the gradients of {self.bucket.name}"
        if isinstance(gradients, Tensor):
            self._placement.executor.keep(gradients)
        # Divided before the sum, so that fp16 sums over many ranks do not overflow.
        return mesh.shard.reduce_scatter(gradients, what, 1.0 / mesh.world.size, out, add)

    def _reduce_to_sharded(self, gradients: Tensor | Pieces) -> None:
        self.sharded.add_by(gradients.dtype, partial(self._reduce_scatter, gradients))

    def _sum_replicas(self, shard: Tensor) -> None:
        self._placement.mesh.replica.all_reduce_(shard, f"sum the gradients of {self.bucket.name} over replicas")

    def _keep(self, shard: Tensor, more: bool) -> None:
        self.sharded.add(shard, more)

    def mark_assigned(self, index: int) -> None:
        """Note that user code has made the gradient of one parameter in the sharded gradient."""
        self.received[index] = True
        self._cleared.discard(index)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply all gradients that are held, reduced or not, by ``factor``."""
        held = [gradient for p in self.bucket.parameters if (gradient := local_grad(p)) is not None]
        held += [t for t in (self._sum, self._window) if t is not None]
        self.sharded.await_reduction()
        for gradient in held:
            gradient.mul_(factor)
        if not self.sharded.empty:
            self.sharded.raise_precision()
            self.sharded.change(0, self.bucket.layout.shard_numel, lambda values: values.mul_(factor))

    def clear(self, indices: Iterable[int], keep_used: bool = False) -> None:
        """Discard the gradients of some parameters, except local ones.

        Args:
            indices: indices of the parameters.
            keep_used: treat the parameters as having received gradients of zero; otherwise as having received none.
        """
        chosen = set(indices)
        if not keep_used:
            for i in chosen:
                self.received[i] = False
        self._cleared |= chosen
        # The slice is empty only when the gradients of all parameters of the bucket were cleared.
        if self._window is not None:
            self.sharded.await_reduction()
        if len(self._cleared) == len(self.bucket.parameters) and not keep_used:
            self.sharded.clear()
            self._sum = self._window = None
            return
        for segment in self.bucket.segments:
            if segment.param in chosen:
                if not self.sharded.empty:
                    self.sharded.change(segment.start, segment.stop, Tensor.zero_)
                if self._window is not None:
                    self._window[segment.start : segment.stop].zero_()
        if self._sum is not None:
            views = self.bucket.views(self._sum)
            for i in chosen:
                views[i].zero_()
