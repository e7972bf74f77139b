"""A bucket: parameters that are gathered, reduced and updated together.

Tensors of one bucket on one rank (Ψ elements, padded to S shards):

    flat       1-D, Ψ, parameter dtype, device   what forward and backward read; parameters are views of it
    shard      1-D, Ψ/S, parameter dtype         the owned part: a slice of ``flat`` (stages 0-2) or its own (stage 3)
    master     Ψ/S, full precision               in the optimizer's store, or the shard itself (see ``master.py``)
    gradients  1-D, Ψ/S, gradient dtype          the reduced slice, in the optimizer's store, until the next zero_grad

``flat`` is one storage for life. Resharding resizes it to zero bytes: views, also those that autograd saved, then see
no memory instead of keeping it alive, and see the gathered values again after the next unshard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero.engine.collectives import Mesh
from lightning_zero.engine.freed import mark_freed, mark_gathered
from lightning_zero.engine.layout import FlatLayout, Segment
from lightning_zero.engine.master import CopyMaster, Master, NoMaster
from lightning_zero.engine.policies import MixedPrecisionPolicy, ShardingPolicy
from lightning_zero.engine.stores import Store

_CACHE_LINE = 64  # bytes; the alignment of torch's own CPU allocations


class BucketState(Enum):
    """Which parameter values a rank holds."""

    SHARDED = auto()  # the shard only; `flat` has no memory and its parameters are freed
    GATHERED = auto()  # `flat` holds the current values of all shards
    STALE = auto()  # `flat` holds values from before the last update of the shards


class ParameterSpec(NamedTuple):
    """A parameter and its name in the module tree (its first, where it is tied)."""

    name: str
    parameter: Parameter


class Placement(NamedTuple):
    """What the buckets of one engine share."""

    mesh: Mesh
    sharding: ShardingPolicy
    precision: MixedPrecisionPolicy
    device: torch.device  # where the model computes
    optimizer_store: Store
    param_store: Store


class Bucket:
    """See the module's docstring.

    Args:
        name: name of the unit, for messages.
        specs: the parameters in module order, all of one dtype, at their initial full-precision values. Their ``data``
            is replaced by views of the flat buffer.
        dtype: dtype that forward and backward see.
        optimized: whether an optimizer may update them; otherwise no gradient is ever reduced here.
        placement: groups, policies, device and stores.
    """

    def __init__(
        self, name: str, specs: Sequence[ParameterSpec], dtype: torch.dtype, optimized: bool, placement: Placement
    ) -> None:
        mesh = placement.mesh
        self.name = name
        self.names = tuple(spec.name for spec in specs)
        self.parameters = tuple(spec.parameter for spec in specs)
        self.shapes = tuple(p.shape for p in self.parameters)
        self.dtype = dtype
        self.optimized = optimized
        self.placement = placement
        numels = tuple(p.numel() for p in self.parameters)
        self.layout = FlatLayout(numels, mesh.shard.size, mesh.world.size, _CACHE_LINE // dtype.itemsize)
        self.segments = self.layout.segments(mesh.shard.rank)
        self.index = {id(p): i for i, p in enumerate(self.parameters)}
        self.state = BucketState.GATHERED
        self.pins = 0  # open `gathered_parameters` contexts: resharding waits for them
        self.gradients = GradientLog(placement.optimizer_store, self.layout.shard_numel, placement.precision.grad_dtype)
        self.received = [False] * len(self.parameters)  # gradient seen on this rank since zero_grad
        self._partial: Tensor | None = None  # 1-D fp32, Ψ: 16-bit gradients summed over micro-batches before reduction
        self._window: Tensor | None = None  # 1-D, Ψ/S: micro-batches of a step that replicas have not summed yet
        self._adopt()

    # ------------------------------------------------------------------------------------------------ construction

    def _adopt(self) -> None:
        """Take the parameters' values (rank 0's), make shard and master from them, then cast."""
        placement, layout = self.placement, self.layout
        full = torch.zeros(layout.padded_numel, dtype=self.parameters[0].dtype, device=placement.device)
        for view, parameter in zip(self._views(full), self.parameters, strict=True):
            view.copy_(parameter.detach())
        placement.mesh.world.broadcast_(full)
        start, stop = layout.shard_range(placement.mesh.shard.rank)

        self.flat = full if full.dtype == self.dtype else full.to(self.dtype)
        self.shard = self.flat[start:stop]
        if placement.sharding.shard_params:
            self.shard = placement.param_store.zeros(layout.shard_numel, self.dtype)
            self.shard.copy_(self.flat[start:stop])
        self.master = self._make_master(full[start:stop])
        for view, parameter in zip(self._views(self.flat), self.parameters, strict=True):
            parameter.data = view
        self._versions = [p._version for p in self.parameters]
        self.reshard()

    def _make_master(self, values: Tensor) -> Master:
        placement = self.placement
        cast = placement.precision.needs_master(self.dtype)
        moved = placement.optimizer_store.device != self.shard.device or placement.optimizer_store.exact
        moved = moved and not (placement.sharding.shard_params and placement.param_store is placement.optimizer_store)
        if self.optimized and (cast or moved):
            return CopyMaster(self.shard, values, placement.optimizer_store, torch.float32 if cast else self.dtype)
        return NoMaster(self.shard)

    def _views(self, flat: Tensor) -> list[Tensor]:
        layout = self.layout
        return [
            flat[offset : offset + numel].view(shape)
            for offset, numel, shape in zip(layout.offsets, layout.numels, self.shapes, strict=True)
        ]

    def range_of(self, segment: Segment) -> slice:
        """The segment's elements in the flat buffer."""
        start = self.layout.offsets[segment.param] + segment.param_start
        return slice(start, start + segment.numel)

    # -------------------------------------------------------------------------------------------------- parameters

    def unshard(self) -> None:
        """Give ``flat`` the current values of all shards; nothing happens where it has them."""
        if self.state is BucketState.GATHERED:
            return
        if self.state is BucketState.SHARDED:
            self.flat.untyped_storage().resize_(self.layout.padded_numel * self.dtype.itemsize)
        start, stop = self.layout.shard_range(self.placement.mesh.shard.rank)
        if self.shard.data_ptr() != self.flat.data_ptr() + start * self.dtype.itemsize:
            self.flat[start:stop].copy_(self.shard)
        self.placement.mesh.shard.all_gather_(self.flat)
        self.state = BucketState.GATHERED
        for parameter in self.parameters:
            mark_gathered(parameter)
        self._versions = [p._version for p in self.parameters]

    def reshard(self) -> None:
        """Free ``flat`` where the stage shards parameters and nobody holds them gathered."""
        if not self.placement.sharding.shard_params or self.pins or self.state is BucketState.SHARDED:
            return
        if self.state is BucketState.GATHERED:
            self.absorb_edits()
        self.flat.untyped_storage().resize_(0)
        self.state = BucketState.SHARDED
        for name, parameter in zip(self.names, self.parameters, strict=True):
            mark_freed(parameter, name)

    def mark_updated(self) -> None:
        """The shards have new values: what is gathered is out of date."""
        # With one shard at stages 0 to 2, `flat` is the shard.
        if self.state is BucketState.GATHERED and (self.layout.shards > 1 or self.placement.sharding.shard_params):
            self.state = BucketState.STALE

    def absorb_edits(self, everything: bool = False) -> None:
        """Take over in-place changes by user code: of gathered parameters whose version moved, or of all."""
        for segment in self.segments:
            parameter = self.parameters[segment.param]
            if everything or parameter._version != self._versions[segment.param]:
                self.shard[segment.start : segment.stop].copy_(self.flat[self.range_of(segment)])
                self.master.derive(segment.start, segment.stop)
        self._versions = [p._version for p in self.parameters]

    def load(self, index: int, values: Tensor) -> None:
        """Overwrite one parameter with full-precision ``values`` of its shape; ``flat`` becomes out of date."""
        values = values.detach().reshape(-1)
        for segment in self.segments:
            if segment.param == index:
                part = values[segment.param_start : segment.param_start + segment.numel]
                self.master.read(segment.start, segment.stop).copy_(part)
                self.master.write(segment.start, segment.stop)
        self.mark_updated()

    def gather_full(self, shard: Tensor) -> Tensor:
        """All-gather any 1-D tensor laid out as the shard; returns the full one (padded) on the device. Collective."""
        full = torch.empty(self.layout.padded_numel, dtype=shard.dtype, device=self.placement.device)
        start, stop = self.layout.shard_range(self.placement.mesh.shard.rank)
        full[start:stop].copy_(shard)
        self.placement.mesh.shard.all_gather_(full)
        return full

    def release(self) -> None:
        """Give every parameter an ordinary tensor at full precision and forget the flat buffer. Collective."""
        full = self.gather_full(self.master.read(0, self.layout.shard_numel))
        for view, parameter in zip(self._views(full), self.parameters, strict=True):
            mark_gathered(parameter)
            parameter.data = view.clone()

    # --------------------------------------------------------------------------------------------------- gradients

    def has_gradient(self) -> bool:
        """Whether a parameter holds a gradient that has not been reduced."""
        return any(p.grad is not None for p in self.parameters)

    def keep_local(self) -> None:
        """Between micro-batches where gradients stay whole: sum 16-bit gradients in fp32, leave others in ``grad``."""
        self._note_received()
        if self.dtype.itemsize < 4 and self.has_gradient():
            if self._partial is None:
                self._partial = torch.zeros(self.layout.padded_numel, dtype=torch.float32, device=self.placement.device)
            for view, parameter in zip(self._views(self._partial), self.parameters, strict=True):
                if parameter.grad is not None:
                    view.add_(parameter.grad)
                    parameter.grad = None

    def reduce(self, last: bool) -> None:
        """Average the gradients over all ranks, add the owned slice to the log and free the whole ones. Collective.

        Args:
            last: whether the step follows. Before that, replicas do not sum: their slices wait in a window.
        """
        self._note_received()
        mesh = self.placement.mesh
        fresh = mesh.shard.reduce_scatter(self._collect())
        if mesh.replica.size > 1:
            if self._window is not None:
                fresh = self._window.add_(fresh)
            self._window = None if last else fresh
            if not last:
                return
            mesh.replica.all_reduce_(fresh)
        self.gradients.add(fresh)

    def _note_received(self) -> None:
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.received[i] = True

    def _collect(self) -> Tensor:
        """Copy the gradients to a flat buffer in the reduce dtype, divided by the number of ranks; free them."""
        # What was summed in fp32 is sent in fp32: two finite fp16 micro-batches may add up to more than fp16 holds.
        dtype = self.placement.precision.reduce_dtype or (self.dtype if self._partial is None else self._partial.dtype)
        buffer = torch.zeros(self.layout.padded_numel, dtype=dtype, device=self.placement.device)
        targets, sources = [], []
        for view, parameter in zip(self._views(buffer), self.parameters, strict=True):
            if parameter.grad is not None:
                targets.append(view)
                sources.append(parameter.grad)
                parameter.grad = None
        if targets:
            torch._foreach_copy_(targets, sources)
        if self._partial is not None:
            buffer = self._partial.add_(buffer).to(dtype)
            self._partial = None
        # Before the sum, so that fp16 sums of many ranks stay in range.
        return buffer.mul_(1.0 / self.placement.mesh.world.size)

    def clear_gradients(self, indices: Iterable[int], keep_used: bool = False) -> None:
        """Forget the gradients of some parameters, whole and owned; with ``keep_used`` they count as zero gradients."""
        chosen = set(indices)
        if not keep_used:
            for i in chosen:
                self.received[i] = False
        if not any(self.received):
            self.gradients.clear()
            self._partial = self._window = None
            return
        for segment in self.segments:
            if segment.param in chosen:
                self.gradients.read(segment.start, segment.stop).zero_()
                if self._window is not None:
                    self._window[segment.start : segment.stop].zero_()
        if self._partial is not None:
            views = self._views(self._partial)
            for i in chosen:
                views[i].zero_()


class GradientLog:
    """The owned slice of the averaged gradient, accumulated over micro-batches until the next ``zero_grad``.

    Its dtype does not depend on stage or store, since overflow and norm are judged from these values.

    Args:
        store: where the log rests.
        numel: length of the shard.
        dtype: a fixed dtype, or ``None`` for that of what arrives, raised to fp32 by a second arrival.
    """

    def __init__(self, store: Store, numel: int, dtype: torch.dtype | None) -> None:
        self._store = store
        self._numel = numel
        self._fixed_dtype = dtype
        self._values: Tensor | None = None  # 1-D
        self._empty = True

    def add(self, values: Tensor) -> None:
        """Add ``values`` (1-D)."""
        if self._empty:
            self._ensure(self._fixed_dtype or values.dtype).copy_(values)
            self._empty = False
        else:
            wide = torch.promote_types(values.dtype, torch.float32)
            self._ensure(self._fixed_dtype or wide).add_(values.to(self._store.device))

    def read(self, start: int, stop: int) -> Tensor:
        """A view of the gradient of elements ``[start, stop)``; zeros where nothing arrived."""
        if self._empty:
            self._ensure(self._fixed_dtype or torch.float32).zero_()
            self._empty = False
        assert self._values is not None
        return self._values[start:stop]

    def clear(self) -> None:
        """Forget the values; the memory is kept for the next step."""
        self._empty = True

    @property
    def empty(self) -> bool:
        return self._empty

    @property
    def nbytes(self) -> int:
        return 0 if self._values is None else self._values.nbytes

    def _ensure(self, dtype: torch.dtype) -> Tensor:
        """The tensor, at least as wide as ``dtype``; a wider one of an earlier step holds the same values."""
        if self._values is None:
            self._values = self._store.zeros(self._numel, dtype)
        elif torch.promote_types(self._values.dtype, dtype) != self._values.dtype:
            narrow = self._values
            self._values = self._store.zeros(self._numel, dtype)
            self._values.copy_(narrow)
        return self._values
