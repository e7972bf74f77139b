"""Plans the memory and traffic of a training before it runs.

The plan is per rank. Ψ is the number of padded elements of a bucket, S the size of the shard group:

    parameters       Ψ in the parameter dtype, device; at stage 3 only while their unit computes
    param_shards     Ψ/S in the parameter dtype, stage 3; below it the shard is a part of ``parameters``
    masters          Ψ/S, see :meth:`BucketPlacement.master`
    optimizer_state  Ψ/S for each name of per-element state
    sharded_gradient Ψ/S in the dtype of :func:`sharded_gradient_dtype`
    gradients        of one backward, in the parameter dtype, until their bucket is reduced
    reduce_buffer    Ψ in the reduce dtype, unless gradients are reduced from where they lie, and memory of the
                     collective
    staging          host memory through which gradients and parameters pass, and device memory of gradients that are
                     being copied to the host: as much as the executor may keep, as if no copy ended before its wait;
                     also host memory of tiles on their way from and to a disk, and of activations in host memory

Sizes come from the functions by which the engine allocates. The peak and the traffic come from two steps in which the
runtime's own reducer and prefetcher run without tensors (``recording.py``). Imagined CPU ranks are assumed to read each
other's gradients. Not counted are: activations and temporary memory of a module's own backward, unless
there is a trace of them (``tracing.py``); copies of gradients that do not lie as their parameters do; tensors of a few
bytes (scalar state, checksums); buffers of NCCL and gloo (whose threads also keep the tensors of a collective for a
moment after its end); the copy of a background save, and temporary memory of an update of averages; full copies of the
module that callbacks keep; what user code does with gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.planning.account import NOTHING, Account, Bytes, Peak, state_of
from lightning_zero.planning.recording import RecordedBucket, RecordedRun, TracedParameters
from lightning_zero.planning.tracing import Trace
from lightning_zero.sharding.forms import BucketForm
from lightning_zero.sharding.mesh import Mesh
from lightning_zero.sharding.partition import parameters_by_unit, partition
from lightning_zero.sharding.placement import BucketPlacement, MasterForm
from lightning_zero.storage import TensorStore, device_type
from lightning_zero.update.attached import parameters_of
from lightning_zero.update.choice import choose_updater, kept_whole
from lightning_zero.update.cpu import block_of
from lightning_zero.update.footprint import Footprint
from lightning_zero.update.updaters import NativeOptimizer


@dataclass(frozen=True)
class BucketPlan:
    """The memory of one bucket on one rank; see the module's docstring.

    Attributes:
        name: names of its units.
        dtype: dtype of its parameters.
        numel: number of elements of its parameters.
        padded_numel: Ψ.
        unsharded: whether ``parameters`` are also held between the passes (stages 0 to 2).
        imbalance: if parameters are kept whole: the difference between the fullest and the average shard, as a fraction
            of the average; Ψ is larger by it.
    """

    name: str
    dtype: torch.dtype
    numel: int
    padded_numel: int
    unsharded: bool
    parameters: Bytes
    param_shards: Bytes
    masters: Bytes
    optimizer_state: Bytes
    sharded_gradient: Bytes
    gradients: Bytes
    reduce_buffer: Bytes
    imbalance: float = 0.0

    @property
    def held(self) -> Bytes:
        """The memory that is held between steps."""
        resting = self.param_shards + self.masters + self.optimizer_state + self.sharded_gradient
        return resting + self.parameters if self.unsharded else resting


@dataclass(frozen=True)
class Plan:
    """Memory and traffic of one rank.

    Attributes:
        buckets: the buckets in forward order.
        buffers: the module's buffers (statistics of BatchNorm, ...).
        staging: host memory through which gradients, parameters and tiles of a disk pass, at most.
        averages: second values of masters and buffers.
        peak: the peak of any step, including the first.
        sent: bytes per step after the first, by collective.
        calls: number of collectives per step after the first.
        copied: bytes per step after the first between device and host memory, ``"h2d"`` and ``"d2h"``.
        summed: bytes per step after the first of gradients that rest on a disk, written to and read from it.
        added: bytes per step after the first that the host reads and writes to add up micro-batches' gradients.
    """

    buckets: tuple[BucketPlan, ...]
    buffers: Bytes
    staging: Bytes
    peak: Peak
    sent: Mapping[str, int]
    calls: Mapping[str, int]
    copied: Mapping[str, int] = field(default_factory=dict)
    summed: int = 0
    added: int = 0
    averages: Bytes = NOTHING

    @property
    def held(self) -> Bytes:
        """The memory that is held between steps, after the first one."""
        return sum((bucket.held for bucket in self.buckets), self.buffers + self.averages + self.staging)

    @property
    def imbalance(self) -> float:
        """The difference between the fullest and the average shards over all buckets, as a fraction of the average."""
        total = sum(bucket.numel for bucket in self.buckets)
        return sum(bucket.numel * bucket.imbalance for bucket in self.buckets) / max(total, 1)

    def __str__(self) -> str:
        held = [(name.replace("_", " "), self._sum(name)) for name in _HELD]
        rows = [("parameters", sum((b.parameters for b in self.buckets if b.unsharded), NOTHING)), *held]
        places = ("device", "host", "disk") if self.held.disk else ("device", "host")
        lines = [f"{'MiB':<18}" + "".join(f"{place:>12}" for place in places)]
        if self.held.pinned:
            places = (*places, "pinned")
            lines[0] += f"{'pinned':>12}"
        rows += [("buffers", self.buffers), ("averages", self.averages), ("staging", self.staging), ("held", self.held)]
        for name, part in rows:
            lines.append(f"{name:<18}" + "".join(f"{getattr(part, place) / 2**20:>12.1f}" for place in places))
        lines.append(f"{'peak of a step':<18}{self.peak.device / 2**20:>12.1f}{self.peak.host / 2**20:>12.1f}")
        if (uneven := self.imbalance) > 0:
            lines.append(f"whole parameters: the fullest shards hold {uneven:.0%} more than the average")
        sent = ", ".join(f"{name} {nbytes / 2**20:.1f}" for name, nbytes in self.sent.items()) or "nothing"
        return "\n".join([*lines, f"sent in a step    {sent}"])

    def _sum(self, name: str) -> Bytes:
        return sum((getattr(bucket, name) for bucket in self.buckets), NOTHING)


_HELD = ("param_shards", "masters", "optimizer_state", "sharded_gradient")


def plan(
    module: nn.Module,
    placement: BucketPlacement,
    optimizers: Sequence[Optimizer] = (),
    *,
    native_optimizer: NativeOptimizer = "auto",
    units: Sequence[str | type[nn.Module]] | None = None,
    bucket_size_mb: float = 25.0,
    persistence_numel: int = 0,
    max_live_numel: int | None = None,
    prefetch_mb: float = 0.0,
    micro_batches: int = 1,
    update_in_backward: bool = False,
    dtypes: Mapping[int, torch.dtype] | None = None,
    trace: Trace | None = None,
    clips_by_value: bool = False,
    averages: Sequence[TensorStore | None] = (),
) -> Plan:
    """Plans what :class:`Engine` would hold, take and send with the same arguments, without memory of the model's size.

    Args:
        module: the module as it is given to the engine; it may be on the meta device, and it is not changed.
        placement: the placement of an engine, or one on :meth:`Mesh.imagined`. A placement that does not train plans an
            evaluation, in which a step is a forward. ``torch.device("meta")`` stands for a GPU that this machine lacks.
            Optimizers are tried on a small matrix on the device of the optimizer store.
        optimizers: optimizers of the module's parameters; without any, all gradients are reduced, and no state is
            counted.
        native_optimizer: see :func:`~lightning_zero.update.choose_updater`.
        units: see :func:`find_units`.
        bucket_size_mb: see :class:`Engine`.
        persistence_numel: see :class:`Engine`.
        max_live_numel: see :class:`Engine`.
        prefetch_mb: see :class:`Engine`.
        micro_batches: number of backward passes per step, >= 1.
        update_in_backward: see :class:`Engine`; for a training that makes its steps with a closure.
        dtypes: dtypes of the module's parameters before an engine made them 16-bit, by the ids of the parameters.
        trace: activations of a micro-batch, which the peak then includes; it also says whether units run under
            reentrant checkpointing, which at stage 3 gathers them once more. (Non-reentrant checkpointing recomputes
            inside the unit's backward, which has gathered it already.)
        averages: stores of second values of all weights, such as a moving average; see :meth:`Engine.make_shadow`.
        clips_by_value: whether all gradients are clipped by value, which makes 16-bit sharded gradients fp32.

    Returns:
        The memory of one rank in bytes, and the bytes that it sends and copies in a step.

    Raises:
        ValueError: ``micro_batches`` is less than 1, or :class:`Engine` would refuse the arguments.
    """
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches!r} must be at least 1")
    # The plan has its own groups, so that its traffic is not mixed with that of an engine.
    mesh = placement.mesh
    imagined = Mesh.imagined(mesh.shard.size, mesh.replica.size, mesh.world.rank)
    imagined.shard.strangers, imagined.replica.strangers = mesh.shard.strangers, mesh.replica.strangers
    placement = placement._replace(mesh=imagined, block=block_of(optimizers))
    optimized = [p for optimizer in optimizers for p in parameters_of(optimizer)] if optimizers else None
    whole = kept_whole(optimizers, placement.optimizer_store.device)
    unit_list, specs = partition(module, placement, optimized, units, bucket_size_mb, persistence_numel, dtypes, whole)
    forms = [BucketForm(spec, placement) for spec in specs]
    footprints = _footprints(forms, optimizers, placement, native_optimizer)
    rows = [_row(form, prints) for form, prints in zip(forms, footprints, strict=True)]
    buffers = {id(b): b.numel() * placement.precision.buffer_dtype(b.dtype).itemsize for b in module.buffers()}
    buffer_bytes = Bytes(device=sum(buffers.values()))
    pins = device_type(placement.device).can_pin
    activations = NOTHING if trace is None else Bytes.on_host(trace.on_host, pins)  # kept from step to step
    account = Account()
    # Optimizer state counts from the first step on, since a checkpoint may have been loaded.
    second = sum((_average(forms, footprints, store, buffer_bytes.device) for store in averages), NOTHING)
    held = account.take(sum((row.held for row in rows), buffer_bytes + second + activations))
    parameters = {
        name: [spec.parameter for spec in specs] for name, specs in parameters_by_unit(module, unit_list).items()
    }
    names = {id(spec.parameter): spec.name for form in forms for spec in form.spec.specs}
    watched = None if trace is None else TracedParameters(trace, names)
    run = RecordedRun(
        unit_list,
        parameters,
        forms,
        footprints,
        placement,
        account,
        max_live_numel,
        prefetch_mb,
        trace is not None and trace.recomputed,
        held.disk,
        update_in_backward,
        watched,
        clips_by_value,
    )
    for first in (True, False):  # the first step learns the order of units
        run.reset_traffic()
        if placement.trains:
            run.step(micro_batches, len(optimizers), first)
        else:
            run.evaluate()
    sent, calls = run.traffic()
    rows = [_with_gradients(row, bucket) for row, bucket in zip(rows, run.buckets, strict=True)]
    copied = Counter(run.copied)
    if trace is not None and placement.trains:
        copied.update({direction: micro_batches * nbytes for direction, nbytes in trace.copied.items()})
    traffic = sent, calls, copied, run.summed, run.added
    return Plan(tuple(rows), buffer_bytes, run.staging + activations, account.peak, *traffic, second)


def _footprints(
    forms: Sequence[BucketForm], optimizers: Sequence[Optimizer], placement: BucketPlacement, native: NativeOptimizer
) -> list[list[Footprint]]:
    """The footprints of the optimizers that update each bucket, by bucket."""
    footprints: list[list[Footprint]] = [[] for _ in forms]
    for optimizer in optimizers:
        members = {id(p) for p in parameters_of(optimizer)}
        mine = [i for i, form in enumerate(forms) if any(id(p) in members for p in form.parameters)]
        updater = choose_updater(optimizer, placement, [forms[i].master for i in mine], native)
        for i in mine:
            footprints[i].append(updater.footprint(forms[i]))
    return footprints


def _row(form: BucketForm, footprints: Sequence[Footprint]) -> BucketPlan:
    """A bucket before its first backward."""
    placement, layout = form.placement, form.layout
    sharded, size = placement.sharding.shard_params, form.dtype.itemsize
    master = _master(form, footprints)
    # Each of the optimizers that share a bucket keeps state for the whole shard.
    resting, shards = placement.optimizer_store.resting_memory, placement.param_store
    state = sum(
        (state_of(placement.optimizer_store, footprint, layout.shard_numel) for footprint in footprints), NOTHING
    )

    return BucketPlan(
        name=", ".join(form.spec.units),
        dtype=form.dtype,
        numel=layout.numel,
        padded_numel=layout.padded_numel,
        unsharded=not sharded,
        parameters=Bytes(device=layout.padded_numel * size),
        param_shards=Bytes.of(shards.resting_memory, layout.shard_numel * size, shards.pins) if sharded else NOTHING,
        masters=Bytes.of(
            resting,
            sum(dtype.itemsize for dtype in master.pieces) * layout.shard_numel,
            placement.optimizer_store.pins and master.crosses,
        ),
        optimizer_state=state,
        sharded_gradient=NOTHING,
        gradients=Bytes(device=sum(p.numel() for p in form.parameters if p.requires_grad) * size * placement.trains),
        reduce_buffer=NOTHING,
        imbalance=layout.imbalance,
    )


def _average(
    forms: Sequence[BucketForm], footprints: Sequence[Sequence[Footprint]], store: TensorStore | None, buffers: int
) -> Bytes:
    """Second values of masters and of so many bytes of buffers; see :class:`~lightning_zero.engine.Shadow`."""
    total = Bytes.of("device" if store is None else store.memory, buffers)
    for form, prints in zip(forms, footprints, strict=True):
        placement, master = form.placement, _master(form, prints)
        rests = store or placement.optimizer_store
        crosses = rests.memory != (placement.optimizer_store.memory if master.pieces else placement.shard_memory)
        dtype = placement.master(form.dtype, form.dtype, optimized=True).dtype
        total += Bytes.of(rests.memory, form.layout.shard_numel * dtype.itemsize, rests.pins and crosses)
    return total


def _master(form: BucketForm, footprints: Sequence[Footprint]) -> MasterForm:
    """The master of a bucket, which an optimizer may make anew."""
    return footprints[-1].master if footprints else form.master


def _with_gradients(row: BucketPlan, bucket: RecordedBucket) -> BucketPlan:
    """The bucket after its steps."""
    gradients = bucket.gradients
    return replace(row, sharded_gradient=gradients.sharded, reduce_buffer=Bytes(device=gradients.reduction))
