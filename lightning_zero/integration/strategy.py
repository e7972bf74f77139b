"""The Lightning strategy: Lightning's life cycle, and nothing of the sharding itself."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_warn
from rich.console import Console
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero import ops
from lightning_zero.checkpoint import Background, CheckpointError
from lightning_zero.engine import Engine, engines_of
from lightning_zero.integration import patches, private, remedies
from lightning_zero.integration.checkpointing import CheckpointingStrategy
from lightning_zero.integration.launchers import make_launcher, tell_why
from lightning_zero.integration.names import register_in
from lightning_zero.integration.options import (
    FormatName,
    NativeName,
    StartMethod,
    StoreName,
    StrategyOptions,
    lists_options,
)
from lightning_zero.integration.precision import ZeroPrecision, as_zero_precision
from lightning_zero.integration.steps import SteppingStrategy
from lightning_zero.planning.memory import Memory, is_out_of_memory
from lightning_zero.sharding import (
    Board,
    BucketPlacement,
    CollectiveError,
    Group,
    Mesh,
    ShardingPolicy,
    sharded_init,
    unshard_parameters,
)
from lightning_zero.storage import DeviceStore, Executor, HostStore, InlineExecutor, TensorStore, device_type
from lightning_zero.update import make_updater


class ZeroStrategy(SteppingStrategy, CheckpointingStrategy):
    """Trains with parameters, gradients and optimizer state sharded over ranks, on the device or in host memory.

    ============  ======================  ===================  ===============
    name          optimizer state         gradients            parameters
    ============  ======================  ===================  ===============
    ``zero0``     replicated              replicated           replicated
    ``zero1``     sharded                 full until reduced   replicated
    ``zero2``     sharded                 sharded              replicated
    ``zero3``     sharded                 sharded              sharded
    ============  ======================  ===================  ===============

    With ``_offload`` (stages 1-3) optimizer state and masters rest in host memory, at stage 3 the parameters too.
    ZeRO: https://arxiv.org/abs/1910.02054, ZeRO-Offload: https://arxiv.org/abs/2101.06840.

    The arguments ``accelerator`` to ``precision_plugin`` are those of
    :class:`~lightning.pytorch.strategies.DDPStrategy`.

    Args:
        stage: 0, 1, 2 or 3.
        offload_optimizer: where masters, optimizer state and reduced gradients rest: ``"none"`` (the device) or
            ``"cpu"``.
        offload_params: where parameter shards rest at stage 3: ``"none"`` (the device) or ``"cpu"``.
        shard_size: number of neighbouring ranks that share one copy of the state; must divide the number of ranks.
            Default: those of one node, so that only sums of gradient shards cross the network between nodes. Each node
            then holds a full copy; the number of all ranks takes the least memory, and is the default where nodes have
            one rank.
        bucket_size_mb: size in 2^20 bytes up to which small units share one bucket, a flat buffer that is reduced and
            gathered as one, stages 0-2.
        units: modules whose parameters are gathered together at stage 3: their classes, class names, or patterns of
            module names (``"transformer.h.*"``); default: the outermost repeated blocks.
        persistence_numel: parameters with at most so many elements (biases, norms) stay unsharded at stage 3: it costs
            little memory and saves small collectives; 0 shards all.
        max_live_numel: at stage 3 the next unit is gathered while one computes, unless more than so many elements of
            units were unsharded then; ``None``: no limit, so that two units are unsharded at a time. 0 gathers nothing
            ahead.
        check_steps: number of first optimizer steps in which ranks compare notes before every collective, so that
            those that do not do the same get an error at once. Afterwards they get it at the end of the step or,
            where a collective waits for a rank that never joins, after ``timeout``.
        detect_data_edits: for debugging, at stages 0 to 2: keep what was written through ``parameter.data`` between
            steps also without ``gathered_parameters(writeback=True)``. Every step reads the rank's shard twice more
            for that and waits for the device.
        native_optimizer: ``"auto"`` runs torch's Adam(W), Adagrad, SGD by native kernels where state rests in host
            memory; ``"off"`` runs torch's own code.
        skip_nonfinite: skip a step, on all ranks and with a warning, when a gradient is not finite. With a loss scaler
            (fp16) that always happens. Parameters, optimizer state, step-wise schedulers and Lightning's
            ``WeightAveraging`` are left as they were; ``trainer.global_step`` counts the step.
        max_consecutive_skips: end the run with an error, on all ranks, when so many steps of an optimizer in a row were
            skipped, which trains nothing; ``None``: never. Skips by which a dynamic loss scaler looks for a scale do
            not count: it ends at its smallest.
        checkpoint_format: ``"full"``: one ordinary file, which all ranks write together, or rank 0 alone where they
            share no file system. ``"sharded"``: a folder by ``torch.distributed.checkpoint``, to which each rank adds
            its part.
        async_save: checkpoints during ``fit`` are copied to host memory, which takes as much of it as the rank's part
            of the checkpoint, and written while training goes on. An error appears at the next save or at the end.
        checksums: write checksums of all tensors into checkpoints, and verify them when one is loaded; it is read once
            more for that, each rank a part.
        timeout: seconds after which a collective fails that some rank never joins.
        start_method: how the other ranks are started: ``"popen"`` re-runs the script.
        process_group_backend: of torch, ``"nccl"`` or ``"gloo"``; default: the one that fits the accelerator.

    Raises:
        ValueError: for a value that is not one of those above, or a combination that cannot work.
        TypeError: for an unknown option.
    """

    strategy_name = "zero"

    @lists_options
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
        detect_data_edits: bool = False,
        native_optimizer: NativeName = "auto",
        skip_nonfinite: bool = True,
        max_consecutive_skips: int | None = 25,
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
        self._options = StrategyOptions(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_params=offload_params,
            shard_size=shard_size,
            bucket_size_mb=bucket_size_mb,
            units=units,
            persistence_numel=persistence_numel,
            max_live_numel=max_live_numel,
            check_steps=check_steps,
            detect_data_edits=detect_data_edits,
            native_optimizer=native_optimizer,
            skip_nonfinite=skip_nonfinite,
            max_consecutive_skips=max_consecutive_skips,
            checkpoint_format=checkpoint_format,
            async_save=async_save,
            checksums=checksums,
            timeout=timeout,
            start_method=start_method,
            process_group_backend=process_group_backend,
        )
        self._policy = ShardingPolicy.from_stage(self.options.stage)
        self._undo = []
        self.memory: Memory | None = None  # of the fit that runs
        self._dtypes: dict[int, torch.dtype] = {}  # of parameters by their ids, before the engine changed them
        self._executor: Executor = InlineExecutor()
        self._failed = False
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=self.options.process_group_backend,
            timeout=timedelta(seconds=self.options.timeout),
            start_method=self.options.start_method,
        )

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: private.StrategyRegistryType) -> None:
        """Register ``zero0`` ... ``zero3_offload``."""
        register_in(strategy_registry)

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
        self._launcher = make_launcher(self)

    @override
    def setup_environment(self) -> None:
        # Lightning's own set-up would fail by an index on a rank beyond `devices`.
        if torch.distributed.is_initialized():
            self._check_world_size()
        super().setup_environment()
        self._check_world_size()
        ops.share_cores(self.num_processes, self.local_rank)  # the ranks of a machine update at the same time
        if self._mesh is None:
            timeout = timedelta(seconds=self.options.timeout)
            self._mesh = Mesh.create(self._shard_size(), timeout)
            if self.options.async_save:
                self._background = Background(Group.for_thread(timeout), self._executor)
            if self.options.shard_size is None and not self.options.replicates and self._mesh.replica.size > 1:
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
            self._unshard_for_callbacks(self.lightning_module)

    def _unshard_for_callbacks(self, module: pl.LightningModule) -> None:
        """Callbacks set up before the strategy does: of a module that an earlier run has sharded, perhaps."""
        for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
            if patches.copies_module(callback) and self._policy.shard_params:
                rank_zero_warn(
                    f"{type(callback).__name__} keeps a full copy of {type(module).__name__} on every rank, and every "
                    "time that it averages or swaps weights all of them are gathered: the module and its copy must fit "
                    "into each rank's memory, which stage 3 otherwise makes unnecessary. "
                    "lightning_zero.callbacks.EMA keeps its average in shards"
                )
            self._undo += patches.unshard_for(callback, self._unsharded)

    @contextlib.contextmanager
    def _unsharded(self, writeback: bool, full_precision: bool) -> Iterator[None]:
        """Give hooks full weights to read or to replace."""
        if self._engine is None or self._engine.released:
            yield
            return
        with self._engine.gathered(self._engine.module.parameters(), writeback, full_precision):
            yield
        self._engine.settle()
        if writeback:
            self._engine.sync_buffers()  # they were replaced too, on each rank by its own

    @override
    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Shard parameters one by one at stage 3, in ``configure_model`` and inside ``Trainer.init_module``.

        ``init_module`` starts the other ranks here, as ``fit`` would. Where that is by ``spawn`` or ``fork``, which
        begin inside ``fit``, it initializes the whole module; use ``configure_model`` there.
        """
        with super().tensor_init_context(empty_init), self._sharded_init():
            yield

    def _sharded_init(self) -> contextlib.AbstractContextManager[Any]:
        shards = self._shard_size()
        spawned = self._mesh is None and isinstance(self.launcher, private.MultiProcessingLauncher)
        if not self._policy.shard_params or shards == 1 or spawned:
            return contextlib.nullcontext()
        if self._mesh is None:
            assert self.launcher is not None
            with isolate_rng():  # the set-up seeds again
                self.launcher.launch(self.setup_environment)
        assert self._mesh is not None
        device = self.root_device
        on_host = device_type(device).shares_host_memory or self.options.offload_params == "cpu"
        return sharded_init(self._mesh, device, HostStore() if on_host else DeviceStore(device))

    def _shard_size(self) -> int:
        """Ranks that share one copy."""
        if self.options.replicates:
            return 1
        return self._default_shard_size() if self.options.shard_size is None else self.options.shard_size

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
        self._check_precision_flag(private.precision_flag(trainer))
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self._check_compiled(self.lightning_module)
        self.accelerator.setup(trainer)
        self._failed = False
        self._fitting = fitting = trainer.state.fn == TrainerFn.FITTING
        optimizers: list[Optimizer] = []
        if fitting:
            if self._layer_sync is not None and self._engine is None:
                self.model = self._layer_sync.apply(self.lightning_module)
            self.setup_optimizers(trainer)
            optimizers = [o for o in self.optimizers if not private.is_stand_in(o)]
            self.memory = self._describe_memory(self.lightning_module, optimizers, trainer.accumulate_grad_batches)
        self._shard(self.lightning_module, optimizers if fitting else None)
        self.setup_precision_plugin()
        self._show_sums(trainer)
        for wrapper in self._lightning_optimizers:
            # The wrapper inherits the optimizer's class and would find the class's method before the engine's.
            wrapper.__dict__["zero_grad"] = wrapper.optimizer.zero_grad
        self._pass_over_skips(trainer.callbacks)  # type: ignore[attr-defined]
        if self._background is not None:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, ModelCheckpoint):
                    self._undo.append(patches.know_background(callback, self._background))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if fitting and isinstance(callback, patches.OnShards):
                callback.on_sharded(trainer, self.lightning_module)
        connector = private.checkpoint_connector(trainer)
        connector.dump_checkpoint = functools.partial(self._dump, connector)  # type: ignore[method-assign]

    def _check_compiled(self, module: pl.LightningModule) -> None:
        if self._policy.shard_params and private.is_compiled(module):
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
            placement = BucketPlacement(
                self._mesh,
                self._policy,
                precision.policy,
                self.root_device,
                *self._stores(self.root_device),
                self._executor,
            )
            engine = Engine(
                module,
                placement,
                optimized=parameters if optimizers is not None else None,
                units=self.options.units,
                bucket_size_mb=self.options.bucket_size_mb,
                persistence_numel=self.options.persistence_numel,
                max_live_numel=self.options.max_live_numel,
                check_steps=self.options.check_steps,
                detect_data_edits=self.options.detect_data_edits,
                scaler=precision.scaler,
                skip_nonfinite=self.options.skip_nonfinite,
                max_consecutive_skips=self.options.max_consecutive_skips,
            )
            private.report_device(module, self.root_device)
            precision.attach(engine)
            self._engine = engine
        if optimizers is not None:
            engine.attach([make_updater(o, engine, self.options.native_optimizer) for o in optimizers])

    def _describe_memory(
        self, module: pl.LightningModule, optimizers: Sequence[Optimizer], micro_batches: int
    ) -> Memory:
        precision = self.precision_plugin
        assert isinstance(precision, ZeroPrecision)
        setting = remedies.setting_of(self.options, self._shard_size(), precision.policy)
        default_size = self._default_shard_size()
        return Memory(
            module=module,
            optimizers=optimizers,
            micro_batches=micro_batches,
            setting=setting,
            dtypes=self._dtypes,
            units=self.options.units,
            native=self.options.native_optimizer,
            device=self.root_device,
            world_size=self.world_size,
            rank=self.global_rank,
            candidates=list(remedies.candidates(self.options, setting, default_size, self.world_size)),
            hint=remedies.activations(micro_batches),
        )

    def _stores(self, device: torch.device) -> tuple[TensorStore, TensorStore]:
        host = HostStore(pin_for=device)
        on_device = DeviceStore(device)
        return (
            host if self.options.offload_optimizer == "cpu" else on_device,
            host if self.options.offload_params == "cpu" else on_device,
        )

    @override
    def model_to_device(self) -> None:
        """Nothing: the engine moves the module bucket by bucket."""

    def release(self, module: nn.Module | None = None) -> None:
        """Give the module ordinary, full parameters again, at full precision, and free the shards. Collective.

        After ``fit`` the module stays sharded (stage 3) and in its 16-bit dtype, ready for ``test``, a second ``fit``
        or ``save_checkpoint``. Call this before code that wants a plain module, such as an export.

        Args:
            module: one that ``Trainer.init_module`` made and no Trainer has run; default: the one of the last run.
        """
        if self._engine is not None and (module is None or module is self._engine.module):
            self._engine.release()
            self._engine = None
        elif module is not None:
            unshard_parameters(module.parameters())

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        tell_why(exception, Board() if self._mesh is None else self._mesh.board, self.launcher)
        if self.memory is not None and is_out_of_memory(exception):
            try:
                console = Console(file=sys.stderr)
                console.print(f"Rank {self.global_rank} is out of memory.", self.memory.report())
            except Exception as error:  # noqa: BLE001  (the other one says what went wrong, and goes on)
                exception.add_note(f"ZeroStrategy could not report what the memory holds: {error!r}")
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        # Shards stay for `trainer.save_checkpoint`, `test` and a second `fit`; no rank may wait for another here.
        assert self.accelerator is not None
        self._rng = self.memory = None
        self._forget_gradients()
        while self._undo:
            self._undo.pop()()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if self._background is not None:
            self._fitting = False
            try:
                self._background.wait()
            except (CheckpointError, CollectiveError):
                if not self._failed:  # else there is another error to report, and this one was logged
                    raise

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Process groups do not pickle; a spawned rank makes its own.
        return {**super().__getstate__(), "_engine": None, "_mesh": None, "_background": None}

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return self._policy.shard_params
