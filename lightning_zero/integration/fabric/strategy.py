"""The strategy that ``Fabric(strategy="zero2_offload")`` gets: set-up and steps."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lightning_zero.engine import Engine, engines_of
from lightning_zero.integration import engines, preflight, private
from lightning_zero.integration.fabric.base import ShardedModule
from lightning_zero.integration.fabric.checkpointing import CheckpointingStrategy
from lightning_zero.integration.fabric.precision import FabricPrecision
from lightning_zero.integration.failures import tell_of_uncaught
from lightning_zero.integration.names import refuse_auto, register_auto_in, register_in
from lightning_zero.integration.options import StrategyOptions, check_names
from lightning_zero.integration.precision import ZeroPrecision, as_zero_precision
from lightning_zero.planning.memory import Memory
from lightning_zero.sharding import ShardingPolicy, unshard_parameters
from lightning_zero.sharding.adoption import move_own
from lightning_zero.storage import Executor, InlineExecutor, make_executor
from lightning_zero.update import make_updater


class _SyncControl(private.BackwardSyncControl):
    """Accumulates the gradients of all micro-batches of a step except the last."""

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        if not enabled:
            return contextlib.nullcontext()
        if not isinstance(module, ShardedModule):
            raise TypeError(
                f"no_backward_sync got a {type(module).__name__}, which no engine shards; expected the module that "
                "fabric.setup returned"
            )
        return module.engine.no_sync()


class ZeroFabricStrategy(CheckpointingStrategy):
    """ZeRO for ``Fabric(strategy=...)``, under the same names and with the same options as for the Trainer.

    ::

        fabric = Fabric(devices=2, strategy="zero2_offload", precision="bf16-mixed")
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)

    All of Fabric's methods work as with ``"ddp"``; all ranks save and load sharded state together. Modules that are set
    up in separate calls have separate engines: they share no parameters, and one optimizer cannot update two of them.
    The state of the loss scaler is saved in every checkpoint that holds a module, and restored from it.

    Args:
        stage: 0, 1, 2 or 3.
        accelerator: as for :class:`lightning.fabric.strategies.DDPStrategy`.
        parallel_devices: as for :class:`lightning.fabric.strategies.DDPStrategy`.
        cluster_environment: as for :class:`lightning.fabric.strategies.DDPStrategy`.
        checkpoint_io: as for :class:`lightning.fabric.strategies.DDPStrategy`.
        precision: a plugin; a :class:`~lightning_zero.ZeroPrecision` has options that ``Fabric(precision=...)`` lacks.
        **options: those of :class:`~lightning_zero.ZeroStrategy`, except ``async_save``, ``evaluation_masters`` and
            ``update_in_backward``.

    Raises:
        ValueError: for a value that is not one of those described there, or a combination that cannot work.
        TypeError: for an unknown option.
    """

    def __init__(
        self,
        stage: int = 2,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        **options: Any,
    ) -> None:
        check_names("ZeroFabricStrategy", options, [field.name for field in dataclasses.fields(StrategyOptions)])
        self.options = StrategyOptions(stage=stage, **options)
        if self.options.async_save:
            raise ValueError(
                "async_save=True works with the Trainer, which waits for the last save when it ends; Fabric's own loop "
                "has no such end. Use async_save=False"
            )
        if self.options.update_in_backward:
            raise ValueError(
                "update_in_backward=True works with the Trainer, which tells before a backward whether a step follows, "
                "and which hooks run between; with Fabric this is not known. Use update_in_backward=False"
            )
        if self.options.evaluation_masters:
            raise ValueError(
                "evaluation_masters=True works with the Trainer, whose evaluations make no masters otherwise; "
                "fabric.setup always makes them. Use evaluation_masters=False"
            )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=self.options.process_group_backend,
            timeout=timedelta(seconds=self.options.timeout),
            start_method=self.options.start_method,
        )
        self._backward_sync_control = _SyncControl()
        self._executor: Executor = InlineExecutor()
        self._policy = ShardingPolicy.from_stage(self.options.stage)
        self._wrappers = WeakSet()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: private.StrategyRegistryType) -> None:
        """Register ``zero0`` ... ``zero3_nvme``."""
        register_in(strategy_registry, cls)
        register_auto_in(strategy_registry, refuse_auto)

    # ------------------------------------------------------------------------------------------------------- set-up

    @property
    @override
    def precision(self) -> Precision:
        return FabricPrecision(ZeroPrecision()) if self._precision is None else self._precision

    @precision.setter
    @override
    def precision(self, precision: Precision | None) -> None:
        # By default and by name Fabric makes the stock plugin for the flag and assigns it here.
        if precision is None or isinstance(precision, FabricPrecision):
            self._precision = precision
        else:
            self._precision = FabricPrecision(as_zero_precision(precision))

    @property
    def _settings(self) -> ZeroPrecision:
        assert isinstance(self.precision, FabricPrecision)
        return self.precision.settings

    @override
    def setup_environment(self) -> None:
        if torch.distributed.is_initialized():
            engines.check_world_size(self.num_nodes, self.num_processes, "Fabric")
        super().setup_environment()
        engines.check_world_size(self.num_nodes, self.num_processes, "Fabric")
        if self._mesh is None:
            self._mesh = engines.make_mesh(
                self.options, self.num_nodes, self.num_processes, self.local_rank, self.parallel_devices or ()
            )
            options = self.options
            lanes = options.overlap, options.in_flight_bytes, options.staging_bytes
            self._executor = make_executor(self.root_device, *lanes)
            tell_of_uncaught(self._mesh.board)  # the loop is the user's: nothing else sees its errors
        assert isinstance(self.precision, FabricPrecision)
        self.precision.device = self.root_device

    @override
    @contextlib.contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Shard parameters one by one at stage 3."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(super().module_init_context(empty_init))
            if self._mesh is not None and self._policy.shard_params and self._mesh.shard.size > 1:
                stack.enter_context(engines.init_in_shards(self.options, self._mesh, self.root_device))
            yield

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Move a metric, or a module without parameters; other modules move bucket by bucket at their set-up."""
        if not engines_of(module) and (
            isinstance(module, Metric | MetricCollection) or next(module.parameters(), None) is None
        ):
            module.to(self.root_device)

    @override
    def setup_module(self, module: nn.Module) -> ShardedModule:  # type: ignore[override]
        return self._shard(module, None)

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        sharded = self._shard(module, optimizers)
        return sharded, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def _shard(self, module: nn.Module, optimizers: Sequence[Optimizer] | None) -> ShardedModule:
        if self._mesh is None:
            raise RuntimeError("fabric.setup was called before fabric.launch(); call fabric.launch() first")
        held = engines_of(module)
        self._check_alone(module, held)
        for engine in held:  # of an earlier Fabric or Trainer, or of an earlier set-up of this module
            engines.release(engine)
        move_own(module, self.root_device)
        memory = self._describe_memory(module, optimizers) if optimizers else None
        if memory is not None:
            preflight.check(memory, None, self._mesh.world, self.options.preflight)
        engine = engines.make_engine(
            module,
            self._mesh,
            self.options,
            self._settings,
            self.root_device,
            self._executor,
            optimizers,
            planned=lambda: None if memory is None else memory.plan,
        )
        private.report(module, self.root_device, self._settings.module_dtype)
        sharded = ShardedModule(module, engine)
        self._wrappers.add(sharded)
        return sharded

    def _check_alone(self, module: nn.Module, held: Iterable[Engine]) -> None:
        """Refuse a module that shares parameters with another one that is set up, whose engine would lose them.

        Args:
            module: that is being set up.
            held: the engines that hold parameters of it.

        Raises:
            ValueError: it does.
        """
        for engine in held:
            if engine.module is not module and engine in self.engines:
                shared = next(name for name, p in module.named_parameters() if engine.bucket_of(p) is not None)
                raise ValueError(
                    f"{type(module).__name__} shares {shared!r} with the {type(engine.module).__name__} that was set "
                    "up before. Set up one module that contains both, such as an nn.ModuleDict; or if the other one is "
                    "no longer needed, call fabric.strategy.release(other) first"
                )

    def _describe_memory(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> Memory:
        """Describe the memory for a step of one micro-batch, since their number is not known."""
        return engines.describe_memory(
            module,
            optimizers,
            self.options,
            self._settings,
            self.root_device,
            (self.num_nodes, self.num_processes, self.global_rank),
            1,
            {id(p): p.dtype for p in module.parameters()},
        )

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        engine = next((engine for engine in self.engines if engine.holds(parameters)), None)
        if engine is None:
            raise ValueError(
                f"{type(optimizer).__name__} has parameters that do not all belong to one module that was given to "
                "fabric.setup. Set up the module first, and give each module its own optimizer; or put the modules "
                "into one, such as an nn.ModuleDict"
            )
        updater = make_updater(optimizer, engine, self.options.native_optimizer)
        engine.attach([*(u for u in engine.updaters if u.optimizer is not optimizer), updater])
        return optimizer

    def release(self, module: nn.Module) -> None:
        """Give a module ordinary, full parameters again, at full precision, and free the shards. Collective.

        Args:
            module: that was given to ``fabric.setup`` or returned by it, or made inside ``fabric.init_module``.
        """
        if (engine := self._engine_with(module)) is None:
            unshard_parameters(module.parameters())
        else:
            engines.release(engine)

    # -------------------------------------------------------------------------------------------------------- steps

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward through all modules whose forward has run since the last one, and reduce their gradients."""
        # The choice of modules depends on nothing that differs between ranks.
        involved = [sharded.engine for sharded in self._sharded if sharded.awaits_backward] or self.engines
        # All engines prepare: they share the scaler, and a graph of an earlier forward may reach any of them.
        loss = [tensor, *(engine.scale_loss(tensor) for engine in self.engines)][-1]
        for engine in involved:
            engine.begin_backward()
        super().backward(loss, module, *args, **kwargs)
        for engine in involved:
            engine.flush()
        for sharded in self._sharded:
            sharded.awaits_backward = False

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        with engines.ending_steps(self._engine_of(optimizer)):  # the following code may read any parameter
            return super().optimizer_step(optimizer, **kwargs)

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the averaged gradients by their global norm. Collective.

        With a loss scaler a norm that is not finite is no error: the step is skipped, and a lower scale tried.
        """
        error_if_nonfinite = error_if_nonfinite and self._settings.scaler is None
        if float(norm_type) != 2.0:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        engine = self._engine_of(optimizer)
        if error_if_nonfinite and not math.isfinite(norm := engine.grad_norm(optimizer)):
            raise RuntimeError(
                f"the norm of the gradients is {norm}, so that it cannot be clipped; with error_if_nonfinite=False the "
                "step is skipped on all ranks"
            )
        return torch.tensor(engine.clip_grad_norm_(optimizer, max_norm), dtype=torch.float32, device=self.root_device)

    @override
    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clamp each averaged gradient in its shard."""
        self._engine_of(optimizer).clip_grad_value_(optimizer, clip_val)

    @property
    def loss_scale(self) -> float:
        """The factor by which the next loss is multiplied for backward; 1 without a loss scaler."""
        return 1.0 if self._settings.scaler is None else self._settings.scaler.scale

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that all ranks skipped because a gradient was not finite."""
        return sum(engine.skipped_steps for engine in self.engines)

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Process groups and threads do not pickle; a spawned rank makes its own.
        return {**self.__dict__, "_mesh": None, "_wrappers": WeakSet(), "_executor": InlineExecutor()}
