"""What a training holds in memory and sends, known before it runs.

Per rank, with Ψ the padded elements of a bucket, S the size of the shard group, R the replicas, k the micro-batches:

    parameters       Ψ in the parameter dtype, device; at stage 3 only while their unit computes
    param_shards     Ψ/S in the parameter dtype, stage 3; below it the shard is a part of ``parameters``
    masters          Ψ/S, see :meth:`Placement.master`
    optimizer_state  Ψ/S for each name of per-element state
    gradient_log     Ψ/S in the dtype of :func:`log_dtype`
    gradients        of one backward, in the parameter dtype, until their bucket is reduced
    reduce_buffer    Ψ in the reduce dtype, and what the collective takes while it runs

Sizes come from the functions by which the engine allocates. Not counted: activations, and what a module's own backward
takes in passing; tensors of a few bytes (scalar state, checksums); buffers of NCCL and gloo (whose threads also hold on
to the tensors of a collective for a moment after its end).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero.engine.gradients import log_dtype
from lightning_zero.engine.layout import FlatLayout, Segment
from lightning_zero.engine.partition import ROOT, BucketSpec, parameters_by_unit, partition
from lightning_zero.engine.placement import MasterForm, Placement
from lightning_zero.engine.stores import Memory
from lightning_zero.engine.takeover import parameters_of

_SMALL_ITEM = 8  # bytes of each number in the step's small all-reduce: float64


@dataclass(frozen=True)
class Bytes:
    """An amount of memory on each side."""

    device: int = 0
    host: int = 0

    @classmethod
    def of(cls, memory: Memory, nbytes: int) -> Bytes:
        """``nbytes`` in one of the memories."""
        return cls(host=nbytes) if memory == "host" else cls(device=nbytes)

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.host + other.host)

    def __sub__(self, other: Bytes) -> Bytes:
        return Bytes(self.device - other.device, self.host - other.host)

    @property
    def total(self) -> int:
        """Both together."""
        return self.device + self.host


NOTHING = Bytes()


class Footprint(NamedTuple):
    """What an updater makes of a bucket.

    Attributes:
        master: its master, as the updater lays it out.
        state: dtypes of the per-element state after the first update, by name.
        scratch: bytes that an update takes in passing, where the master is.
    """

    master: MasterForm
    state: Mapping[str, torch.dtype]
    scratch: int


class PlannedUpdater(Protocol):
    """What the plan asks of an updater (see :mod:`lightning_zero.optim`)."""

    optimizer: Optimizer

    def footprint(self, bucket: BucketForm) -> Footprint:
        """What updates of ``bucket`` by this optimizer will hold and take."""
        ...


ChooseUpdater = Callable[[Optimizer, Placement, Sequence[MasterForm]], PlannedUpdater]


@dataclass(frozen=True)
class BucketForm:
    """A bucket before any of its tensors is made.

    Attributes:
        spec: its parameters.
        of: what the buckets of the engine share.
    """

    spec: BucketSpec
    of: Placement

    @property
    def placement(self) -> Placement:
        """Its own."""
        return self.spec.placed(self.of)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """In module order."""
        return tuple(spec.parameter for spec in self.spec.specs)

    @property
    def dtype(self) -> torch.dtype:
        """That forward and backward see."""
        return self.spec.dtype

    @cached_property
    def layout(self) -> FlatLayout:
        """Offsets in the flat buffer."""
        return self.placement.layout(tuple(p.numel() for p in self.parameters), self.dtype)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Those of this rank."""
        return self.layout.segments(self.placement.mesh.shard.rank)

    @cached_property
    def master(self) -> MasterForm:
        """The master that the bucket is made with."""
        return self.placement.master(self.spec.given, self.dtype, self.spec.optimized)

    @property
    def trained(self) -> bool:
        """Whether it is reduced and updated."""
        return self.spec.optimized and any(p.requires_grad for p in self.parameters)

    def summed(self, micro_batches: int) -> bool:
        """Whether whole gradients add up in a buffer of their own before they are reduced."""
        whole = not self.placement.sharding.shard_grads and micro_batches > 1
        return whole and self.placement.sum_dtype(self.dtype) != self.dtype

    def reduce_dtype(self, micro_batches: int) -> torch.dtype:
        """The dtype in which its gradients are sent."""
        return self.placement.reduce_dtype(self.dtype, self.summed(micro_batches))

    def replicas_wait(self, micro_batches: int) -> bool:
        """Whether reduced micro-batches add up in a window until the replicas sum them."""
        return self.placement.sharding.shard_grads and micro_batches > 1 and self.placement.mesh.replica.size > 1

    def arriving_dtype(self, micro_batches: int) -> torch.dtype:
        """The dtype in which owned gradients come to the log."""
        dtype = self.reduce_dtype(micro_batches)
        return self.placement.sum_dtype(dtype) if self.replicas_wait(micro_batches) else dtype

    def log_dtypes(self, micro_batches: int) -> list[torch.dtype]:
        """The dtypes that the gradient log takes one after the other, during the first step."""
        arriving, fixed = self.arriving_dtype(micro_batches), self.placement.precision.grad_dtype
        several = self.placement.sharding.shard_grads and micro_batches > 1 and not self.replicas_wait(micro_batches)
        dtypes = [log_dtype(fixed, arriving, again) for again in (False, *([True] if several else []))]
        return list(dict.fromkeys(dtypes))


@dataclass(frozen=True)
class BucketPlan:
    """What one bucket takes on one rank; see the module's docstring.

    Attributes:
        name: of its units.
        dtype: of its parameters.
        numel: elements of its parameters.
        padded_numel: Ψ.
        whole: whether ``parameters`` are whole between the passes too (stages 0-2).
    """

    name: str
    dtype: torch.dtype
    numel: int
    padded_numel: int
    whole: bool
    parameters: Bytes
    param_shards: Bytes
    masters: Bytes
    optimizer_state: Bytes
    gradient_log: Bytes
    gradients: Bytes
    reduce_buffer: Bytes

    @property
    def held(self) -> Bytes:
        """Between steps."""
        resting = self.param_shards + self.masters + self.optimizer_state + self.gradient_log
        return resting + self.parameters if self.whole else resting


class Peak(NamedTuple):
    """The most that is taken at any moment of a step.

    Attributes:
        device: on the device.
        host: on the host.
        total: of both together, which is less than their sum where they peak at different moments.
    """

    device: int
    host: int
    total: int


@dataclass(frozen=True)
class Plan:
    """What one rank holds and sends.

    Attributes:
        buckets: in forward order.
        buffers: the module's buffers (statistics of BatchNorm, ...).
        peak: of any step, the first included.
        sent: bytes per step after the first, by collective.
        calls: number of collectives per step after the first.
    """

    buckets: tuple[BucketPlan, ...]
    buffers: Bytes
    peak: Peak
    sent: Mapping[str, int]
    calls: Mapping[str, int]

    @property
    def held(self) -> Bytes:
        """Between steps, after the first one."""
        return sum((bucket.held for bucket in self.buckets), self.buffers)

    def __str__(self) -> str:
        held = [(name.replace("_", " "), self._sum(name)) for name in _HELD]
        rows = [("parameters", sum((b.parameters for b in self.buckets if b.whole), NOTHING)), *held]
        lines = [f"{'MiB':<18}{'device':>12}{'host':>12}"]
        for name, part in (*rows, ("buffers", self.buffers), ("held", self.held)):
            lines.append(f"{name:<18}{part.device / 2**20:>12.1f}{part.host / 2**20:>12.1f}")
        lines.append(f"{'peak of a step':<18}{self.peak.device / 2**20:>12.1f}{self.peak.host / 2**20:>12.1f}")
        sent = ", ".join(f"{name} {nbytes / 2**20:.1f}" for name, nbytes in self.sent.items()) or "nothing"
        return "\n".join([*lines, f"sent in a step    {sent}"])

    def _sum(self, name: str) -> Bytes:
        return sum((getattr(bucket, name) for bucket in self.buckets), NOTHING)


_HELD = ("param_shards", "masters", "optimizer_state", "gradient_log")


def plan(
    module: nn.Module,
    placement: Placement,
    optimizers: Sequence[Optimizer] = (),
    choose_updater: ChooseUpdater | None = None,
    *,
    units: Sequence[str | type[nn.Module]] | None = None,
    bucket_size_mb: float = 25.0,
    persistence_numel: int = 0,
    max_live_numel: int | None = None,
    micro_batches: int = 1,
    recomputed: bool = False,
    dtypes: Mapping[int, torch.dtype] | None = None,
) -> Plan:
    """What :class:`Engine` would hold, take and send with the same arguments; nothing of model size is allocated.

    Args:
        module: as it is given to the engine; it may be on the meta device, and it is not changed.
        placement: that of an engine, or one on :meth:`Mesh.imagined`. ``torch.device("meta")`` stands for a GPU that
            this machine lacks; on the optimizer store's device, optimizers are tried on a small matrix.
        optimizers: over the module's parameters; without any, all that require a gradient are reduced, and no state
            is counted.
        choose_updater: :func:`lightning_zero.optim.choose_updater`; the engine knows no optimizers.
        units: see :func:`find_units`.
        bucket_size_mb: see :class:`Engine`.
        persistence_numel: see :class:`Engine`.
        max_live_numel: see :class:`Engine`.
        micro_batches: backward passes per step, >= 1.
        recomputed: units run under reentrant checkpointing, which at stage 3 gathers them once more. (Non-reentrant
            checkpointing recomputes inside the unit's backward, which has gathered it.)
        dtypes: of the module's parameters, by their ids, before an engine has made them 16-bit.

    Raises:
        ValueError: ``micro_batches`` is less than 1, or optimizers are given without ``choose_updater``; and what
            :class:`Engine` refuses.
    """
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches!r} must be at least 1")
    if optimizers and choose_updater is None:
        raise ValueError("optimizers need choose_updater=lightning_zero.optim.choose_updater")
    optimized = [p for optimizer in optimizers for p in parameters_of(optimizer)] if optimizers else None
    unit_list, specs = partition(module, placement, optimized, units, bucket_size_mb, persistence_numel, dtypes)
    forms = [BucketForm(spec, placement) for spec in specs]
    footprints: list[list[Footprint]] = [[] for _ in forms]
    for optimizer in optimizers:
        assert choose_updater is not None
        members = {id(p) for p in parameters_of(optimizer)}
        mine = [i for i, form in enumerate(forms) if any(id(p) in members for p in form.parameters)]
        updater = choose_updater(optimizer, placement, [forms[i].master for i in mine])
        for i in mine:
            footprints[i].append(updater.footprint(forms[i]))
    rows = [_row(form, prints, micro_batches) for form, prints in zip(forms, footprints, strict=True)]
    sent, calls = _traffic(forms, micro_batches, recomputed, len(optimizers))
    buffers = {id(b): b.numel() * placement.precision.buffer_dtype(b.dtype).itemsize for b in module.buffers()}
    draft = Plan(tuple(rows), Bytes(device=sum(buffers.values())), Peak(0, 0, 0), sent, calls)
    by_unit = parameters_by_unit(module, unit_list)
    # Of the root some gradients come first (a head's) and some last (an embedding's): all are taken as the first.
    arrivals = [[s.parameter for s in by_unit[name]] for name in (ROOT, *(u.name for u in reversed(unit_list)))]
    step = _Step(forms, rows, footprints, placement, micro_batches, draft.held, max_live_numel)
    return replace(draft, peak=step.run(arrivals))


def _row(form: BucketForm, footprints: Sequence[Footprint], micro_batches: int) -> BucketPlan:
    placement, layout = form.placement, form.layout
    sharded, size = placement.sharding.shard_params, form.dtype.itemsize
    master = footprints[-1].master if footprints else form.master
    # Optimizers that share a bucket keep state of the whole shard each.
    state = [dtype for footprint in footprints for dtype in footprint.state.values()]
    reduce_dtype = form.reduce_dtype(micro_batches)
    reduced = layout.padded_numel * reduce_dtype.itemsize
    log = form.log_dtypes(micro_batches)[-1].itemsize if form.trained else 0

    def stored(itemsize: int) -> Bytes:
        return Bytes.of(placement.optimizer_store.memory, itemsize * layout.shard_numel)

    return BucketPlan(
        name=", ".join(form.spec.units),
        dtype=form.dtype,
        numel=layout.numel,
        padded_numel=layout.padded_numel,
        whole=not sharded,
        parameters=Bytes(device=layout.padded_numel * size),
        param_shards=Bytes.of(placement.param_store.memory, layout.shard_numel * size) if sharded else NOTHING,
        masters=stored(sum(dtype.itemsize for dtype in master.pieces)),
        optimizer_state=stored(sum(dtype.itemsize for dtype in state)),
        gradient_log=stored(log),
        gradients=Bytes(device=sum(p.numel() for p in form.parameters if p.requires_grad) * size),
        reduce_buffer=Bytes(
            device=reduced + placement.mesh.shard.scratch(reduced, reduce_dtype, placement.device)
            if form.trained
            else 0
        ),
    )


def _traffic(
    forms: Iterable[BucketForm], micro_batches: int, recomputed: bool, optimizers: int
) -> tuple[Counter[str], Counter[str]]:
    """Bytes and calls of a step: the table of stages, x (S-1)/S, 2(Ψ/S)(R-1)/R for replicas, one small all-reduce."""
    sent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    numbers = optimizers
    for form in forms:
        mesh, sharding = form.placement.mesh, form.placement.sharding
        numbers += len(form.parameters) + 1
        # Of a root's bucket one per micro-batch; of a unit's one in forward, one in backward.
        per_micro_batch = 1 if form.spec.in_root else 2 + recomputed
        gathers = micro_batches * per_micro_batch if sharding.shard_params else int(form.trained)
        reductions = (micro_batches if sharding.shard_grads else 1) * form.trained
        nbytes = form.layout.padded_numel * form.reduce_dtype(micro_batches).itemsize
        window = form.layout.shard_numel * form.arriving_dtype(micro_batches).itemsize
        for group, name, size, times in (
            (mesh.shard, "all_gather", form.layout.padded_numel * form.dtype.itemsize, gathers),
            (mesh.shard, "reduce_scatter", nbytes, reductions),
            (mesh.replica, "all_reduce", window, int(form.trained)),
        ):
            if group.size > 1 and times:
                sent[name] += times * group.traffic(name, size)
                calls[name] += times
    world, device = form.placement.mesh.world, form.placement.device
    if world.size > 1:
        numbers += 2 * world.size  # digests
        sent["all_reduce"] += world.traffic("all_reduce", _SMALL_ITEM * (numbers + world.padding(numbers, device)))
        calls["all_reduce"] += 1
    return sent, calls


@dataclass
class _Whole:
    """Whole gradients of one bucket."""

    form: BucketForm
    row: BucketPlan
    arrived: set[int] = field(default_factory=set)  # ids of parameters that have a gradient
    seen: set[int] = field(default_factory=set)  # ids of those that got one in this backward
    summed: bool = False  # whether there is a sum of micro-batches
    window: bool = False
    logged: int = 0  # arrivals in the log

    @property
    def expected(self) -> set[int]:
        return {id(p) for p in self.form.parameters if p.requires_grad}


class _Step:
    """Goes through a step as the engine does and notes how much memory is taken."""

    def __init__(
        self,
        forms: Sequence[BucketForm],
        rows: Sequence[BucketPlan],
        footprints: Sequence[Sequence[Footprint]],
        placement: Placement,
        micro_batches: int,
        held: Bytes,
        max_live_numel: int | None,
    ) -> None:
        self._placement = placement
        self._limit = max_live_numel
        self._micro_batches = micro_batches
        self._footprints = footprints
        self._buckets = [_Whole(form, row) for form, row in zip(forms, rows, strict=True)]
        self._of = {id(p): bucket for bucket in self._buckets for p in bucket.form.parameters}
        self._pending: list[_Whole] = []
        self._gathered: set[int] = set()  # ids of buckets
        self._now = held
        self._peak = Peak(held.device, held.host, held.total)

    def run(self, arrivals: Sequence[Sequence[Parameter]]) -> Peak:
        """The peak of a step in which gradients arrive so: the root's parameters, then those of units, last first."""
        for number in range(1, self._micro_batches + 1):
            self._backward(arrivals, last=number == self._micro_batches)
        for footprint in (f for footprints in self._footprints for f in footprints):
            self._touch(Bytes.of(self._memory_of(footprint.master), footprint.scratch))
        return self._peak

    def _memory_of(self, master: MasterForm) -> Memory:
        if master.pieces:
            return self._placement.optimizer_store.memory
        return self._placement.param_store.memory if self._placement.sharding.shard_params else "device"

    # ----------------------------------------------------------------------------------------------------- amounts

    def _take(self, amount: Bytes) -> None:
        self._now += amount
        self._touch(NOTHING)

    def _touch(self, amount: Bytes) -> None:
        """For a moment only."""
        most = self._now + amount
        self._peak = Peak(*map(max, self._peak, (most.device, most.host, most.total)))

    def _give(self, amount: Bytes) -> None:
        self._now -= amount

    # ---------------------------------------------------------------------------------------------------- backward

    def _backward(self, arrivals: Sequence[Sequence[Parameter]], last: bool) -> None:
        sharding = self._placement.sharding
        reduces = sharding.shard_grads or last
        self._pending = [b for b in reversed(self._buckets) if b.form.trained]
        units = [list({id(b): b for b in map(self._of.__getitem__, map(id, ps))}.values()) for ps in arrivals]
        for bucket in self._buckets:
            bucket.seen.clear()
        self._gather(units[0])
        for number, parameters in enumerate(arrivals):
            self._gather(units[number])
            ahead = units[number + 1] if number + 1 < len(units) else []
            if self._fits(ahead):
                self._gather(ahead)
            for parameter in reversed(parameters):
                if parameter.requires_grad:
                    self._arrive(parameter)
                    while not sharding.shard_params and reduces and self._pending and self._complete(self._pending[0]):
                        self._reduce(self._pending.pop(0), last)
            if sharding.shard_params and number > 0:
                for bucket in units[number]:
                    if bucket in self._pending and not bucket.form.spec.in_root:
                        self._pending.remove(bucket)
                        self._reduce(bucket, last)
                self._free([b for b in units[number] if not b.form.spec.in_root])
        for bucket in self._pending:
            if reduces:
                self._reduce(bucket, last)
            else:
                self._keep_local(bucket)
        self._free(self._buckets)

    def _fits(self, ahead: Iterable[_Whole]) -> bool:
        """Whether a unit is gathered while another computes; see :class:`Prefetcher`."""
        own = [b for b in self._buckets if not (b.row.whole or b.form.spec.in_root)]
        live = sum(b.row.padded_numel for b in own if id(b) in self._gathered or b in ahead)
        return self._limit is None or live <= self._limit

    def _gather(self, buckets: Iterable[_Whole]) -> None:
        for bucket in buckets:
            if not bucket.row.whole and id(bucket) not in self._gathered:
                self._gathered.add(id(bucket))
                self._take(bucket.row.parameters)

    def _free(self, buckets: Iterable[_Whole]) -> None:
        for bucket in buckets:
            if id(bucket) in self._gathered:
                self._gathered.remove(id(bucket))
                self._give(bucket.row.parameters)

    def _arrive(self, parameter: Parameter) -> None:
        bucket = self._of[id(parameter)]
        amount = Bytes(device=parameter.numel() * bucket.form.dtype.itemsize)
        bucket.seen.add(id(parameter))
        if id(parameter) in bucket.arrived:
            self._touch(amount)  # added to that of an earlier micro-batch
        else:
            bucket.arrived.add(id(parameter))
            self._take(amount)

    def _complete(self, bucket: _Whole) -> bool:
        return bucket.seen >= bucket.expected

    def _drop_gradients(self, bucket: _Whole) -> None:
        if bucket.arrived:
            self._give(bucket.row.gradients)
            bucket.arrived.clear()

    def _keep_local(self, bucket: _Whole) -> None:
        """See :meth:`Bucket.keep_local`."""
        if bucket.form.summed(self._micro_batches):
            if not bucket.summed:
                bucket.summed = True
                self._take(self._sum_of(bucket))
            self._drop_gradients(bucket)

    def _sum_of(self, bucket: _Whole) -> Bytes:
        itemsize = self._placement.sum_dtype(bucket.form.dtype).itemsize
        return Bytes(device=bucket.row.padded_numel * itemsize)

    def _reduce(self, bucket: _Whole, last: bool) -> None:
        """See :meth:`Bucket.reduce`."""
        form, mesh, device = bucket.form, self._placement.mesh, self._placement.device
        dtype, k = form.reduce_dtype(self._micro_batches), self._micro_batches
        buffer = Bytes(device=form.layout.padded_numel * dtype.itemsize)
        self._take(buffer)
        if bucket.summed:
            self._touch(buffer if dtype.itemsize < 4 else NOTHING)
        self._drop_gradients(bucket)
        if bucket.summed:
            self._give(self._sum_of(bucket))
            bucket.summed = False
        self._touch(Bytes(device=mesh.shard.scratch(buffer.device, dtype, device)))
        fresh = Bytes(device=form.layout.shard_numel * form.arriving_dtype(k).itemsize)
        self._give(buffer)
        self._take(fresh)
        if form.replicas_wait(k):
            if not bucket.window:
                bucket.window = True
                self._take(fresh)
            if not last:
                self._give(fresh)
                return
            self._give(fresh)
            bucket.window = False
        self._touch(Bytes(device=mesh.replica.scratch(fresh.device, form.arriving_dtype(k), device)))
        self._log(bucket, fresh)
        self._give(fresh)

    def _log(self, bucket: _Whole, fresh: Bytes) -> None:
        """See :meth:`GradientLog.add`; the log itself is held all the time."""
        store, dtypes = self._placement.optimizer_store, bucket.form.log_dtypes(self._micro_batches)
        bucket.logged += 1
        if bucket.logged == 2:
            narrow = bucket.form.layout.shard_numel * dtypes[0].itemsize if len(dtypes) > 1 else 0
            moved = fresh.device if store.device != self._placement.device else 0
            self._touch(Bytes.of(store.memory, narrow + moved))
