"""The gradients of a bucket, from the moment they are accumulated until they are cleared.

Tensors of one bucket on one rank (Ψ elements, padded to S shards):

    part        tensor                                     held from                       until
    UNSHARDED   the local gradient, parameter dtype        a backward, or user code        accumulated or reduced
    SUM         1-D, Ψ, fp32 or wider, device              the first micro-batch that is   reduced
                                                           accumulated (16-bit parameters
                                                           at stages 0 and 1)
    WINDOW      1-D, Ψ/S, fp32 or wider, device            a reduction before the last     the last one, which sums
                                                           micro-batch (several replicas)  over replicas
    SHARDED     1-D, Ψ/S, gradient dtype, optimizer store  the first reduction             cleared by ``zero_grad``

Clearing ends all of them; until then several may be held, such as UNSHARDED ones of a second micro-batch beside the
SHARDED ones of the first. Between steps only the memory of the sharded gradient stays. Beside the tensors goes which
parameters *received* a gradient on this rank since it was cleared: an optimizer updates no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Flag, auto
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.sharding.bucket import Bucket
from lightning_zero.sharding.held import local_grad, set_local_grad
from lightning_zero.sharding.layout import Segment
from lightning_zero.sharding.placement import BucketPlacement
from lightning_zero.sharding.reduction import Reduction
from lightning_zero.storage import DONE, Ticket, device_type
from lightning_zero.storage.timers import Phase, timed
from lightning_zero.torch_private import copy_each, norms_of_each


class Held(Flag):
    """Parts of a bucket's gradients that exist; see the module's docstring."""

    NONE = 0
    UNSHARDED = auto()
    SUM = auto()
    WINDOW = auto()
    SHARDED = auto()


def sharded_gradient_dtype(fixed: torch.dtype | None, values: torch.dtype, again: bool) -> torch.dtype:
    """The dtype of a sharded gradient.

    Args:
        fixed: what the policy asks for; ``None`` leaves it to what arrives.
        values: dtype of what arrives.
        again: whether something has arrived before.
    """
    return fixed or (torch.promote_types(values, torch.float32) if again else values)


class LentGradient(NamedTuple):
    """The values of a sharded gradient, to be read by an update.

    Attributes:
        values: 1-D.
        arriving: the last work on them.
    """

    values: Tensor
    arriving: Ticket

    def read(self, start: int, stop: int) -> Tensor:
        """A view of the gradient of elements ``[start, stop)``, which may not be changed."""
        if self.arriving is not DONE:
            self.arriving.synchronize()
        return self.values[start:stop]


class ShardedGradient:
    """Accumulates the reduced gradients of one shard over micro-batches.

    Its dtype does not depend on stage or store, since overflow and norm are judged from these values.

    Attributes:
        squares: on the device, sums of squares of the values, one for each segment, float64; not finite where a value
            is not. ``None``: nobody knows them without reading the values. They are noted when values leave for host
            memory, so that nobody waits for their arrival to know the norm, and when others do.

    Args:
        name: of the bucket.
        numel: length of the shard.
        placement: where the values rest, and in which dtype: a fixed one, or that of what arrives, raised to fp32 by a
            second arrival.
        segments: of the shard.
    """

    def __init__(self, name: str, numel: int, placement: BucketPlacement, segments: Sequence[Segment]) -> None:
        self._name = name
        self._numel = numel
        self._placement = placement
        self._store = placement.optimizer_store
        self._fixed_dtype = placement.precision.grad_dtype
        self._values: Tensor | None = None  # 1-D
        self._empty = True
        self.squares: Tensor | None = None
        self._segments = segments
        self._arriving = DONE  # the last work on `values`, which nobody has waited for
        self._lent_to = DONE  # the last work that reads them, likewise

    def add(self, values: Tensor) -> None:
        """Begin to add ``values`` (1-D, on the device), which nobody changes any more."""
        placement, memory, before = self._placement, self._store.memory, (self._arriving, self._lent_to)
        held = self._ensure(sharded_gradient_dtype(self._fixed_dtype, values.dtype, again=not self._empty))
        self.squares = None
        if self._empty:
            # Alike in all places of an engine: the norm does not depend on which buckets are in which.
            if self._store.as_on_host and not device_type(placement.device).shares_host_memory and self._segments:
                kept = values if self._fixed_dtype is None else values.to(self._fixed_dtype)  # the norm is of these
                parts = [kept[segment.start : segment.stop] for segment in self._segments]
                self.squares = torch.stack(norms_of_each(parts)).square_()
            self._arriving = placement.move(held, values, ("device", memory), self._name, before)
            self._empty = False
        else:
            self._arriving = placement.accumulate(held, values, memory, self._name, before)
        self._lent_to = DONE  # it comes before

    def _arrive(self) -> None:
        """Wait for what was added and for who reads it: the host is about to read or change the values."""
        for work in (self._arriving, self._lent_to):
            if work is not DONE:
                self._placement.await_host(work)
        self._arriving = self._lent_to = DONE

    def lend(self) -> LentGradient:
        """The values for an update, which may read them until the work that :meth:`lent_to` is told of has ended."""
        if self._empty:
            self.read(0, self._numel)
        assert self._values is not None
        return LentGradient(self._values, self._arriving)

    def lent_to(self, work: Ticket) -> None:
        """``work`` reads what :meth:`lend` gave: what changes the values waits for it."""
        self._lent_to = work

    def read(self, start: int, stop: int) -> Tensor:
        """A view of the gradient of elements ``[start, stop)``, which may be changed; zeros where nothing arrived."""
        self._arrive()
        self.squares = None
        if self._empty:
            self._ensure(self._fixed_dtype or torch.float32).zero_()
            self._empty = False
        assert self._values is not None
        return self._values[start:stop]

    @property
    def shown_dtype(self) -> torch.dtype:
        """The dtype of the values after :meth:`raise_precision`."""
        held = torch.float32 if self._values is None else self._values.dtype
        return self._fixed_dtype or torch.promote_types(held, torch.float32)

    def raise_precision(self) -> None:
        """Make the values fp32, unless the dtype is fixed, before they are scaled or compared with fp32 numbers."""
        if not self._empty and self._fixed_dtype is None:
            self._ensure(torch.float32)

    def clear(self) -> None:
        """Forget the values; the memory is kept for the next step, which what still arrives there comes before."""
        self._empty = True
        self.squares = None

    @property
    def empty(self) -> bool:
        """Whether no gradient has arrived since it was cleared."""
        return self._empty

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return 0 if self._values is None else self._values.nbytes

    @property
    def pinned(self) -> bool:
        """Whether it is pinned host memory."""
        return self._values is not None and self._values.device.type == "cpu" and self._values.is_pinned()

    def _ensure(self, dtype: torch.dtype) -> Tensor:
        """The tensor, at least as wide as ``dtype``; a wider one of an earlier step holds the same values."""
        if self._values is None:
            self._values = self._store.zeros(self._numel, dtype)
        elif torch.promote_types(self._values.dtype, dtype) != self._values.dtype:
            self._arrive()
            before = self._values
            self._values = self._store.zeros(self._numel, dtype)
            self._values.copy_(before)
        return self._values


class BucketGradients(Reduction[Tensor]):
    """The gradients of one bucket; see the module's docstring.

    Attributes:
        bucket: whose parameters they are of.
        sharded: this rank's slice of what has been reduced.
        received: by index of the parameter: whether this rank has seen a gradient since it was cleared.

    Args:
        bucket: as above.
    """

    def __init__(self, bucket: Bucket) -> None:
        placement, layout = bucket.placement, bucket.layout
        super().__init__(bucket.dtype, placement)
        self.bucket = bucket
        self.timers = placement.mesh.timers
        self.sharded = ShardedGradient(bucket.name, layout.shard_numel, placement, bucket.segments)
        self.received = [False] * len(bucket.parameters)
        self._cleared: set[int] = set()  # parameters whose gradients were cleared since the last one arrived

    @property
    def held(self) -> Held:
        """The parts that exist."""
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
        """The number of gradients that a backward brings at most, of parameters that an optimizer may update."""
        return sum(p.requires_grad for p in self.bucket.parameters) if self.bucket.optimized else 0

    @property
    def left_over(self) -> bool:
        """Whether a gradient that an optimizer may use has not been reduced."""
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
        """A view of this rank's fp32 sum of one parameter's gradients over micro-batches, if there is one."""
        return None if self._sum is None or not self.received[index] else self.bucket.view(self._sum, index)

    def _note_received(self) -> None:
        for i, parameter in enumerate(self.bucket.parameters):
            if local_grad(parameter) is not None:
                self.received[i] = True
        self._cleared = set()

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.bucket.layout.padded_numel, dtype=dtype, device=self._placement.device)

    def _add_unsharded(self, total: Tensor) -> None:
        for view, parameter in zip(self.bucket.views(total), self.bucket.parameters, strict=True):
            if (gradient := local_grad(parameter)) is not None:
                view.add_(gradient)
                set_local_grad(parameter, None)

    def _take_unsharded(self, buffer: Tensor) -> None:
        targets, sources = [], []
        for view, parameter in zip(self.bucket.views(buffer), self.bucket.parameters, strict=True):
            if (gradient := local_grad(parameter)) is not None:
                targets.append(view)
                sources.append(gradient)
                set_local_grad(parameter, None)
        if targets:
            copy_each(targets, sources)

    def _merge(self, total: Tensor, values: Tensor) -> Tensor:
        return total.add_(values)

    def _convert(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(dtype)

    def _reduce_scatter(self, buffer: Tensor) -> Tensor:
        mesh = self._placement.mesh
        # Before the sum, so that fp16 sums of many ranks stay in range.
        buffer.mul_(1.0 / mesh.world.size)
        return mesh.shard.reduce_scatter(buffer, f"reduce the gradients of {self.bucket.name}")

    def _sum_replicas(self, shard: Tensor) -> None:
        self._placement.mesh.replica.all_reduce_(shard, f"sum the gradients of {self.bucket.name} over replicas")

    def _keep(self, shard: Tensor) -> None:
        self.sharded.add(shard)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply all that is held by ``factor``."""
        held = [gradient for p in self.bucket.parameters if (gradient := local_grad(p)) is not None]
        held += [t for t in (self._sum, self._window) if t is not None]
        if not self.sharded.empty:
            self.sharded.raise_precision()
            held.append(self.sharded.read(0, self.bucket.layout.shard_numel))
        for gradient in held:
            gradient.mul_(factor)

    def clear(self, indices: Iterable[int], keep_used: bool = False) -> None:
        """Forget the gradients of some parameters, but for local ones; ``keep_used``: they count as zero gradients."""
        chosen = set(indices)
        if not keep_used:
            for i in chosen:
                self.received[i] = False
        # Other ranks' gradients lie in this slice too: only when all are cleared is it empty.
        self._cleared |= chosen
        if len(self._cleared) == len(self.bucket.parameters) and not keep_used:
            self.sharded.clear()
            self._sum = self._window = None
            return
        for segment in self.bucket.segments:
            if segment.param in chosen:
                if not self.sharded.empty:
                    self.sharded.read(segment.start, segment.stop).zero_()
                if self._window is not None:
                    self._window[segment.start : segment.stop].zero_()
        if self._sum is not None:
            views = self.bucket.views(self._sum)
            for i in chosen:
                views[i].zero_()
