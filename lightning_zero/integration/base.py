"""The base class of the parts of the strategy: its options, and the engine that it makes and drives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NoReturn, TypeVar, overload

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import nn
from torch.optim import Optimizer

from lightning_zero.engine import Engine
from lightning_zero.integration import engines, private, remedies
from lightning_zero.integration.disk import reserve
from lightning_zero.integration.options import StrategyOptions
from lightning_zero.integration.patches import OnShards, Undo
from lightning_zero.integration.precision import ZeroPrecision
from lightning_zero.planning import Plan
from lightning_zero.planning.memory import Memory
from lightning_zero.sharding import Group, Mesh, ShardingPolicy, unshard_parameters
from lightning_zero.storage import Executor
from lightning_zero.update import block_of, make_updater

T = TypeVar("T")


class _Option(Generic[T]):
    """Makes an option a read-only attribute of the strategy.

    A type checker infers the attribute's type, that of the field, from ``read``.
    """

    def __init__(self, read: Callable[[StrategyOptions], T]) -> None:
        self._read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self.__doc__ = f"The option ``{name}``."

    @overload
    def __get__(self, strategy: None, owner: type) -> _Option[T]: ...
    @overload
    def __get__(self, strategy: EngineStrategy, owner: type) -> T: ...
    def __get__(self, strategy: EngineStrategy | None, owner: type) -> _Option[T] | T:
        return self if strategy is None else self._read(strategy.options)

    def __set__(self, strategy: EngineStrategy, value: T) -> NoReturn:
        raise AttributeError(
            f"{self._name}={value!r} cannot be set any more: options are fixed when the strategy is made; use "
            f"{strategy.class_with(self._name)}({self._name}={value!r})"
        )


class EngineStrategy(DDPStrategy):
    """Base class of the parts of :class:`~lightning_zero.ZeroStrategy`.

    Each option is also a read-only attribute of the same name.
    """

    _options: StrategyOptions
    _policy: ShardingPolicy
    _undo: list[Undo]  # restore methods that were replaced on objects that outlive the fit
    _guards: list[Undo]  # those of callbacks that save a run which fails
    _executor: Executor
    _dtypes: dict[int, torch.dtype]  # of parameters by their ids, before the engine changed them
    _engine: Engine | None = None
    _mesh: Mesh | None = None
    _in_step = False  # whether a step of training or evaluation runs

    # `process_group_backend` is missing here, since Lightning's class has it.
    stage = _Option(lambda options: options.stage)
    offload_optimizer = _Option(lambda options: options.offload_optimizer)
    offload_params = _Option(lambda options: options.offload_params)
    offload_fraction = _Option(lambda options: options.offload_fraction)
    nvme_path = _Option(lambda options: options.nvme_path)
    nvme_buffer_gb = _Option(lambda options: options.nvme_buffer_gb)
    nvme_checksums = _Option(lambda options: options.nvme_checksums)
    offload_gradients = _Option(lambda options: options.offload_gradients)
    accumulate_on_device = _Option(lambda options: options.accumulate_on_device)
    shard_size = _Option(lambda options: options.shard_size)
    bucket_size_mb = _Option(lambda options: options.bucket_size_mb)
    units = _Option(lambda options: options.units)
    persistence_numel = _Option(lambda options: options.persistence_numel)
    max_live_numel = _Option(lambda options: options.max_live_numel)
    prefetch_mb = _Option(lambda options: options.prefetch_mb)
    max_in_flight_mb = _Option(lambda options: options.max_in_flight_mb)
    staging_buffer_mb = _Option(lambda options: options.staging_buffer_mb)
    activation_offload = _Option(lambda options: options.activation_offload)
    activation_offload_mb = _Option(lambda options: options.activation_offload_mb)
    check_steps = _Option(lambda options: options.check_steps)
    detect_data_edits = _Option(lambda options: options.detect_data_edits)
    overlap = _Option(lambda options: options.overlap)
    update_in_backward = _Option(lambda options: options.update_in_backward)
    native_optimizer = _Option(lambda options: options.native_optimizer)
    master_layout = _Option(lambda options: options.master_layout)
    preflight = _Option(lambda options: options.preflight)
    skip_nonfinite = _Option(lambda options: options.skip_nonfinite)
    max_consecutive_skips = _Option(lambda options: options.max_consecutive_skips)
    checkpoint_format = _Option(lambda options: options.checkpoint_format)
    checkpoint_state = _Option(lambda options: options.checkpoint_state)
    async_save = _Option(lambda options: options.async_save)
    checksums = _Option(lambda options: options.checksums)
    evaluation_masters = _Option(lambda options: options.evaluation_masters)
    timeout = _Option(lambda options: options.timeout)
    start_method = _Option(lambda options: options.start_method)

    @classmethod
    def class_with(cls, option: str) -> str:
        """The name of the class whose constructor takes an option."""
        return cls.__name__

    @property
    def options(self) -> StrategyOptions:
        """The options that were given to the constructor."""
        return self._options

    @property
    def world(self) -> Group:
        """The group of all ranks; before the set-up this rank alone."""
        return Group() if self._mesh is None else self._mesh.world

    @property
    def engine(self) -> Engine:
        """The engine that shards the module; exists from ``setup`` on."""
        if self._engine is None:
            raise RuntimeError(
                "this Trainer's strategy holds no shards: they exist from the start of Trainer.fit, validate, test or "
                "predict until strategy.release(). Save checkpoints and read optimizer state before the release"
            )
        if self._engine.released:
            raise RuntimeError(
                "another Trainer has taken over this module with its weights; the optimizer state of this Trainer "
                "is gone. Save this Trainer's checkpoint before the other one runs, or save the other one's"
            )
        return self._engine

    def release(self, module: nn.Module | None = None) -> None:
        """Give the module ordinary, full parameters again, at full precision, and free the shards. Collective.

        After ``fit`` the module stays sharded (stage 3) and in its 16-bit dtype, ready for ``test``, a second ``fit``
        or ``save_checkpoint``. Call this before code that wants a plain module, such as an export. Layers that
        ``sync_batchnorm=True`` has converted are converted back.

        Args:
            module: a module that was made in ``Trainer.init_module`` and that no Trainer has run; default: the module
                of the last run.
        """
        if self._engine is not None and (module is None or module is self._engine.module):
            engine, self._engine = self._engine, None
            if engine.released:
                return  # another Trainer has taken the module over
            engines.release(engine)
            if self._layer_sync is not None:
                modes = {name: each.training for name, each in engine.module.named_modules()}
                self.model = self._layer_sync.revert(engine.module)
                for name, each in self.model.named_modules():
                    each.training = modes[name]  # Lightning makes new layers, which train
        elif module is not None:
            unshard_parameters(module.parameters())

    def _shard_size(self) -> int:
        """Number of ranks that share one copy of the state."""
        return engines.shard_size(self.options, self.num_nodes, self.num_processes)

    def _settle_options(self, trainer: pl.Trainer, optimizers: Sequence[Optimizer] | None) -> None:
        """Decide the options that the constructor left open, when module and optimizers are known. Collective."""

    def _synchronize_layers(self, module: pl.LightningModule) -> None:
        """Convert layers for ``sync_batchnorm=True`` where no engine holds the module, whose layers it hooks.

        An engine outlives the run that has made it. So layers are converted in an evaluation, too, where they compute
        as before, and they stay so after a fit.
        """
        held = self._engine is not None and not self._engine.released and self._engine.module is module
        if self._layer_sync is not None and not held:
            self.model = self._layer_sync.apply(module)

    def _shard(self, module: pl.LightningModule, optimizers: list[Optimizer] | None) -> None:
        """Build the engine, or give the engine of an earlier run its new optimizers."""
        engine = self._engine
        if engine is not None and not self._fits(engine, module, optimizers or ()):
            engines.release(engine)
            engine = None
        precision = self.precision_plugin
        assert isinstance(precision, ZeroPrecision)
        if engine is None:
            assert self._mesh is not None
            self._dtypes.clear()
            self._dtypes.update((id(p), p.dtype) for p in module.parameters())
            trains = self._makes_masters(optimizers)
            engine = engines.make_engine(
                module,
                self._mesh,
                self.options,
                precision,
                self.root_device,
                self._executor,
                optimizers,
                trains,
                self._planned,
            )
            private.report(module, self.root_device, precision.module_dtype)
            self._engine = engine
        elif optimizers is not None:  # an evaluation, or a fit with another optimizer, has reserved less
            reserve(engine.placement.optimizer_store, engine.placement.mesh.world, self._planned)
        precision.attach(engine)  # another Trainer with the same plugin may have run since
        if optimizers is not None:
            engine.begin_training()
            engine.attach([make_updater(o, engine, self.options.native_optimizer) for o in optimizers])

    def undo_in_teardown(self, undo: Sequence[Undo]) -> None:
        """Restore replaced methods when this run is torn down."""
        self._undo += undo

    def end_guards(self) -> None:
        """Give callbacks that save a run which fails their methods back, when the run has ended or all have been told.

        Not in the teardown of a run that succeeds: the hooks after it may fail, too.
        """
        guards, self._guards = self._guards, []
        for end in guards:
            end()

    def _planned(self) -> Plan | None:
        """Returns the plan of the run's memory, if it is known already."""
        return None

    def _makes_masters(self, optimizers: Sequence[Optimizer] | None) -> bool:
        """Whether a run makes masters: it trains, or a later fit shall start from its full precision."""
        return optimizers is not None or self.options.evaluation_masters

    def _fits(self, engine: Engine, module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> bool:
        """Whether an earlier run's engine holds all parameters of these optimizers, in the layout that they need."""
        parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        # Another Trainer may have released the engine, and the module may have new parameters.
        if engine.module is not module or not engine.holds([*module.parameters(), *parameters]):
            return False
        if engine.placement.block % block_of(optimizers):  # shard borders may cut blocks of state
            return False
        return engine.holds_whole(engines.parameters_kept_whole(self.options, optimizers, self.root_device))

    def _describe_memory(
        self, module: pl.LightningModule, optimizers: Sequence[Optimizer] | None, trainer: pl.Trainer
    ) -> Memory:
        precision = self.precision_plugin
        assert isinstance(precision, ZeroPrecision)
        return engines.describe_memory(
            module,
            optimizers,
            self.options,
            precision,
            self.root_device,
            (self.num_nodes, self.num_processes, self.global_rank),
            _micro_batches(trainer),
            self._dtypes,
            self._makes_masters(optimizers),
            bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE,
            []
            if optimizers is None
            else [store for each in _of(trainer, OnShards) for store in each.averages(trainer)],
            _halved(trainer, module),
        )


def _of(trainer: pl.Trainer, kind: type[T]) -> list[T]:
    """The callbacks of a kind."""
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]


def _halved(trainer: pl.Trainer, module: pl.LightningModule) -> str:
    """Tells what goes with half the batch; see :func:`remedies.activations`."""
    if not module.automatic_optimization:
        return remedies.BY_HAND
    if _of(trainer, GradientAccumulationScheduler):  # it refuses the Trainer's flag
        return "twice the factors of GradientAccumulationScheduler"
    return f"trainer.accumulate_grad_batches={2 * trainer.accumulate_grad_batches}"


def _micro_batches(trainer: pl.Trainer) -> int:
    """The most backward passes of a step of any epoch."""
    schedules = [each.scheduling for each in _of(trainer, GradientAccumulationScheduler)]
    return max(trainer.accumulate_grad_batches, *(n for schedule in schedules for n in schedule.values()), 1)
