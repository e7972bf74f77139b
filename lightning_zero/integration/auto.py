"""The strategy ``zero_auto``: it chooses stage and places by the plan when it knows the module and its optimizers."""

from __future__ import annotations

import dataclasses
import inspect
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, ParamSpec

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero import limits
from lightning_zero.integration import engines, private
from lightning_zero.integration.choices import Way, fine_ways
from lightning_zero.integration.names import AUTO, STRATEGIES, register_auto_in
from lightning_zero.integration.options import CHOSEN, AutoOptions, StrategyOptions, check_choice, check_names
from lightning_zero.integration.precision import ZeroPrecision
from lightning_zero.integration.preflight import DoesNotFitError
from lightning_zero.integration.remedies import setting_of
from lightning_zero.integration.strategy import ZeroStrategy
from lightning_zero.planning import preflight
from lightning_zero.planning.calibration import CalibrationError, calibrated, read
from lightning_zero.planning.choosing import Pick, Room, choose, most, needs_of, spared
from lightning_zero.planning.devices import Machine
from lightning_zero.planning.estimate import Choice
from lightning_zero.planning.examples import loss_of, zeros_as
from lightning_zero.planning.machine import this_machine
from lightning_zero.planning.memory import Memory
from lightning_zero.planning.preflight import Claim, Pool, Side, in_units
from lightning_zero.planning.tracing import Trace, trace
from lightning_zero.sharding import ShardedParameter, ShardingPolicy
from lightning_zero.storage import device_type

P = ParamSpec("P")

_GIB = 2**30
_LIMITS = {
    "compute": "for computing",
    "network": "for sending",
    "pcie": "for copies between device and host",
    "update": "for the update",
    "disk": "for the disk",
    "sums": "for adding up micro-batches in host memory",
}
_ON_DEVICE = {"offload_optimizer": "none", "offload_params": "none"}


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The choice of ``zero_auto``, with its reasons.

    Attributes:
        way: the name and the options.
        pick: the memory and time that it takes, and the number of ways from which it was chosen.
        machine: the machine whose rates were used.
        timed: whether activations and the time of computing were known.
        for_fit: whether the optimizers of a fit were known; an evaluation has none.
    """

    way: Way
    pick: Pick
    machine: Machine
    timed: bool
    for_fit: bool

    def __str__(self) -> str:
        pick, gpu = self.pick, self.machine.gpu
        peak, times = pick.need.peak, pick.need.times
        why = (
            f"of {pick.considered} settings, none of which fits, the one that takes least memory"
            if pick.lacks
            else f"the fastest of {pick.fitting} settings that fit, of {pick.considered} considered"
        )
        disk = f", {in_units(pick.need.disk)} on the disk" if pick.need.disk else ""
        but = "" if self.timed else "not counting activations and computing (no example_input_array shows them), "
        return (
            f"{AUTO} chose {self.way.python}: {why}; {but}a rank takes {in_units(peak.device)} on the "
            f"device, {in_units(peak.host)} in host memory{disk} at most, a step at least {times.bound:.2g} s, most of "
            f"it {_LIMITS[times.limit]}, at the rates of {gpu.name} ({gpu.source})"
        )

    def hyperparameters(self, options: StrategyOptions) -> dict[str, Any]:
        """The entries for loggers."""
        names = (*CHOSEN, *self.way.changed)
        return {
            "strategy": self.way.name,
            **{name: getattr(options, name) for name in names},
            "step_seconds": self.pick.need.times.bound,
            "device_bytes": self.pick.need.peak.device,
            "host_bytes": self.pick.need.peak.host,
        }


def _lists_all_options(init: Callable[P, None]) -> Callable[P, None]:
    """Adds the options of :class:`ZeroStrategy` to a constructor's signature, in which LightningCLI looks for them."""
    own, base = inspect.signature(init, eval_str=True), inspect.signature(ZeroStrategy.__init__, eval_str=True)
    parameters = {name: each for name, each in own.parameters.items() if each.kind is not each.VAR_KEYWORD}
    others = [each for name, each in base.parameters.items() if name not in (*parameters, *CHOSEN)]
    init.__signature__ = own.replace(parameters=[*parameters.values(), *others])  # type: ignore[attr-defined]
    return init


class ZeroAutoStrategy(ZeroStrategy):
    """Chooses, by the plan, the fastest strategy that fits the memory; its name is ``zero_auto``.

    It chooses when a run is set up, since only then the module and its optimizers are known. It chooses the stage,
    where optimizer state and parameters rest (on the device, in host memory, or on a disk if ``nvme_path`` or the
    environment variable names one on every rank, and not with ``update_in_backward``), which part of them is offloaded,
    and those of the options below that are not given. The ranks exchange their available memory, so that all make the
    same choice; it depends only on the module, its optimizers, the options and the machines with their free memory.
    After that the run equals one with the chosen strategy, bit for bit. One log line says what was chosen and why, and
    loggers get the choice for a fit as the hyperparameters ``zero_auto``. Later runs with the same module keep the
    choice until :meth:`release`. Only two kinds of fits choose again: the first after an evaluation, and one whose
    optimizers need another layout of the shards.

    If nothing fits, a run ends on all ranks, an evaluation as well. With ``preflight="warn"`` or ``"off"`` it warns and
    takes the strategy that needs least memory.

    Before the choice the strategy is ``zero3_offload``: layers that ``configure_model`` or ``Trainer.init_module`` make
    are sharded in host memory as they are made, and move to the chosen place later. The micro-batch is not changed.

    Whether a strategy fits is decided as by ``preflight``, from the memory of the device and of the machine, within the
    limits of control groups and of the process, less the memory in use and a twentieth of the rest. If the module has
    an ``example_input_array``, which should have the size of a micro-batch, a run on it without values gives the
    activations and computations of a micro-batch. Otherwise both are unknown, and also if that run fails or layers were
    sharded as they were made: then sending and copying count as if no computation ran beside them, and ``reserve_gb``
    sets aside memory for activations. The rates are those that ``lightning-zero doctor --measure`` has measured on the
    machine of rank 0, otherwise those of the device's vendor or, for processors, assumed ones.

    Args:
        device_memory_gb: memory, in 2^30 bytes, that the plan of a rank may use on its device (on a CPU: host memory);
            default: all available memory.
        host_memory_gb: host memory, in 2^30 bytes, that the plans of all ranks of a machine may use together; default:
            all available memory.
        reserve_gb: memory, in 2^30 bytes, to leave free on each rank's device, such as for activations that are
            unknown. It is left free beside those that are known, too.
        shard_size: as for :class:`ZeroStrategy`; ``None``: chosen.
        bucket_size_mb: as for :class:`ZeroStrategy`; ``None``: chosen.
        persistence_numel: as for :class:`ZeroStrategy`; ``None``: chosen.
        max_live_numel: as for :class:`ZeroStrategy`; ``None``: chosen.
        accumulate_on_device: as for :class:`ZeroStrategy`; ``None``: chosen.
        **options: other options of :class:`ZeroStrategy`, except ``stage``, ``offload_optimizer``, ``offload_params``
            and ``offload_fraction``; ``offload_gradients`` holds if a disk is chosen.

    Raises:
        ValueError: for a value that is not one of those described there.
        TypeError: for an unknown option, and for an option that is always chosen.
    """

    strategy_name = AUTO
    chosen: Chosen | None = None
    _logged: Chosen | None = None
    # Parameters that were initialized in shards can move to any place that is chosen later.
    _UNTIL_THEN: ClassVar[Mapping[str, Any]] = STRATEGIES["zero3_offload"]

    @_lists_all_options
    def __init__(
        self,
        *,
        device_memory_gb: float | None = None,
        host_memory_gb: float | None = None,
        reserve_gb: float = 0.0,
        shard_size: int | None = None,
        bucket_size_mb: float | None = None,
        persistence_numel: int | None = None,
        max_live_numel: int | None = None,
        accumulate_on_device: bool | None = None,
        **options: Any,
    ) -> None:
        self.auto_options = AutoOptions(
            device_memory_gb=device_memory_gb,
            host_memory_gb=host_memory_gb,
            reserve_gb=reserve_gb,
            shard_size=shard_size,
            bucket_size_mb=bucket_size_mb,
            persistence_numel=persistence_numel,
            max_live_numel=max_live_numel,
            accumulate_on_device=accumulate_on_device,
        )
        for name in CHOSEN:
            if name in options:
                raise TypeError(
                    f"{name}={options[name]!r}: {AUTO} chooses this option; to set it, use "
                    f"lightning_zero.ZeroStrategy({name}=...)"
                )
        check_names("ZeroAutoStrategy", options, [*inspect.signature(ZeroAutoStrategy).parameters])
        self._gradients = options.pop("offload_gradients", "auto")  # holds where a disk is chosen
        check_choice("offload_gradients", self._gradients)
        super().__init__(**{**self._UNTIL_THEN, **self.auto_options.fixed, **options})
        self._given = self._options

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: private.StrategyRegistryType) -> None:
        """Register ``zero_auto``."""
        register_auto_in(strategy_registry, cls)

    @classmethod
    @override
    def class_with(cls, option: str) -> str:
        return ZeroStrategy.__name__ if option in CHOSEN else super().class_with(option)

    @override
    def _describe_memory(
        self, module: pl.LightningModule, optimizers: Sequence[Optimizer] | None, trainer: pl.Trainer
    ) -> Memory:
        """Leaves out changes of options that are always chosen: the group ``strategy=auto`` does not have these."""
        memory = super()._describe_memory(module, optimizers, trainer)
        chosen = tuple(f"strategy.{option}=" for option in CHOSEN)
        candidates = [(typed, setting) for typed, setting in memory.candidates if not typed.startswith(chosen)]
        return dataclasses.replace(memory, candidates=candidates)

    @override
    def _check_compiled(self, module: pl.LightningModule) -> None:
        """Do nothing: stage 3 is never chosen for a compiled module."""

    @override
    def _warn_of_copies(self, module: pl.LightningModule) -> None:
        if self.chosen is not None:
            super()._warn_of_copies(module)

    @override
    def _settle_options(self, trainer: pl.Trainer, optimizers: Sequence[Optimizer] | None) -> None:
        module = self.lightning_module
        assert module is not None
        if not self._keeps_choice(module, optimizers):
            memory = self._describe_memory(module, optimizers, trainer)
            memory = dataclasses.replace(memory, trace=self._traced(module))
            chosen = self._choose(memory, private.is_compiled(module), for_fit=optimizers is not None)
            self._say(chosen)
            self._become(chosen.way)
            self.chosen = chosen
            self._warn_of_copies(module)
        if optimizers is not None:
            self._log(trainer.loggers)

    def _keeps_choice(self, module: pl.LightningModule, optimizers: Sequence[Optimizer] | None) -> bool:
        """Whether an earlier choice holds: its engine fits, and a fit's choice has counted the optimizers' state."""
        if self._engine is None or self.chosen is None or not self._fits(self._engine, module, optimizers or ()):
            return False
        return optimizers is None or self.chosen.for_fit

    def _log(self, loggers: Sequence[Logger]) -> None:
        """Logs the choice with which a fit runs, unless an earlier fit has logged it.

        Loggers do not get the choice of an evaluation before the fit, since some, such as MLflow's, refuse a
        hyperparameter that they have with another value.
        """
        if self.chosen is not None and self.chosen is not self._logged:
            for logger in loggers:
                logger.log_hyperparams({AUTO: self.chosen.hyperparameters(self.options)})
        self._logged = self.chosen

    def _choose(self, memory: Memory, compiled: bool, for_fit: bool) -> Chosen:
        """Returns the fastest way that fits, the same on all ranks. Collective."""
        assert self._mesh is not None
        world, path = self._mesh.world, self.options.disk_path
        free = None if path is None else _free(path) // self.num_processes
        mine = self._claims(memory), free, self._machine()
        everyone = world.all_gather_object(mine, "tell what memory there is")
        machine = everyone[0][2]
        disks = [disk for _, disk, _ in everyone if disk is not None]
        disk = len(disks) == len(everyone) and not self.options.update_in_backward  # which needs state in memory
        fixed, parts = self.auto_options.fixed, not device_type(self.root_device).shares_host_memory
        offered = [
            way
            for way in fine_ways(self.num_processes, self.num_nodes, disk, parts, memory.micro_batches > 1, fixed)
            if not (compiled and way.options["stage"] == 3)
        ]
        candidates = [self._candidate(way, memory) for way in offered]
        room = Room(
            [claim for claims, *_ in everyone for claim in claims],
            self.root_device,
            min(disks, default=0),
            int(self.auto_options.reserve_gb * _GIB),
        )
        wide = memory.setting.precision.param_dtype not in (torch.bfloat16, torch.float16)
        flops = 0 if memory.trace is None else memory.micro_batches * memory.trace.flops
        needs = needs_of(candidates, lambda candidate: memory.plan_of(candidate.setting), flops, wide, machine)
        pick = choose(candidates, most(world.all_gather_object(needs, "tell what each way takes")), room)
        return Chosen(offered[pick.number], pick, machine, memory.trace is not None, for_fit)

    def _candidate(self, way: Way, memory: Memory) -> Choice:
        options = self._options_of(way)
        size = engines.shard_size(options, self.num_nodes, self.num_processes)
        return Choice(way.overrides, way.python, setting_of(options, size, memory.setting.precision))

    def _options_of(self, way: Way) -> StrategyOptions:
        on_disk = {"offload_gradients": self._gradients} if "nvme" in way.options.values() else {}
        return dataclasses.replace(self._given, **_ON_DEVICE | way.options | on_disk)

    def _machine(self) -> Machine:
        """Describes the machine, with measured rates if there are any."""
        machine = this_machine(self.root_device, self.num_processes, self.num_nodes)
        try:
            found = read(self.root_device)
        except CalibrationError as error:
            rank_zero_warn(f"{AUTO} uses no measured rates: {error}")
            found = None
        return machine if found is None else calibrated(machine, found)

    def _claims(self, memory: Memory) -> list[Claim]:
        """Reads the memory that this rank has and uses, and the limits that the options set."""
        rank, device, given = memory.rank, memory.device, self.auto_options
        found = spared(
            [
                claim
                for claim in preflight.claims(memory.module, self._engine, device, rank)
                if claim.pool.side != "locked" or preflight.lock_limit_holds(device, claim.pool.total)
            ]
        )
        if given.device_memory_gb is not None:
            size = int(given.device_memory_gb * _GIB)
            side: Side = "host" if device_type(device).shares_host_memory else "device"
            found.append(Claim(rank, Pool(f"given to rank {rank}", "device_memory_gb", side, size), 0, 0))
        if given.host_memory_gb is not None:
            size = int(given.host_memory_gb * _GIB)
            found.append(Claim(rank, Pool(f"given to {limits.boot()}", "host_memory_gb", "host", size), 0, 0))
        return found

    def _traced(self, module: pl.LightningModule) -> Trace | None:
        """Traces the activations of the module's example input, if forward can run on it."""
        example = module.example_input_array
        if example is None or any(isinstance(p, ShardedParameter) for p in module.parameters()):
            return None
        precision = self.precision_plugin
        assert isinstance(precision, ZeroPrecision)

        def loss(twin: nn.Module) -> Tensor:
            with precision.computing_on("cpu"):
                return loss_of(twin, precision.convert_input(zeros_as(example, "cpu")))

        try:
            stay = device_type(self.root_device).shares_host_memory
            moved = None if stay else engines.activation_limits(self.options)
            return trace(module, loss, precision.policy, self.options.units, moved)
        except Exception as error:  # noqa: BLE001  (the user's module can do anything; training needs no example)
            rank_zero_warn(
                f"{AUTO} does not know the activations: forward of {type(module).__name__} cannot run on its "
                f"example_input_array without values ({type(error).__name__}: {error}). "
                "Use reserve_gb to leave memory for them"
            )
            return None

    def _say(self, chosen: Chosen) -> None:
        if not chosen.pick.lacks:
            rank_zero_info(str(chosen))
            return
        # A setting that would fit may be refused for a reason that the user can remove.
        text = "\n- ".join([str(chosen), *chosen.pick.lacks, *chosen.pick.refused])
        if self.options.preflight == "error":
            raise DoesNotFitError(f"{text}\nWith preflight='warn' in the strategy the run begins nevertheless.")
        rank_zero_warn(text)

    def _become(self, way: Way) -> None:
        """Become the strategy of a way. Collective."""
        before, self._options = self._options, self._options_of(way)
        if self._engine is not None and before != self._options:
            engines.release(self._engine)
            self._engine = None
        self._policy = ShardingPolicy.from_stage(self.options.stage)
        assert self._mesh is not None
        if self._shard_size() != self._mesh.shard.size:
            self._mesh = engines.make_mesh(
                self.options, self.num_nodes, self.num_processes, self.local_rank, self.parallel_devices or ()
            )


def _free(path: str) -> int:
    """The free bytes of the disk that holds a path; its last folders may be missing."""
    folder = Path(path).absolute()
    while not folder.exists():  # this is an error only if the disk is chosen
        folder = folder.parent
    return shutil.disk_usage(folder).free
