"""The Lightning strategy: Lightning's life cycle, and nothing of the sharding itself."""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, ParamSpec, cast, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_warn
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero import checkpoint as _checkpoint
from lightning_zero import ops, whole_weights
from lightning_zero.engine import (
    CollectiveError,
    DeviceStore,
    Engine,
    Group,
    HostStore,
    Mesh,
    Phase,
    Placement,
    ShardingPolicy,
    Store,
    engines_of,
    gathered_parameters,
    make_whole,
    sharded_init,
)
from lightning_zero.engine.compiled import names_of, plain_names
from lightning_zero.memory import Memory, Setting, is_out_of_memory
from lightning_zero.multirun import why_not_in_sweep
from lightning_zero.optim import ShardUpdater, make_updater
from lightning_zero.precision import ZeroPrecision, as_zero_precision
from lightning_zero.registration import register_in
from lightning_zero.standstill import Undo, hold_average, hold_scheduler, replace_methods
from lightning_zero.version import __version__

P = ParamSpec("P")
StoreName = Literal["none", "cpu", "nvme"]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
NativeName = Literal["auto", "off"]
FormatName = Literal["full", "sharded"]
WRITTEN_BY = "lightning_zero"  # the checkpoint's entry on the run that wrote it


def _lists_options(init: Callable[P, None]) -> Callable[P, None]:
    """Decorate a constructor: an unknown keyword is an error that says which ones there are."""
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise TypeError(f"ZeroStrategy has no option {name!r}; {hint}The options are: {', '.join(known)}")
        init(*args, **kwargs)

    return checked


class ZeroStrategy(DDPStrategy):
    """Trains with parameters, gradients and optimizer state sharded over ranks, on the device or in host memory.

    ============  ======================  ===================  ===============
    name          optimizer state         gradients            parameters
    ============  ======================  ===================  ===============
    ``zero0``     replicated              replicated           replicated
    ``zero1``     sharded                 whole until reduced  replicated
    ``zero2``     sharded                 sharded              replicated
    ``zero3``     sharded                 sharded              sharded
    ============  ======================  ===================  ===============

    With ``_offload`` (stages 1-3) optimizer state and masters rest in host memory, at stage 3 the parameters too.
    ZeRO: https://arxiv.org/abs/1910.02054, ZeRO-Offload: https://arxiv.org/abs/2101.06840.

    The arguments from ``accelerator`` on are those of :class:`~lightning.pytorch.strategies.DDPStrategy`.

    Args:
        stage: 0, 1, 2 or 3.
        offload_optimizer: where masters, optimizer state and reduced gradients rest: ``"none"`` (the device) or
            ``"cpu"``.
        offload_params: where parameter shards rest at stage 3: ``"none"`` (the device) or ``"cpu"``.
        shard_size: number of neighbouring ranks that share one copy of the state; must divide the number of ranks.
            Default: those of one node, so that only sums of gradient shards cross the network between nodes. Each node
            then holds a whole copy; the number of all ranks takes the least memory, and is the default where nodes have
            one rank.
        bucket_size_mb: size in 2^20 bytes up to which small units share one collective, stages 0-2.
        units: what is gathered together at stage 3: module classes, their names, or patterns of module names
            (``"transformer.h.*"``); default: the outermost repeated blocks.
        persistence_numel: parameters with at most so many elements (biases, norms) stay whole at stage 3: it costs
            little memory and saves small collectives; 0 shards all.
        max_live_numel: at stage 3 the next unit is gathered while one computes, unless more than so many elements of
            units were whole then; ``None``: no limit, so that two units are whole at a time. 0 gathers nothing ahead.
        check_steps: number of first optimizer steps in which ranks compare notes before every collective, so that
            those that do not do the same get an error at once. Afterwards they get it at the end of the step or,
            where a collective waits for a rank that never joins, after ``timeout``.
        native_optimizer: ``"auto"`` runs torch's Adam(W), Adagrad, SGD by native kernels where state rests in host
            memory; ``"off"`` runs torch's own code.
        skip_nonfinite: skip a step, on all ranks and with a warning, when a gradient is not finite. With a loss scaler
            (fp16) that always happens. Parameters, optimizer state, step-wise schedulers and Lightning's
            ``WeightAveraging`` stand still; ``trainer.global_step`` counts the step.
        checkpoint_format: ``"full"``: one ordinary file, which all ranks write together, or rank 0 alone where they
            share no file system. ``"sharded"``: a folder by ``torch.distributed.checkpoint``, to which each rank adds
            its part.
        async_save: checkpoints during ``fit`` are copied to host memory, which takes as much of it as the rank's part
            of the checkpoint, and written while training goes on. An error appears at the next save or at the end.
        checksums: write checksums of all tensors into checkpoints, and verify them when one is loaded; it is read once
            more for that, each rank a part.
        timeout: seconds after which a collective fails that some rank never joins.
        start_method: how the other ranks are started: ``"popen"`` re-runs the script.

    Raises:
        ValueError: for a value that is not one of those above, or a combination that cannot work.
        TypeError: for an unknown option.
    """

    strategy_name = "zero"

    @_lists_options
    def __init__(
        self,
        stage: int = 2,
        *,
        offload_optimizer: StoreName = "none",
        offload_params: StoreName = "none",
        shard_size: int | None = None,
        bucket_size_mb: float = 25.0,
        units: Sequence[str | type[nn.Module]] | None = None,
        persistence_numel: int = 10_000,
        max_live_numel: int | None = None,
        check_steps: int = 10,
        native_optimizer: NativeName = "auto",
        skip_nonfinite: bool = True,
        checkpoint_format: FormatName = "full",
        async_save: bool = False,
        checksums: bool = True,
        timeout: float = 1800.0,
        start_method: StartMethod = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
    ) -> None:
        self._policy = ShardingPolicy.from_stage(stage)
        _check_choice("native_optimizer", native_optimizer, get_args(NativeName))
        _check_choice("start_method", start_method, get_args(StartMethod))
        _check_choice("checkpoint_format", checkpoint_format, get_args(FormatName))
        _check_stores(stage, offload_optimizer, offload_params)
        _check_shard_size(stage, shard_size)
        _check_positive("bucket_size_mb", bucket_size_mb, "a number greater than 0; 25 is a good start")
        _check_positive("timeout", timeout, "a number of seconds greater than 0; the default is 1800")
        if not isinstance(skip_nonfinite, bool):
            raise TypeError(f"skip_nonfinite={skip_nonfinite!r} must be True or False")
        _check_units(units)
        _check_count("persistence_numel", persistence_numel, "a number of elements >= 0; 0 shards every parameter")
        _check_count("check_steps", check_steps, "a number of steps >= 0; the default is 10")
        if max_live_numel is not None:
            _check_count("max_live_numel", max_live_numel, "a number of elements >= 0, or None for no limit")
        self.stage = stage
        # A Hydra configuration gives members of an enum, which a checkpoint that is loaded as data may not hold.
        self.offload_optimizer = str(offload_optimizer)
        self.offload_params = str(offload_params)
        self.shard_size = 1 if stage == 0 else shard_size
        self.bucket_size_mb = bucket_size_mb
        self.units = units
        self.persistence_numel = persistence_numel
        self.max_live_numel = max_live_numel
        self.check_steps = check_steps
        self.native_optimizer = native_optimizer
        self.skip_nonfinite = skip_nonfinite
        self.checkpoint_format = str(checkpoint_format)
        self.async_save = async_save
        self.checksums = checksums
        self.memory: Memory | None = None  # of the fit that runs
        self._dtypes: dict[int, torch.dtype] = {}  # of parameters by their ids, before the engine changed them
        self._in_training_step = False
        self._dumping = False  # the Trainer collects a checkpoint
        self._undo: list[Undo] = []  # what `setup` changed of objects that outlive the fit
        self._rng: dict[str, Tensor] | None = None  # what a fit that resumes has yet to give its generators
        self._engine: Engine | None = None
        self._mesh: Mesh | None = None
        self._background: _checkpoint.Background | None = None
        self._failed = False
        self._fitting = False
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout),
            start_method=start_method,
        )

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register ``zero0`` ... ``zero3_offload``."""
        register_in(strategy_registry)

    @property
    def engine(self) -> Engine:
        """What shards the module; exists from ``setup`` on."""
        if self._engine is None:
            raise RuntimeError(
                "this Trainer's strategy holds no shards: they exist from the start of Trainer.fit, validate, test or "
                "predict until strategy.release(). Save checkpoints and read optimizer state before the release"
            )
        if self._engine.released:
            raise RuntimeError(
                "another Trainer has taken over this module, and with it the weights; the optimizer state of this one "
                "is gone. Save its checkpoint before the other Trainer runs, or save the other's"
            )
        return self._engine

    # ------------------------------------------------------------------------------------------------------- set-up

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else ZeroPrecision()

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # With a registered name Lightning makes the stock plugin for the flag and assigns it here.
        self._precision_plugin = None if precision_plugin is None else as_zero_precision(precision_plugin)

    @override
    def _configure_launcher(self) -> None:
        if reason := why_not_in_sweep(self):
            raise ValueError(reason)
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = _ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = _GatheringLauncher(self, start_method=self._start_method)

    @override
    def setup_environment(self) -> None:
        # Lightning's own set-up would fail by an index on a rank beyond `devices`.
        if torch.distributed.is_initialized():
            self._check_world_size()
        super().setup_environment()
        self._check_world_size()
        ops.share_cores(self.num_processes, self.local_rank)  # the ranks of a machine update at the same time
        if self._mesh is None:
            self._mesh = Mesh.create(self._shard_size(), self._timeout)
            if self.async_save:
                self._background = _checkpoint.Background(Group.for_thread(self._timeout))
            if self.shard_size is None and self._mesh.replica.size > 1:
                rank_zero_info(
                    f"ZeroStrategy: shard_size={self._mesh.shard.size}, the ranks of a node: each of the "
                    f"{self.num_nodes} nodes holds a copy of all that is sharded. shard_size={self._mesh.world.size} "
                    "shards over all ranks, for less memory and more traffic between nodes"
                )
        # Another Trainer's engine would go on holding the values from before what is loaded next.
        if self.lightning_module is not None:
            for engine in engines_of(self.lightning_module):
                if engine is not self._engine:
                    engine.release()
            self._hold_whole_for_callbacks(self.lightning_module)

    def _hold_whole_for_callbacks(self, module: pl.LightningModule) -> None:
        """Callbacks set up before the strategy does: of a module that an earlier run has sharded, perhaps."""
        for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
            if whole_weights.copies_module(callback) and self._policy.shard_params:
                rank_zero_warn(
                    f"{type(callback).__name__} keeps a whole copy of {type(module).__name__} on every rank, and every "
                    "time that it averages or swaps weights all of them are gathered: the module and its copy must fit "
                    "into each rank's memory, which stage 3 otherwise makes unnecessary. "
                    "lightning_zero.callbacks.EMA keeps its average in shards"
                )
            self._undo += whole_weights.hold(callback, self._whole)

    @contextlib.contextmanager
    def _whole(self, writeback: bool, full_precision: bool) -> Iterator[None]:
        """Around hooks that read or replace whole weights."""
        if self._engine is None or self._engine.released:
            yield
            return
        assert self.lightning_module is not None
        with self._engine.gathered(self.lightning_module.parameters(), writeback, full_precision):
            yield
        self._engine.settle()

    @override
    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Around ``configure_model`` and inside ``Trainer.init_module``: at stage 3 parameters are sharded one by one.

        ``init_module`` starts the other ranks here, as ``fit`` would. Where that is by ``spawn`` or ``fork``, which
        begin inside ``fit``, it initializes the whole module; use ``configure_model`` there.
        """
        with super().tensor_init_context(empty_init), self._sharded_init():
            yield

    def _sharded_init(self) -> contextlib.AbstractContextManager[Any]:
        shards = self._shard_size()
        spawned = self._mesh is None and isinstance(self.launcher, _MultiProcessingLauncher)
        if not self._policy.shard_params or shards == 1 or spawned:
            return contextlib.nullcontext()
        if self._mesh is None:
            assert self.launcher is not None
            with isolate_rng():  # the set-up seeds again
                self.launcher.launch(self.setup_environment)
        assert self._mesh is not None
        device = self.root_device
        on_host = device.type == "cpu" or self.offload_params == "cpu"
        return sharded_init(self._mesh, device, HostStore() if on_host else DeviceStore(device))

    def _shard_size(self) -> int:
        """Ranks that share one copy."""
        return self._default_shard_size() if self.shard_size is None else self.shard_size

    def _default_shard_size(self) -> int:
        """The ranks of a node, or one of each where nodes have but one."""
        return self.num_processes if self.num_processes > 1 else self.num_nodes

    def _check_world_size(self) -> None:
        expected, actual = self.num_nodes * self.num_processes, torch.distributed.get_world_size()
        if expected != actual:
            raise ValueError(
                f"the process group has {actual} ranks, the Trainer expects devices x num_nodes = {expected}: a "
                "process keeps the group of its first Trainer. Start a new process, or call "
                "torch.distributed.destroy_process_group() before the next Trainer"
            )

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._check_precision_flag(trainer._accelerator_connector._precision_flag)
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self._check_compiled(self.lightning_module)
        self.accelerator.setup(trainer)
        self._failed = False
        self._fitting = trainer.state.fn == TrainerFn.FITTING
        fitting = trainer.state.fn == TrainerFn.FITTING
        optimizers: list[Optimizer] = []
        if fitting:
            if self._layer_sync is not None and self._engine is None:
                self.model = self._layer_sync.apply(self.lightning_module)
            self.setup_optimizers(trainer)
            optimizers = [o for o in self.optimizers if not isinstance(o, _MockOptimizer)]
            self.memory = self._describe_memory(self.lightning_module, optimizers, trainer.accumulate_grad_batches)
        self._shard(self.lightning_module, optimizers if fitting else None)
        self.setup_precision_plugin()
        for wrapper in self._lightning_optimizers:
            # The wrapper inherits the optimizer's class and would find the class's method before the engine's.
            wrapper.__dict__["zero_grad"] = wrapper._optimizer.zero_grad
        self._hold_still_on_skips(trainer.callbacks)  # type: ignore[attr-defined]
        if self._background is not None:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, ModelCheckpoint):
                    self._undo.append(_know_background(callback, self._background))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if fitting and isinstance(callback, whole_weights.OnShards):
                callback.on_sharded(trainer, self.lightning_module)
        connector = trainer._checkpoint_connector
        connector.dump_checkpoint = functools.partial(self._dump_lazily, connector)  # type: ignore[method-assign]

    def _dump_lazily(self, connector: _CheckpointConnector, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As the connector's method; only there, and not where user code asks for state, tensors are looked up late."""
        self._dumping = True
        try:
            return type(connector).dump_checkpoint(connector, *args, **kwargs)
        finally:
            self._dumping = False

    def _check_compiled(self, module: pl.LightningModule) -> None:
        if self._policy.shard_params and module._compiler_ctx is not None:
            raise ValueError(
                f"torch.compile({type(module).__name__}) at stage 3: a graph of the whole module cannot gather the "
                "parameters of its blocks. Compile the blocks instead, `for block in self.blocks: block.compile()` in "
                "`__init__` or `configure_model`, or use a stage below 3"
            )

    def _check_precision_flag(self, flag: str) -> None:
        """Lightning silently ignores the flag beside a plugin that came with the strategy; 32-true is its default."""
        plugin = self.precision_plugin
        assert isinstance(plugin, ZeroPrecision)
        if flag not in ("32-true", plugin.precision):
            raise ValueError(
                f"Trainer(precision={flag!r}) contradicts the strategy's precision_plugin, which says "
                f"{plugin.precision!r}; give one of them"
            )

    def _shard(self, module: pl.LightningModule, optimizers: list[Optimizer] | None) -> None:
        """Build the engine, or give the one of an earlier run its new optimizers."""
        parameters = [p for o in optimizers or [] for group in o.param_groups for p in group["params"]]
        engine = self._engine
        # Another Trainer may have released it, and the module may have grown.
        if engine is not None and not (engine.module is module and engine.holds([*module.parameters(), *parameters])):
            engine.release()
            engine = None
        if engine is None:
            precision = self.precision_plugin
            assert isinstance(precision, ZeroPrecision)
            assert self._mesh is not None
            self._dtypes.clear()
            self._dtypes.update((id(p), p.dtype) for p in module.parameters())
            placement = Placement(
                self._mesh, self._policy, precision.policy, self.root_device, *self._stores(self.root_device)
            )
            engine = Engine(
                module,
                placement,
                optimized=parameters if optimizers is not None else None,
                units=self.units,
                bucket_size_mb=self.bucket_size_mb,
                persistence_numel=self.persistence_numel,
                max_live_numel=self.max_live_numel,
                check_steps=self.check_steps,
                scaler=precision.scaler,
                skip_nonfinite=self.skip_nonfinite,
            )
            _update_properties(module, device=self.root_device)  # what `LightningModule.device` reports
            precision.attach(engine)
            self._engine = engine
        if optimizers is not None:
            engine.attach([make_updater(o, engine, self.native_optimizer) for o in optimizers])

    def _describe_memory(
        self, module: pl.LightningModule, optimizers: Sequence[Optimizer], micro_batches: int
    ) -> Memory:
        precision = self.precision_plugin
        assert isinstance(precision, ZeroPrecision)
        setting = Setting(
            self._policy,
            self._shard_size(),
            self.offload_optimizer == "cpu",
            self.offload_params == "cpu",
            self.bucket_size_mb,
            self.persistence_numel,
            self.max_live_numel,
            precision.policy,
        )
        return Memory(
            module=module,
            optimizers=optimizers,
            micro_batches=micro_batches,
            setting=setting,
            dtypes=self._dtypes,
            units=self.units,
            native=self.native_optimizer,
            device=self.root_device,
            world_size=self.world_size,
            rank=self.global_rank,
            replicates=not self.stage,
            default_size=self._default_shard_size(),
        )

    def _hold_still_on_skips(self, callbacks: Sequence[pl.Callback]) -> None:
        """What follows the optimizer step by step stands still with it: schedulers and averaged weights."""
        for config in self.lr_scheduler_configs:
            if isinstance(optimizer := getattr(config.scheduler, "optimizer", None), Optimizer):
                skipped = functools.partial(self._holds_still, config, optimizer)
                self._undo.append(hold_scheduler(config, skipped))
        for callback in callbacks:
            if isinstance(callback, WeightAveraging):
                self._undo.append(hold_average(callback, self._skipped_all))

    def _holds_still(self, config: LRSchedulerConfig, optimizer: Optimizer) -> bool:
        """Whether a call of this scheduler's ``step`` belongs to a step of ``optimizer`` that was skipped."""
        assert self.lightning_module is not None
        # By hand, Lightning ignores the interval: what a training step calls follows its steps.
        automatic = self.lightning_module.automatic_optimization
        per_step = config.interval == "step" if automatic else self._in_training_step
        return per_step and self.last_step_skipped(optimizer)

    def _skipped_all(self) -> bool:
        return all(self.last_step_skipped(optimizer) for optimizer in self.optimizers)

    def _stores(self, device: torch.device) -> tuple[Store, Store]:
        host = HostStore(pin=device.type == "cuda")
        on_device = DeviceStore(device)
        return (
            host if self.offload_optimizer == "cpu" else on_device,
            host if self.offload_params == "cpu" else on_device,
        )

    @override
    def model_to_device(self) -> None:
        """Nothing: the engine moves the module bucket by bucket."""

    def release(self, module: nn.Module | None = None) -> None:
        """Give the module ordinary parameters again, whole and at full precision, and free the shards. Collective.

        After ``fit`` the module stays sharded (stage 3) and in its 16-bit dtype, ready for ``test``, a second ``fit``
        or ``save_checkpoint``. Call this before code that wants a plain module, such as an export.

        Args:
            module: one that ``Trainer.init_module`` made and no Trainer has run; default: the one of the last run.
        """
        if module is not None:
            make_whole(module.parameters())
        if self._engine is not None and module in (None, self._engine.module):
            self._engine.release()
            self._engine = None

    @override
    def teardown(self) -> None:
        # Shards stay for `trainer.save_checkpoint`, `test` and a second `fit`; no rank may wait for another here.
        assert self.accelerator is not None
        self._rng = self.memory = None
        while self._undo:
            self._undo.pop()()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if self._background is not None:
            self._fitting = False
            try:
                self._background.wait()
            except (_checkpoint.CheckpointError, CollectiveError):
                if not self._failed:  # else there is another error to report, and this one was logged
                    raise

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Process groups do not pickle; a spawned rank makes its own.
        return {**super().__getstate__(), "_engine": None, "_mesh": None, "_background": None}

    @override
    def process_dataloader(self, dataloader: object) -> object:
        # The user's `train_dataloader` has drawn as in the first run; what follows goes on from the checkpoint.
        assert self.lightning_module is not None
        if self.lightning_module.trainer.training:
            self._restore_rng()
        return super().process_dataloader(dataloader)

    @override
    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        if not _begins_epoch(self.lightning_module.trainer.fit_loop):
            self._restore_rng()  # the run that saved drew for the loader's iterator before
        self._rng = None

    def _restore_rng(self) -> None:
        if self._rng is not None and self._mesh is not None:
            _checkpoint.rng.restore(self._rng, self._mesh.world.rank, self.root_device)

    # -------------------------------------------------------------------------------------------------------- steps

    @contextlib.contextmanager
    def _forward_context(self) -> Iterator[None]:
        assert self.lightning_module is not None
        if self.lightning_module._compiler_ctx is not None:
            self.engine.settle()  # inside the graph of the whole module nothing can be gathered
        with self.engine.forward_context():
            yield

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._in_training_step = True
        try:
            with self._forward_context():
                output = super().training_step(*args, **kwargs)
        finally:
            self._in_training_step = False
        return self._no_gradients() if output is None and self._may_lack_a_loss() else output

    def _may_lack_a_loss(self) -> bool:
        """Whether a rank can go without backward while others run one: not where they gather parameters in it."""
        assert self.lightning_module is not None
        return self.lightning_module.automatic_optimization and self.world_size > 1 and not self._policy.shard_params

    def _no_gradients(self) -> Tensor:
        """A loss that depends on no parameter: Lightning takes no ``None`` of one rank of several."""
        return torch.zeros((), device=self.root_device, requires_grad=True)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._forward_context():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._forward_context():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._forward_context():
            return super().predict_step(*args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        self.engine.sync_buffers()

    @override
    def on_test_start(self) -> None:
        self.engine.sync_buffers()

    @override
    def on_predict_start(self) -> None:
        self.engine.sync_buffers()

    @contextlib.contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with self.engine.no_sync():
            yield

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        with self.engine.timers.phase(Phase.BACKWARD):
            return super().backward(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self.engine.begin_backward()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        self.engine.flush()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        # The hooks that follow may read any parameter.
        self.engine.settle()
        return output

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> float:
        """Clip the averaged gradients of ``optimizer`` by their global norm; returns the norm before clipping.

        Use it for :func:`torch.nn.utils.clip_grad_norm_`, which sees no gradients once they are reduced. Collective.
        """
        return self.engine.clip_grad_norm_(_unwrap(optimizer), max_norm)

    def grad_norm(self, optimizer: Optimizer) -> float:
        """The global L2 norm of the averaged gradients of ``optimizer``, as clipped so far. Collective."""
        return self.engine.grad_norm(_unwrap(optimizer))

    @property
    def loss_scale(self) -> float:
        """The factor by which the next loss is multiplied for backward; 1 without a loss scaler."""
        return self.engine.loss_scale

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps that all ranks skipped because a gradient was not finite; resumed runs go on counting."""
        return self.engine.skipped_steps

    def last_step_skipped(self, optimizer: Optimizer) -> bool:
        """Whether the last step of ``optimizer`` was skipped on all ranks."""
        outcome = self.engine.last_step(_unwrap(optimizer))
        return outcome is not None and outcome.skipped

    def last_grad_norm(self, optimizer: Optimizer) -> float | None:
        """The global L2 norm of the gradients of the last step of ``optimizer``, before clipping; for logging.

        ``inf`` or ``nan`` where one of them was; ``None`` before the first step.
        """
        outcome = self.engine.last_step(_unwrap(optimizer))
        return None if outcome is None else outcome.grad_norm

    # -------------------------------------------------------------------------------------------------- checkpoints

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return self._policy.shard_params

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if self._mesh is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self._engine is not None:
            _checkpoint.follow_first(self._engine)
        if self._background is not None:
            self._background.wait()
        checkpoint = {**checkpoint, WRITTEN_BY: self._written_by()}
        if "optimizer_states" in checkpoint:  # a run can resume from it
            checkpoint[_checkpoint.rng.ENTRY] = _checkpoint.rng.gather(self._mesh.world, self.root_device)
        if self._is_local_file(filepath) and storage_options is None:
            path, world = Path(filepath).expanduser(), self._mesh.world
            save = _checkpoint.begin(
                self.checkpoint_format, checkpoint, path, self._engine, world, checksums=self.checksums
            )
            if save is not None:
                self._write(save)
                return
            rank_zero_warn(
                f"not all ranks see {filepath} where rank 0 writes it, so that it gathers the whole checkpoint first, "
                "which takes time and host memory. Save to a file system that all nodes share, or with "
                "checkpoint_format='sharded'"
            )
        elif self.checkpoint_format != "full" or self.async_save:
            rank_zero_warn(
                f"{type(self.checkpoint_io).__name__} writes {filepath}, so that rank 0 gathers the whole checkpoint "
                "first and training waits for it: checkpoint_format and async_save are for local files without a "
                "CheckpointIO of your own or storage_options"
            )
        if self._engine is not None:
            _checkpoint.fetch_for_first(checkpoint, self._engine)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _write(self, save: _checkpoint.Save) -> None:
        assert self._mesh is not None
        assert self.lightning_module is not None
        if save.spread:
            rank_zero_warn(
                "not all ranks see the folder of rank 0: there will be a folder on the file system of each node. Copy "
                "their files into one before another number of ranks, or another machine, loads it"
            )
        # Lightning requeues a job as soon as its SLURM checkpoint is there.
        if self._background is not None and self._fitting and not save.path.name.startswith("hpc_ckpt_"):
            self._background.start(save, self._mesh.world)
        else:
            save.write(self._mesh.world)

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        # The one that is being written may be what replaces it.
        remove = functools.partial(self._remove, filepath)
        if self._background is None:
            remove()
        else:
            self._background.after(remove)

    def _remove(self, filepath: _PATH) -> None:
        path = Path(filepath).expanduser()
        if self._is_local_file(filepath) and path.is_dir():
            if self.local_rank == 0:  # each node may have one; on a file system that they share one of them is first
                with contextlib.suppress(FileNotFoundError):
                    _checkpoint.remove(path)
        else:
            super().remove_checkpoint(filepath)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if self.memory is not None and is_out_of_memory(exception):
            try:
                console = Console(file=sys.stderr)
                console.print(f"Rank {self.global_rank} is out of memory.", self.memory.report())
            except Exception as error:  # noqa: BLE001  (the other one says what went wrong, and goes on)
                exception.add_note(f"ZeroStrategy could not report what the memory holds: {error!r}")
        super().on_exception(exception)

    def _is_local_file(self, path: _PATH) -> bool:
        """Whether checkpoints go to files by torch, so that our way of reading and writing them can stand in."""
        return type(self.checkpoint_io) is TorchCheckpointIO and "://" not in str(path)

    def _written_by(self) -> dict[str, Any]:
        """What a checkpoint says about the run that wrote it; for information only."""
        assert self._mesh is not None
        return {
            "version": __version__,
            "stage": self.stage,
            "world_size": self._mesh.world.size,
            "shard_size": self._mesh.shard.size,
            "offload_optimizer": self.offload_optimizer,
            "offload_params": self.offload_params,
            "precision": str(self.precision_plugin.precision),
        }

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        if not self._is_local_file(checkpoint_path):
            return super().load_checkpoint(checkpoint_path, weights_only)
        if self._background is not None:
            self._background.wait()
        world = Group() if self._mesh is None else self._mesh.world
        loaded: dict[str, Any] = _checkpoint.load(
            Path(checkpoint_path).expanduser(), world, weights_only is not False, self.checksums
        )
        if self._mesh is not None and (before := loaded.get(WRITTEN_BY)):
            now = self._written_by()
            changed = [
                f"{name.replace('_', ' ')} {before[name]} -> {now[name]}"
                for name in ("world_size", "shard_size", "stage", "precision")
                if name in before and before[name] != now[name]
            ]
            if changed:
                rank_zero_info(f"ZeroStrategy: resharding {checkpoint_path}: {', '.join(changed)}")
        # Their tensors, a learning rate for one, are kept by who gets them: views would keep the file mapped.
        kept = ("lr_schedulers", _checkpoint.rng.ENTRY)
        return loaded | {entry: copy.deepcopy(loaded[entry]) for entry in kept if entry in loaded}

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._engine is None:
            return plain_names(super().lightning_module_state_dict())
        state = _checkpoint.module_state_dict(self.engine)
        return state if self._dumping else _checkpoint.whole_on_first(state, self.engine)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._engine is None or self._engine.released:
            assert isinstance(self.precision_plugin, ZeroPrecision)
            assert self.lightning_module is not None
            if self.precision_plugin.policy.param_dtype == torch.float64:
                # Parameters get their dtype in `setup`; before it, the values would be rounded to what they have.
                self.lightning_module.double()
            state = names_of(self.lightning_module, checkpoint["state_dict"])
            super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)
            for value in state.values():
                if isinstance(value, Tensor):
                    _checkpoint.give_back_pages(value)
        else:
            _checkpoint.load_module_state_dict(self._engine, checkpoint["state_dict"], strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        updater = self._updater_of(_unwrap(optimizer))
        if updater is None:
            return optimizer.state_dict()
        state = _checkpoint.optimizer_state_dict(self.engine, updater)
        if self._dumping:
            return state
        state = _checkpoint.whole_on_first(state, self.engine)
        return state if self.is_global_zero else {**state, "state": {}}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"the checkpoint has {len(states)} optimizers, the module {len(self.optimizers)}; configure as many, "
                f"{_checkpoint.WEIGHTS_ALONE}"
            )
        updaters = [self._updater_of(optimizer) for optimizer in self.optimizers]
        for load in (_checkpoint.check_optimizer_state_dict, _checkpoint.load_optimizer_state_dict):  # all or nothing
            for updater, state in zip(updaters, states, strict=True):
                if updater is not None:
                    load(self.engine, updater, state)
        self._rng = checkpoint.get(_checkpoint.rng.ENTRY)
        if self._rng and (note := _checkpoint.rng.note(self._rng, self.world_size)):
            rank_zero_info(f"ZeroStrategy: {note}")

    def _updater_of(self, optimizer: Optimizer) -> ShardUpdater | None:
        """What drives ``optimizer``; ``None`` for the stand-in of a module that configures none."""
        for updater in self.engine.updaters:
            if updater.optimizer is optimizer:
                assert isinstance(updater, ShardUpdater)
                return updater
        return None


class _ScriptLauncher(_SubprocessScriptLauncher):
    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        _recover_checkpoints(trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)


class _GatheringLauncher(_MultiProcessingLauncher):
    """Workers send the module's ``state_dict`` to the main process after teardown: it must be whole."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        _recover_checkpoints(trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)

    @override
    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> Any:
        with gathered_parameters(trainer.lightning_module):
            return super()._collect_rank_zero_results(trainer, results)


def _recover_checkpoints(trainer: pl.Trainer | None) -> None:
    """Before Lightning looks for the last one: it may have lost its name, where its save was killed between renames."""
    for callback in trainer.checkpoint_callbacks if trainer is not None else ():
        if isinstance(callback, ModelCheckpoint) and callback.dirpath and "://" not in str(callback.dirpath):
            _checkpoint.recover_all(Path(callback.dirpath))


def _begins_epoch(loop: _FitLoop) -> bool:
    """Whether a loop that starts has made the iterator of an epoch that begins, and not to skip what is done of one."""
    if not loop.restarting or loop.restarted_on_epoch_start:
        return True
    after_last_batch = loop.epoch_loop.restarted_on_train_batch_end and loop.epoch_loop.batch_progress.is_last_batch
    return loop.restarted_mid_epoch and after_last_batch


def _know_background(callback: ModelCheckpoint, background: _checkpoint.Background) -> Undo:
    """Have the callback take a save that goes on into account; returns what undoes it."""
    own_exists, own_link = callback.file_exists, callback._link_checkpoint

    def file_exists(callback: ModelCheckpoint, filepath: _PATH, trainer: pl.Trainer) -> bool:
        background.wait()  # the next save would; a name that is being written is taken
        return own_exists(filepath, trainer)

    def _link_checkpoint(callback: ModelCheckpoint, trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
        # A link to what is never completed would replace one to what is. Ranks need not meet for it.
        alone = SimpleNamespace(is_global_zero=trainer.is_global_zero, strategy=SimpleNamespace(barrier=lambda: None))
        background.after(functools.partial(own_link, cast("pl.Trainer", alone), filepath, linkpath))

    return replace_methods(callback, file_exists, _link_checkpoint)


def _unwrap(optimizer: Optimizer) -> Optimizer:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")


def _check_positive(name: str, value: object, expectation: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r} must be {expectation}")


def _check_count(name: str, value: object, expectation: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}={value!r} must be {expectation}")


def _check_units(units: object) -> None:
    if units is None:
        return
    if isinstance(units, str | type) or not isinstance(units, Iterable):
        example = units if isinstance(units, str | type) else "transformer.h.*"
        raise TypeError(f"units={units!r} must be a list of classes, names or patterns, such as units=[{example!r}]")
    for unit in units:
        if not isinstance(unit, str | type):
            raise TypeError(f"units={units!r} must hold classes, their names or patterns of module names; got {unit!r}")


def _check_stores(stage: int, optimizer: str, params: str) -> None:
    for name, value in (("offload_optimizer", optimizer), ("offload_params", params)):
        _check_choice(name, value, get_args(StoreName))
        if value == "nvme":
            raise ValueError(f"{name}='nvme' is not available in this version; use {name}='cpu' for host memory")
    if stage == 0 and (optimizer != "none" or params != "none"):
        raise ValueError(
            f"stage=0 keeps everything replicated on the device; got offload_optimizer={optimizer!r}, "
            f"offload_params={params!r}. Use stage=1 or higher to offload"
        )
    if stage < 3 and params != "none":
        raise ValueError(
            f"offload_params={params!r} needs stage=3, where parameters are sharded; got stage={stage}. "
            "Use stage=3, or offload_optimizer alone"
        )


def _check_shard_size(stage: int, shard_size: int | None) -> None:
    if shard_size is None:
        return
    if not isinstance(shard_size, int) or isinstance(shard_size, bool) or shard_size < 1:
        raise ValueError(f"shard_size={shard_size!r} must be a number of ranks >= 1, or None for those of a node")
    if stage == 0 and shard_size != 1:
        raise ValueError(f"shard_size={shard_size} needs stage=1 or higher: stage=0 shards nothing")
