"""The memory of one rank of a training: the plan, the held memory, and changes of the setting that would take less."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine import Engine, engines_of
from lightning_zero.planning.account import Bytes
from lightning_zero.planning.plan import Plan, plan
from lightning_zero.planning.tracing import Trace
from lightning_zero.sharding import BucketPlacement, Mesh, MixedPrecisionPolicy, ShardingPolicy
from lightning_zero.storage import (
    OUT_OF_MEMORY,
    DeviceStore,
    DiskStore,
    Executor,
    HostStore,
    InlineExecutor,
    TensorStore,
    device_type,
    make_executor,
)
from lightning_zero.storage import Memory as MemoryName
from lightning_zero.storage.rested import nbytes_of
from lightning_zero.storage.streams import DEFAULT_BYTES, STAGING_BYTES
from lightning_zero.update.attached import parameters_of

_MIB = 2**20
# The memory that has run out, or is to be saved.
Side = Literal["device", "host", "either"]
# Messages of torch's host allocator and of mappings, and of device runtimes, whose errors have no types of their own.
_HOST_RAN_OUT = re.compile(r"CPUAllocator: (can't allocate memory|not enough memory)|Cannot allocate memory")
_RUNTIME_RAN_OUT = re.compile("|".join(map(re.escape, OUT_OF_MEMORY)))
# Names as in the plan, in its order.
_OF_BUCKETS = ("param_shards", "masters", "optimizer_state", "sharded_gradient")
_HELD = ("parameters", *_OF_BUCKETS, "buffers", "averages", "staging")


class _ImaginedExecutor(InlineExecutor):
    """Stands for the executor of an imagined GPU, with its limits."""

    overlaps = True

    def __init__(self, in_flight_bytes: int, staging_bytes: int) -> None:
        self.in_flight_bytes, self.staging_bytes = in_flight_bytes, staging_bytes


class Remedy(NamedTuple):
    """A change of the setting that takes less memory.

    Attributes:
        override: the override that the user types.
        device: bytes by which it lowers the peak of a rank on the device; negative if it raises it.
        host: the same for host memory; on a CPU rank, whose device and host are one memory, both are equal.
        plan: the plan with this change.
    """

    override: str
    device: int
    host: int
    plan: Plan

    def saved(self, side: Side) -> int:
        """The bytes that it saves on one side, or on that on which it saves more."""
        return max(self.device, self.host) if side == "either" else getattr(self, side)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The configurable values on which a plan depends, in the form in which the engine uses them."""

    sharding: ShardingPolicy
    shard_size: int
    optimizer_memory: MemoryName
    params_memory: MemoryName
    disk_buffer_bytes: int
    bucket_size_mb: float
    persistence_numel: int
    max_live_numel: int | None
    prefetch_mb: float
    overlap: bool
    precision: MixedPrecisionPolicy
    offload_fraction: float = 1.0
    split_masters: bool = False
    in_flight_bytes: int = DEFAULT_BYTES
    staging_bytes: int = STAGING_BYTES
    gradients_rest: bool | None = None
    update_in_backward: bool = False
    accumulate_on_device: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Memory:
    """The memory of one rank in a training or an evaluation; plans are made on request.

    Attributes:
        module: the module that runs; an engine may hold it.
        trains: whether masters, gradients and optimizer state are made.
        optimizers: optimizers of its parameters.
        micro_batches: most backward passes per step.
        setting: the configured setting.
        dtypes: dtypes of the parameters before an engine made them 16-bit, by the ids of the parameters.
        units: see :func:`~lightning_zero.planning.plan.plan`.
        native: see :func:`~lightning_zero.update.choose_updater`.
        device: the training device; ``meta`` stands for a GPU that this machine lacks.
        world_size: number of ranks.
        rank: number of this process's rank.
        candidates: changes that may take less: the override that the user types, and the setting with it.
        hint: a sentence about memory that the plan does not include.
        trace: activations of a micro-batch, which the plans then include.
        clips_by_value: see :func:`~lightning_zero.planning.plan.plan`.
        averages: see there.
    """

    module: nn.Module
    trains: bool
    optimizers: Sequence[Optimizer]
    micro_batches: int
    setting: Setting
    dtypes: Mapping[int, torch.dtype]
    units: Sequence[str | type[nn.Module]] | None
    native: Literal["auto", "off"]
    device: torch.device
    world_size: int
    rank: int
    candidates: Iterable[tuple[str, Setting]]
    hint: str
    trace: Trace | None = None
    clips_by_value: bool = False
    averages: Sequence[TensorStore | None] = ()

    @cached_property
    def plan(self) -> Plan:
        """The plan: bytes that the rank holds, needs at its peak and sends."""
        return self.plan_of(self.setting)

    @cached_property
    def changes(self) -> dict[str, Plan]:
        """The plans of the candidates that change anything, by what the user types."""
        found = {}
        for typed, setting in self.candidates:
            with contextlib.suppress(ValueError):  # these optimizers cannot train with it
                if (planned := self.plan_of(setting)) != self.plan:
                    found[typed] = planned
        return found

    def remedies(self, side: Side = "either") -> list[Remedy]:
        """Changes that take less memory on a side; the one that saves most there comes first."""
        device, host = self._peaks(self.plan)
        found = []
        for typed, other in self.changes.items():
            on_device, on_host = self._peaks(other)
            found.append(Remedy(typed, device - on_device, host - on_host, other))
        helpful = (remedy for remedy in found if remedy.saved(side) > 0)
        return sorted(helpful, key=lambda remedy: remedy.saved(side), reverse=True)

    def report(self, side: Side = "either") -> RenderableType:
        """Returns plan, held memory and remedies, to be printed by rich.

        Args:
            side: the memory that the remedies save.
        """
        engine = next(iter(engines_of(self.module)), None)  # none if memory ran out while it was made
        held = {} if engine is None else held_by(engine)
        return Group(
            _table(self.plan, held, self.rank, device_type(self.device).peak_bytes(self.device)),
            *self._advice(side),
            self.hint,
        )

    def plan_of(self, setting: Setting) -> Plan:
        """The plan with another setting.

        Raises:
            ValueError: these optimizers cannot train with the setting.
        """
        size = setting.shard_size
        # Ranks of one shard group are neighbours.
        mesh = Mesh.imagined(size, self.world_size // size, self.rank)
        executor: Executor = (
            _ImaginedExecutor(setting.in_flight_bytes, setting.staging_bytes)
            if self.device.type == "meta" and setting.overlap
            else make_executor(self.device, setting.overlap, setting.in_flight_bytes, setting.staging_bytes)
        )
        stores: dict[MemoryName, TensorStore] = {
            "device": DeviceStore(self.device),
            "host": HostStore(pin_for=self.device),
            "disk": DiskStore(None, executor, setting.disk_buffer_bytes, pin_for=self.device),
        }
        placement = BucketPlacement(
            mesh,
            setting.sharding,
            setting.precision,
            self.device,
            stores[setting.optimizer_memory],
            stores[setting.params_memory],
            executor,
            trains=self.trains,
            offload_fraction=setting.offload_fraction,
            split_masters=setting.split_masters,
            gradients_rest=setting.gradients_rest,
            accumulate_on_device=setting.accumulate_on_device,
        )
        return plan(
            self.module,
            placement,
            self.optimizers,
            native_optimizer=self.native,
            units=self.units,
            bucket_size_mb=setting.bucket_size_mb,
            persistence_numel=setting.persistence_numel,
            max_live_numel=setting.max_live_numel,
            prefetch_mb=setting.prefetch_mb,
            micro_batches=self.micro_batches,
            update_in_backward=setting.update_in_backward,
            dtypes=self.dtypes,
            trace=self.trace,
            clips_by_value=self.clips_by_value,
            averages=self.averages,
        )

    def _peaks(self, planned: Plan) -> tuple[int, int]:
        """The peaks of device and host memory; on CPU ranks both are the same memory."""
        peak = planned.peak
        return (peak.total, peak.total) if self._shares_host else (peak.device, peak.host)

    @property
    def _shares_host(self) -> bool:
        return device_type(self.device).shares_host_memory

    def _advice(self, side: Side) -> Iterator[Table]:
        if remedies := self.remedies(side):
            saved = {"saved": [remedy.device for remedy in remedies]}
            if not self._shares_host:
                on_host = [remedy.host for remedy in remedies]
                saved = {"saved on device": saved["saved"], "saved on host": on_host}
            plans = {remedy.override: remedy.plan for remedy in remedies}
            yield candidates_table("What takes less, MiB", plans, saved)


def out_of_memory(error: BaseException) -> Side | None:
    """Says which memory has run out by an error or one of its causes; ``None``: none has.

    Runtimes of devices have one error for memory of the device and for host memory that they pin: "either".
    """
    if isinstance(error, torch.OutOfMemoryError):
        return "device"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    if isinstance(error, RuntimeError) and _HOST_RAN_OUT.search(str(error)):
        return "host"
    if isinstance(error, RuntimeError) and _RUNTIME_RAN_OUT.search(str(error)):
        return "either"
    return None if error.__cause__ is None else out_of_memory(error.__cause__)


def held_by(engine: Engine) -> dict[str, Bytes]:
    """Bytes that an engine holds now, by the plan's names."""
    held = dict.fromkeys(_HELD, Bytes())
    for bucket in engine.buckets:
        placement = bucket.placement
        store, sharded = placement.optimizer_store, engine.gradients_of(bucket).sharded
        parts = {
            "parameters": Bytes(device=bucket.flat.untyped_storage().nbytes()),
            "param_shards": Bytes.of(
                placement.param_store.resting_memory,
                nbytes_of(bucket.shard) * bucket.shards_params,
                bucket.shard.pinned,
            ),
            "masters": Bytes.of(store.resting_memory, bucket.master.nbytes, bucket.master.pinned),
            "sharded_gradient": Bytes.of(sharded.memory, sharded.nbytes, sharded.pinned),
        }
        for updater in engine.updaters:
            if bucket in map(engine.bucket_of, parameters_of(updater.optimizer)):
                state = updater.state_of(bucket)
                held["optimizer_state"] += Bytes.of(state.resting_memory, state.nbytes - state.resident_nbytes)
                held["optimizer_state"] += Bytes.of(state.memory, state.resident_nbytes)
        for name, part in parts.items():
            held[name] += part
    buffers = {id(buffer): buffer.numel() * buffer.element_size() for buffer in engine.module.buffers()}  # sparse, too
    held["buffers"] = Bytes(device=sum(buffers.values()))
    for shadow in engine.shadows.values():
        for memory, second in shadow.held():
            held["averages"] += Bytes.of(memory, second.numel() * second.element_size(), _is_pinned(second))
    store = engine.placement.optimizer_store
    passing = store.staged_bytes if isinstance(store, DiskStore) else 0
    pins = device_type(engine.placement.device).can_pin
    held["staging"] = Bytes.on_host(engine.placement.executor.staged_bytes + passing, pins)
    return held


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_pinned()


def planned_parts(planned: Plan) -> dict[str, Bytes]:
    """Bytes between steps, by the plan's names."""
    parts = {name: Bytes() for name in _HELD}
    for bucket in planned.buckets:
        for name in _OF_BUCKETS:
            parts[name] += getattr(bucket, name)
        if bucket.unsharded:
            parts["parameters"] += bucket.parameters
    parts["buffers"], parts["averages"], parts["staging"] = planned.buffers, planned.averages, planned.staging
    return parts


def _table(planned: Plan, measured: dict[str, Bytes], rank: int, peak: int | None) -> Table:
    table = Table(title=f"Memory of rank {rank}, MiB")
    table.add_column("")
    places = ("device", "host", "disk") if planned.held.disk else ("device", "host")
    for name in places:
        table.add_column(f"{name}, planned", justify="right")
        table.add_column("measured", justify="right")

    def row(name: str, part: Bytes, found: Bytes | None, **options: Any) -> None:
        cells = []
        for place in places:
            cells += [_mib(getattr(part, place)), "" if found is None else _mib(getattr(found, place))]
        table.add_row(name, *cells, **options)

    for name, part in planned_parts(planned).items():
        row(name.replace("_", " "), part, measured.get(name), end_section=name == _HELD[-1])
    held = sum(measured.values(), Bytes()) if measured else None
    row("held between steps", planned.held, held, end_section=not planned.held.pinned)
    if planned.held.pinned:
        found = "" if held is None else _mib(held.pinned)
        table.add_row("of it pinned", "", "", _mib(planned.held.pinned), found, end_section=True)
    largest = Bytes(max((bucket.reduce_buffer.device for bucket in planned.buckets), default=0))
    row("gradients", sum((bucket.gradients for bucket in planned.buckets), Bytes()), None)
    row("largest bucket's sum", largest, None)
    seen = "" if peak is None else _mib(peak)
    table.add_row("peak of a step", _mib(planned.peak.device), seen, _mib(planned.peak.host), "", end_section=True)
    if peak is not None:
        table.add_row("activations and the rest", "", _mib(peak - planned.peak.device), "", "")
    return table


def candidates_table(title: str, plans: Mapping[str, Plan], saved: Mapping[str, Sequence[int]] | None = None) -> Table:
    """Renders overrides with the figures of their plans, after columns of the bytes that each of them saves."""
    saved = saved or {}
    table = Table(title=title)
    table.add_column("override", no_wrap=True)  # to be copied
    for name in (*saved, "peak on device", "on host", "sent in a step"):
        table.add_column(name, justify="right")
    for number, (override, planned) in enumerate(plans.items()):
        figures = (planned.peak.device, planned.peak.host, sum(planned.sent.values()))
        table.add_row(override, *map(_mib, (*(column[number] for column in saved.values()), *figures)))
    return table


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.2f}"
