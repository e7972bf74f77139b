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

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_zero import ops
from lightning_zero.engine.freed import mark_freed, mark_gathered
from lightning_zero.engine.gradients import GradientLog
from lightning_zero.engine.layout import Segment
from lightning_zero.engine.master import CopyMaster, Master, NoMaster, SplitMaster
from lightning_zero.engine.memory_format import MemoryFormat
from lightning_zero.engine.placement import Placement
from lightning_zero.engine.sharded_init import ShardedParameter, whole_values
from lightning_zero.engine.stores import note_freed
from lightning_zero.engine.timers import Phase, timed

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class BucketState(Enum):
    """Which parameter values a rank holds."""

    SHARDED = auto()  # the shard only; `flat` has no memory and its parameters are freed
    GATHERING = auto()  # shards are on their way into `flat`; its parameters are still freed
    GATHERED = auto()  # `flat` holds the current values of all shards
    STALE = auto()  # `flat` holds values from before the last update of the shards


class ParameterSpec(NamedTuple):
    """A parameter and its name in the module tree (its first, where it is tied)."""

    name: str
    parameter: Parameter


def checksum(values: Tensor) -> Tensor:
    """The sum of the bits of a 1-D tensor as 64-bit integers; 0-dim int64 on its device."""
    # Eight bytes at a time, several times as fast as elements; a slice may begin and end inside of eight.
    width = 8 // values.itemsize
    start = min(-values.storage_offset() % width, values.numel())
    stop = start + (values.numel() - start) // width * width
    total = torch.cat([values[:start], values[stop:]]).view(_INTEGERS[values.itemsize]).sum()
    return total + values[start:stop].view(torch.int64).sum() if stop > start else total


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
        self.name = name
        self.names = tuple(spec.name for spec in specs)
        self.parameters = tuple(spec.parameter for spec in specs)
        self.formats = tuple(MemoryFormat.of(p) for p in self.parameters)
        self.dtype = dtype
        self.optimized = optimized
        self.placement = placement
        self.timers = placement.mesh.timers
        self.layout = placement.layout(tuple(p.numel() for p in self.parameters), dtype)
        self.segments = self.layout.segments(placement.mesh.shard.rank)
        self.index = {id(p): i for i, p in enumerate(self.parameters)}
        self.state = BucketState.GATHERED
        self.pins = 0  # open `gathered_parameters` contexts: resharding waits for them
        self.gradients = GradientLog(placement.optimizer_store, self.layout.shard_numel, placement.precision.grad_dtype)
        self.received = [False] * len(self.parameters)  # gradient seen on this rank since zero_grad
        self._cleared: set[int] = set()  # parameters whose gradients were cleared since the last one arrived
        self._wide: Tensor | None = None  # 1-D, Ψ, the master's dtype: see `widen`
        self._narrow: list[Tensor] = []  # the views of `flat` that parameters were before it
        self._partial: Tensor | None = None  # 1-D fp32, Ψ: 16-bit gradients summed over micro-batches before reduction
        self._window: Tensor | None = None  # 1-D, Ψ/S: micro-batches of a step that replicas have not summed yet
        self._await_shards: Callable[[], None]  # ends the gather that has begun
        self._adopt()

    # ------------------------------------------------------------------------------------------------ construction

    def _adopt(self) -> None:
        """Take the parameters' values (rank 0's), make shard and master from them, then cast."""
        placement, layout = self.placement, self.layout
        self._initial_dtype = self.parameters[0].dtype
        start, stop = layout.shard_range(placement.mesh.shard.rank)
        sharded = self.shards_params and any(isinstance(p, ShardedParameter) for p in self.parameters)
        if sharded:  # the whole bucket never exists
            self.flat = torch.empty(layout.padded_numel, dtype=self.dtype, device=placement.device)
        else:
            full = self._initial_values()
            self.flat = full if full.dtype == self.dtype else full.to(self.dtype)
        self.shard = self.flat[start:stop]
        owned = []  # what becomes of this rank's part of the values
        if self.shards_params:
            self.shard = placement.param_store.zeros(layout.shard_numel, self.dtype)
            owned.append(self.shard)
        copy = self._master_copy()
        owned += [] if copy is None else [copy]
        if sharded:
            self._distribute(owned)
        else:
            for target in owned:
                target.copy_(full[start:stop])
        self.master: Master = NoMaster(self.shard) if copy is None else CopyMaster(self.shard, copy)
        for view, parameter in zip(self._views(self.flat), self.parameters, strict=True):
            parameter.data = view
        self._remember()
        self.reshard()

    def _initial_values(self) -> Tensor:
        """The whole bucket at full precision: 1-D, Ψ, on the device."""
        full = torch.zeros(self.layout.padded_numel, dtype=self._initial_dtype, device=self.placement.device)
        for view, parameter in zip(self._views(full), self.parameters, strict=True):
            view.copy_(whole_values(parameter))
        return self.placement.mesh.world.broadcast_(full, f"broadcast the initial {self.name}")

    def _distribute(self, owned: Sequence[Tensor]) -> None:
        """Copy this rank's part of the values to the tensors ``owned``, laid out as the shard, one parameter at a time.

        Parameters become views of ``flat``, which frees their own memory.
        """
        segments = {segment.param: segment for segment in self.segments}
        for index, parameter in enumerate(self.parameters):
            values = self._broadcast(index)
            if (segment := segments.get(index)) is not None:
                for target in owned:
                    part = values[segment.param_start : segment.param_start + segment.numel]
                    target[segment.start : segment.stop].copy_(part)
            del values  # before the next one is gathered
            parameter.data = self.view(self.flat, index)
            note_freed(parameter, parameter.nbytes)

    def _broadcast(self, index: int) -> Tensor:
        """The whole values of one parameter, the same on all ranks; 1-D."""
        sharded = isinstance(self.parameters[index], ShardedParameter)
        values = self.formats[index].flatten(whole_values(self.parameters[index])).to(self.placement.device)
        what = f"broadcast the initial {self.names[index]}"
        return values if sharded else self.placement.mesh.world.broadcast_(values, what)

    def _master_copy(self) -> Tensor | None:
        """Room for a master in a tensor of its own, where there must be one: 1-D, Ψ/S, in the optimizer's store."""
        form = self.placement.master(self._initial_dtype, self.dtype, self.optimized)
        if not form.pieces:
            return None
        copy = self.placement.optimizer_store.zeros(self.shard.numel(), form.dtype)
        if copy.device.type == "cpu":
            ops.zero_(copy)  # its pages lie near the threads that will update them
        return copy

    @torch.no_grad()
    def lay_out_master(self, split: bool) -> None:
        """Keep fp32 masters of 16-bit parameters, on the host, as the CPU optimizers do, split or whole.

        bf16 ties round away from zero then, in both layouts. The same call on all ranks.
        """
        fitting = isinstance(self.master, SplitMaster) if split else getattr(self.master, "ties", None) == "away"
        if self.dtype.itemsize == 2 and not fitting and not isinstance(self.master, NoMaster):
            if self.state is BucketState.GATHERED or not self.shards_params:
                edit = self.hidden_edit()
                self.absorb_edits(everything=edit is not None and bool(edit))
            store, numel = self.placement.optimizer_store, self.shard.numel()
            values = self.master.read(0, numel)
            if split:
                pieces = self.placement.split_master(self.dtype).pieces
                remainder, *high = (store.zeros(numel, dtype) for dtype in pieces)
                self.master = SplitMaster(self.shard, high[0] if high else self.shard, remainder)
                self.master.keep(0, values.to("cpu", torch.float32))
            else:
                self.master = CopyMaster(self.shard, values, ties="away")
            self.master.write(0, numel)
            self.mark_updated(range(len(self.parameters)))

    def optimize(self) -> None:
        """Make ready for updates: a parameter of the bucket has joined an optimizer. The same call on all ranks."""
        if not self.optimized:
            self.optimized = True
            if isinstance(self.master, NoMaster) and (copy := self._master_copy()) is not None:
                self.master = CopyMaster(self.shard, copy.copy_(self.shard))

    def view(self, flat: Tensor, index: int) -> Tensor:
        """Parameter ``index`` in ``flat``, any 1-D tensor that is laid out as the flat buffer."""
        offset = self.layout.offsets[index]
        return self.formats[index].view(flat[offset : offset + self.layout.numels[index]])

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [self.view(flat, index) for index in range(len(self.parameters))]

    @property
    def shards_params(self) -> bool:
        """Whether the parameters are freed outside the forward and backward of their unit."""
        return self.placement.sharding.shard_params

    def range_of(self, segment: Segment) -> slice:
        """The segment's elements in the flat buffer."""
        start = self.layout.offsets[segment.param] + segment.param_start
        return slice(start, start + segment.numel)

    # -------------------------------------------------------------------------------------------------- parameters

    @torch.no_grad()
    def begin_unshard(self) -> None:
        """Begin to give ``flat`` the current values of all shards; nothing happens where it has or will have them."""
        if self.state not in (BucketState.GATHERED, BucketState.GATHERING):
            self._begin_unshard()

    @timed(Phase.GATHER)
    def _begin_unshard(self) -> None:
        if self.state is BucketState.SHARDED:
            self.flat.untyped_storage().resize_(self.layout.padded_numel * self.dtype.itemsize)
        elif not self.shards_params:
            self.absorb_edits()  # the owned slice of `flat` is up to date, user code may have changed it since
        start, stop = self.layout.shard_range(self.placement.mesh.shard.rank)
        if self.shard.data_ptr() != self.flat.data_ptr() + start * self.dtype.itemsize:
            with self.placement.copying(self.placement.param_store):
                self.flat[start:stop].copy_(self.shard)
        self._await_shards = self.placement.mesh.shard.begin_all_gather_(self.flat, f"gather {self.name}")
        self.state = BucketState.GATHERING

    @torch.no_grad()
    def unshard(self) -> None:
        """Give ``flat`` the current values of all shards; nothing happens where it has them."""
        if self.state is not BucketState.GATHERED:
            self._end_unshard()

    @timed(Phase.GATHER)
    def _end_unshard(self) -> None:
        self.begin_unshard()
        self._await_shards()
        self.state = BucketState.GATHERED
        for parameter in self.parameters:
            mark_gathered(parameter)
        self._versions = [p._version for p in self.parameters]  # the owned slice is what it was

    @torch.no_grad()
    def reshard(self) -> None:
        """Free ``flat`` where the stage shards parameters and nobody holds them gathered."""
        if not self.shards_params or self.pins or self.state is BucketState.SHARDED:
            return
        if self.state is BucketState.GATHERING:
            self._await_shards()  # they must not arrive in freed memory
        elif self.state is BucketState.GATHERED:
            self.absorb_edits()
        self.flat.untyped_storage().resize_(0)
        self.state = BucketState.SHARDED
        self._mark_freed()

    def _mark_freed(self) -> None:
        for name, parameter in zip(self.names, self.parameters, strict=True):
            mark_freed(parameter, name)

    def mark_updated(self, indices: Iterable[int]) -> None:
        """The shards have new values for the parameters ``indices``: what is gathered is out of date."""
        if self.state is BucketState.GATHERING:
            self.unshard()  # what is on its way is out of date too
        # As after an update in place: backward through a graph from before it is an error, not a wrong gradient.
        torch.autograd.graph.increment_version([self.parameters[i] for i in indices])
        self._remember()
        # With one shard at stages 0 to 2, `flat` is the shard.
        if self.state is BucketState.GATHERED and (self.layout.shards > 1 or self.shards_params):
            self.state = BucketState.STALE

    def _remember(self) -> None:
        """Note what user code sees now, so that a change of it is noticed."""
        self._versions = [p._version for p in self.parameters]
        # An edit through `data` moves no version. Where the master is another tensor, the next update would undo it.
        # (At stage 3 too; a check per gather would cost too much there: `gathered_parameters(writeback=True)` it is.)
        watched = not isinstance(self.master, NoMaster) and not self.shards_params
        self._checksum = checksum(self.shard) if watched else None

    def hidden_edit(self) -> Tensor | None:
        """Whether the owned slice has other bits than were noted (0-dim bool on the device); ``None``: nobody asks."""
        return None if self._checksum is None else checksum(self.shard) != self._checksum

    @torch.no_grad()
    def absorb_edits(self, everything: bool = False) -> None:
        """Take over what user code changed in gathered parameters, in place or by assigning ``data``.

        Args:
            everything: also look at parameters whose version counter did not move (changes through ``.data``).
        """
        if self._wide is not None:
            return  # until they are views of `flat` again
        edited = set()
        for index, parameter in enumerate(self.parameters):
            if self._reattach(self.flat, index) or everything or parameter._version != self._versions[index]:
                edited.add(index)
        if not edited:
            return
        for segment in self.segments:
            if segment.param in edited:
                self.shard[segment.start : segment.stop].copy_(self.flat[self.range_of(segment)])
                self.master.derive(segment.start, segment.stop)
        self._remember()

    def _reattach(self, flat: Tensor, index: int) -> bool:
        """Make a parameter a view of ``flat`` again where ``data`` was assigned (``module.double()``); True if so."""
        parameter, start = self.parameters[index], self.layout.offsets[index] * flat.itemsize
        if parameter.data_ptr() == flat.data_ptr() + start or not parameter.numel():
            return False
        view = self.view(flat, index)
        view.copy_(parameter.data)
        parameter.data = view
        return True

    @torch.no_grad()
    def widen(self) -> bool:
        """Make parameters whole and at full precision, in memory that outlives resharding. Collective.

        Returns:
            Whether :meth:`narrow` must follow: they are views of another tensor than ``flat`` meanwhile.
        """
        if self._wide is not None:
            return False
        if self.master.dtype == self.dtype and not self.shards_params:
            self.unshard()
            return False
        if self.state is BucketState.GATHERED:
            self.absorb_edits()
        self._wide = self.gather_full(self.master.read(0, self.layout.shard_numel))
        for view, parameter in zip(self._views(self._wide), self.parameters, strict=True):
            mark_gathered(parameter)
            self._narrow.append(parameter.data)
            parameter.data = view
        return True

    @torch.no_grad()
    def narrow(self, writeback: bool) -> None:
        """Make the parameters views of ``flat`` again and take over what was changed in them meanwhile. Collective.

        Args:
            writeback: take over all values, rank 0's on all ranks; otherwise those whose version counter moved.
        """
        assert self._wide is not None
        wide, self._wide = self._wide, None
        edited = [
            index
            for index, parameter in enumerate(self.parameters)
            if self._reattach(wide, index) or writeback or parameter._version != self._versions[index]
        ]
        if writeback:
            self.placement.mesh.world.broadcast_(wide, f"write back {self.name}")
        for view, parameter in zip(self._narrow, self.parameters, strict=True):
            parameter.data = view
        self._narrow = []
        for index in edited:
            self._load_master(index, self.view(wide, index))
        if edited:
            self.mark_updated(edited)
        if self.state is BucketState.SHARDED:
            self._mark_freed()

    def publish(self, start: int, stop: int) -> None:
        """Derive elements ``[start, stop)`` of the parameter shard from the master, which was updated."""
        with self.placement.copying(self.placement.optimizer_store):
            self.master.write(start, stop)

    def load(self, index: int, values: Tensor) -> None:
        """Overwrite one parameter with full-precision ``values`` of its shape; ``flat`` becomes out of date."""
        self._load_master(index, values)
        self.mark_updated([index])

    def _load_master(self, index: int, values: Tensor) -> None:
        for segment in self.segments:
            if segment.param == index:
                into = self.master.read(segment.start, segment.stop)
                self.formats[index].read(values, segment.param_start, into)
                self.master.keep(segment.start, into)
                self.master.write(segment.start, segment.stop)

    def gather_full(self, shard: Tensor) -> Tensor:
        """All-gather any 1-D tensor laid out as the shard; returns the full one (padded) on the device. Collective."""
        full = torch.empty(self.layout.padded_numel, dtype=shard.dtype, device=self.placement.device)
        start, stop = self.layout.shard_range(self.placement.mesh.shard.rank)
        full[start:stop].copy_(shard)
        self.placement.mesh.shard.all_gather_(full, f"gather state of {self.name}")
        return full

    def release(self) -> None:
        """Give every parameter an ordinary tensor at full precision and forget the flat buffer. Collective."""
        if self.state is BucketState.GATHERED:
            self.absorb_edits()
        full = self.gather_full(self.master.read(0, self.layout.shard_numel))
        for view, parameter in zip(self._views(full), self.parameters, strict=True):
            mark_gathered(parameter)
            parameter.data = view.clone()

    # --------------------------------------------------------------------------------------------------- gradients

    def has_gradient(self) -> bool:
        """Whether there is a gradient that has not been reduced, of a parameter or summed over micro-batches."""
        held = self._partial is not None or self._window is not None
        return held or any(p.grad is not None for p in self.parameters)

    @timed(Phase.REDUCE)
    @torch.no_grad()
    def keep_local(self) -> None:
        """Between micro-batches where gradients stay whole: sum 16-bit gradients in fp32, leave others in ``grad``."""
        self._note_received()
        dtype = self.placement.sum_dtype(self.dtype)
        if dtype != self.dtype:
            # On every rank, with gradients or without: it decides the dtype of the reduction.
            if self._partial is None:
                self._partial = torch.zeros(self.layout.padded_numel, dtype=dtype, device=self.placement.device)
            for view, parameter in zip(self._views(self._partial), self.parameters, strict=True):
                if parameter.grad is not None:
                    view.add_(parameter.grad)
                    parameter.grad = None

    @timed(Phase.REDUCE)
    @torch.no_grad()
    def reduce(self, last: bool) -> None:
        """Average the gradients over all ranks, add the owned slice to the log and free the whole ones. Collective.

        Args:
            last: whether the step follows. Before that, replicas do not sum: their slices wait in a window.
        """
        self._note_received()
        mesh = self.placement.mesh
        fresh = mesh.shard.reduce_scatter(self._collect(), f"reduce the gradients of {self.name}")
        if mesh.replica.size > 1:
            if not last or self._window is not None:
                # As in the log: micro-batches add up in fp32.
                fresh = fresh.to(self.placement.sum_dtype(fresh.dtype))
            if self._window is not None:
                fresh = self._window.add_(fresh)
            self._window = None if last else fresh
            if not last:
                return
            mesh.replica.all_reduce_(fresh, f"sum the gradients of {self.name} over replicas")
        with self.placement.copying(self.placement.optimizer_store):
            self.gradients.add(fresh)

    def _note_received(self) -> None:
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.received[i] = True
        self._cleared = set()

    def _collect(self) -> Tensor:
        """Copy the gradients to a flat buffer in the reduce dtype, divided by the number of ranks; free them."""
        dtype = self.placement.reduce_dtype(self.dtype, summed=self._partial is not None)
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

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        """Multiply every gradient that is held by ``factor``: whole, partly summed or owned."""
        whole = [p.grad for p in self.parameters if p.grad is not None]
        held = [*whole, *(t for t in (self._partial, self._window) if t is not None)]
        if not self.gradients.empty:
            self.gradients.widen()
            held.append(self.gradients.read(0, self.layout.shard_numel))
        for gradient in held:
            gradient.mul_(factor)

    def clear_gradients(self, indices: Iterable[int], keep_used: bool = False) -> None:
        """Forget the gradients of some parameters, whole and owned; with ``keep_used`` they count as zero gradients."""
        chosen = set(indices)
        if not keep_used:
            for i in chosen:
                self.received[i] = False
        # Other ranks' gradients lie in this slice too: only when all are cleared is it empty.
        self._cleared |= chosen
        if len(self._cleared) == len(self.parameters) and not keep_used:
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
