"""What a run holds in memory, against the plan, and what would take less."""

from __future__ import annotations

import dataclasses
import errno
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from rich.console import Console, Group, RenderableType
from rich.table import Table
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.engine import (
    Bytes,
    DeviceStore,
    Engine,
    HostStore,
    Mesh,
    MixedPrecisionPolicy,
    Placement,
    Plan,
    ShardingPolicy,
    engines_of,
    plan,
)
from lightning_zero.engine.takeover import parameters_of
from lightning_zero.optim import ShardUpdater, choose_updater
from lightning_zero.precision import ZeroPrecision
from lightning_zero.registration import STRATEGIES
from lightning_zero.strategy import NativeName, ZeroStrategy

_MIB = 2**20
# As in the plan, and in its order.
_HELD = ("parameters", "param_shards", "masters", "optimizer_state", "gradient_log", "buffers")


class Remedy(NamedTuple):
    """A change of the configuration that takes less memory.

    Attributes:
        override: what to type, for Hydra.
        saved: bytes that it takes off the peak of a rank: of the device, on CPU of the host.
        plan: with it.
    """

    override: str
    saved: int
    plan: Plan


@dataclasses.dataclass(frozen=True)
class _Setting:
    """What a plan depends on, and the configuration can change."""

    sharding: ShardingPolicy
    shard_size: int
    optimizer_on_host: bool
    params_on_host: bool
    bucket_size_mb: float
    persistence_numel: int
    max_live_numel: int | None
    precision: MixedPrecisionPolicy


class _Planner:
    """Plans a module's training under one setting or another, before an engine has changed it."""

    def __init__(
        self,
        strategy: ZeroStrategy,
        micro_batches: int,
        module: pl.LightningModule,
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._module = module
        self._optimizers = optimizers
        self._micro_batches = micro_batches
        self._units = strategy.units
        self._native: NativeName = strategy.native_optimizer
        self._device = strategy.root_device
        self._world, self._rank = strategy.world_size, strategy.global_rank
        self._replicates = not strategy.stage  # its shard size is not the user's choice
        # Of a strategy that shards: the ranks of a node, or one of each where nodes have but one.
        self._default_size = strategy.num_processes if strategy.num_processes > 1 else strategy.num_nodes
        precision = strategy.precision_plugin
        assert isinstance(precision, ZeroPrecision)
        self.setting = _Setting(
            ShardingPolicy.from_stage(strategy.stage),
            strategy.shard_size or self._default_size,
            strategy.offload_optimizer == "cpu",
            strategy.offload_params == "cpu",
            strategy.bucket_size_mb,
            strategy.persistence_numel,
            strategy.max_live_numel,
            precision.policy,
        )

    def plan(self, setting: _Setting) -> Plan:
        """What a rank would hold and send."""
        size = setting.shard_size
        # Ranks of one shard group are neighbours.
        mesh = Mesh.imagined(size, self._world // size, self._rank)
        device, host = DeviceStore(self._device), HostStore(pin=self._device.type == "cuda")
        placement = Placement(
            mesh,
            setting.sharding,
            setting.precision,
            self._device,
            host if setting.optimizer_on_host else device,
            host if setting.params_on_host else device,
        )
        return plan(
            self._module,
            placement,
            self._optimizers,
            lambda optimizer, placement, masters: choose_updater(optimizer, placement, masters, self._native),
            units=self._units,
            bucket_size_mb=setting.bucket_size_mb,
            persistence_numel=setting.persistence_numel,
            max_live_numel=setting.max_live_numel,
            micro_batches=self._micro_batches,
        )

    def remedies(self, planned: Plan) -> list[Remedy]:
        """What takes less than ``planned``; what saves most comes first."""
        found = []
        for typed, setting in self._candidates():
            try:
                other = self.plan(setting)
            except ValueError:  # not with these optimizers
                continue
            if (saved := self._critical(planned) - self._critical(other)) > 0:
                found.append(Remedy(typed, saved, other))
        return sorted(found, key=lambda remedy: remedy.saved, reverse=True)

    def _critical(self, planned: Plan) -> int:
        """The peak of the memory that runs out; of CPU ranks, host and device are the same."""
        return planned.peak.total if self._device.type == "cpu" else planned.peak.device

    def _candidates(self) -> Iterator[tuple[str, _Setting]]:
        now = self.setting
        for name, options in STRATEGIES.items():
            changed = dataclasses.replace(
                now,
                sharding=ShardingPolicy.from_stage(options["stage"]),
                optimizer_on_host=options.get("offload_optimizer") == "cpu",
                params_on_host=options.get("offload_params") == "cpu",
            )
            if name != "zero0" and self._replicates:
                changed = dataclasses.replace(changed, shard_size=self._default_size)
            if name != "zero0" and changed != now:
                yield f"strategy={name}", changed
        if not now.optimizer_on_host and now.sharding.shard_params:
            yield "strategy.offload_optimizer=cpu", dataclasses.replace(now, optimizer_on_host=True)
        if now.shard_size < self._world and not self._replicates:
            yield f"strategy.shard_size={self._world}", dataclasses.replace(now, shard_size=self._world)
        if now.sharding.shard_params:
            yield "strategy.persistence_numel=0", dataclasses.replace(now, persistence_numel=0)
            yield "strategy.max_live_numel=0", dataclasses.replace(now, max_live_numel=0)
        else:
            yield "strategy.bucket_size_mb=1", dataclasses.replace(now, bucket_size_mb=1.0)
        if now.precision.param_dtype is None:
            for option, flag in (("bf16", "bf16-mixed"), ("bf16_true", "bf16-true")):
                policy = ZeroPrecision(flag).policy  # type: ignore[arg-type]
                yield f"precision={option}", dataclasses.replace(now, precision=policy)


class MemoryReport(pl.Callback):
    """Shows what each rank holds, planned and measured, and what would take less.

    It prints a table on rank 0 after the first optimizer step; where a fit runs out of memory (of the device or, on
    the host, of the allocator) also on the rank that did, to stderr, before the error goes on. Under it are remedies:
    overrides to type, each with the bytes that it takes off the planned peak of a rank. Activations are in no plan; on
    CUDA they are, with what else is not, the difference of the peaks.

    The plan costs some milliseconds per remedy before the first fit of a module; a later fit with the same Trainer goes
    on with it. Under another strategy than :class:`~lightning_zero.ZeroStrategy` the callback only warns.

    Attributes:
        plan: of this rank; ``None`` before the fit.
        remedies: what saves most comes first.

    Args:
        table: print the report after the first step; ``False``: only where memory runs out.
    """

    def __init__(self, table: bool = True) -> None:
        self.table = table
        self.plan: Plan | None = None
        self.remedies: list[Remedy] = []
        self._first_step = -1  # `global_step` before it
        self._micro_batches = 1

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if not isinstance(strategy := trainer.strategy, ZeroStrategy):
            rank_zero_warn(
                f"MemoryReport plans nothing under {type(strategy).__name__}: use one of ours, such as zero0"
            )
            return
        self._micro_batches = trainer.accumulate_grad_batches

        def look(module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> None:
            planner = _Planner(strategy, self._micro_batches, module, optimizers)
            self.plan = planner.plan(planner.setting)
            self.remedies = planner.remedies(self.plan)

        strategy.before_sharding.append(look)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first_step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._first_step >= 0 and trainer.global_step > self._first_step:
            self._first_step = -1
            if self.table and self.plan is not None and trainer.is_global_zero:
                Console().print(self.report(trainer))

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self.plan is not None and is_out_of_memory(exception):
            Console(file=sys.stderr).print(f"Rank {trainer.global_rank} is out of memory.", self.report(trainer))

    def report(self, trainer: pl.Trainer) -> RenderableType:
        """Plan, what is held now, and remedies, to be printed by rich."""
        assert self.plan is not None
        strategy = trainer.strategy
        assert isinstance(strategy, ZeroStrategy)
        engine = next(iter(engines_of(trainer.lightning_module)), None)  # none yet where it was being made
        return Group(
            _table(
                self.plan, {} if engine is None else held_by(engine), trainer.global_rank, _peak(strategy.root_device)
            ),
            *_advice(self.remedies, self._micro_batches),
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the device or of the host has run out, here or in what has led to the error."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def held_by(engine: Engine) -> dict[str, Bytes]:
    """Bytes that an engine holds now, by the plan's names."""
    held = dict.fromkeys(_HELD, Bytes())
    for bucket in engine.buckets:
        placement = bucket.placement
        optimizer_memory = placement.optimizer_store.memory
        master_memory = optimizer_memory if bucket.master.nbytes else "device"
        parts = {
            "parameters": Bytes(device=bucket.flat.untyped_storage().nbytes()),
            "param_shards": Bytes.of(placement.param_store.memory, bucket.shard.nbytes * bucket.shards_params),
            "masters": Bytes.of(master_memory, bucket.master.nbytes),
            "gradient_log": Bytes.of(optimizer_memory, bucket.gradients.nbytes),
        }
        for updater in engine.updaters:
            assert isinstance(updater, ShardUpdater)
            if bucket in map(engine.bucket_of, parameters_of(updater.optimizer)):
                held["optimizer_state"] += Bytes.of(optimizer_memory, updater.state_of(bucket).nbytes)
        for name, part in parts.items():
            held[name] += part
    buffers = {id(buffer): buffer.nbytes for buffer in engine.module.buffers()}
    held["buffers"] = Bytes(device=sum(buffers.values()))
    return held


def planned_parts(planned: Plan) -> dict[str, Bytes]:
    """Bytes between steps, by the plan's names."""
    parts = {name: Bytes() for name in _HELD}
    for bucket in planned.buckets:
        for name in _HELD[1:-1]:
            parts[name] += getattr(bucket, name)
        if bucket.whole:
            parts["parameters"] += bucket.parameters
    parts["buffers"] = planned.buffers
    return parts


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _table(planned: Plan, measured: dict[str, Bytes], rank: int, peak: int | None) -> Table:
    table = Table(title=f"Memory of rank {rank}, MiB")
    table.add_column("")
    for name in ("device, planned", "measured", "host, planned", "measured"):
        table.add_column(name, justify="right")

    def row(name: str, part: Bytes, found: Bytes | None, **options: Any) -> None:
        seen = ("", "") if found is None else (_mib(found.device), _mib(found.host))
        table.add_row(name, _mib(part.device), seen[0], _mib(part.host), seen[1], **options)

    for name, part in planned_parts(planned).items():
        row(name.replace("_", " "), part, measured.get(name), end_section=name == _HELD[-1])
    row("held between steps", planned.held, sum(measured.values(), Bytes()) if measured else None, end_section=True)
    largest = Bytes(max((bucket.reduce_buffer.device for bucket in planned.buckets), default=0))
    row("gradients", sum((bucket.gradients for bucket in planned.buckets), Bytes()), None)
    row("largest bucket's sum", largest, None)
    seen = "" if peak is None else _mib(peak)
    table.add_row("peak of a step", _mib(planned.peak.device), seen, _mib(planned.peak.host), "", end_section=True)
    if peak is not None:
        table.add_row("activations and the rest", "", _mib(peak - planned.peak.device), "", "")
    return table


def _advice(remedies: Sequence[Remedy], micro_batches: int) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if remedies:
        table = Table(title="What takes less, MiB")
        table.add_column("override", no_wrap=True)  # to be copied
        for name in ("saved", "peak on device", "on host", "sent in a step"):
            table.add_column(name, justify="right")
        for remedy in remedies:
            peak, sent = remedy.plan.peak, sum(remedy.plan.sent.values())
            table.add_row(remedy.override, *map(_mib, (remedy.saved, peak.device, peak.host, sent)))
        lines.append(table)
    lines.append(
        f"Activations are in no plan: half the batch with trainer.accumulate_grad_batches={2 * micro_batches} takes "
        "half of them, activation checkpointing of the blocks most."
    )
    return lines


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:,.2f}"
