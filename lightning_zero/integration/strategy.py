"""The Lightning strategy: it follows Lightning's life cycle, and leaves the sharding itself to the engine."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_warn
from rich.console import Console
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.checkpoint import Background, CheckpointError
from lightning_zero.engine import engines_of
from lightning_zero.integration import engines, in_backward, patches, preflight, private, saves, signals
from lightning_zero.integration.checkpointing import CheckpointingStrategy
from lightning_zero.integration.collectives import CollectiveStrategy
from lightning_zero.integration.deepspeed import FromDeepSpeed
from lightning_zero.integration.failures import Failure, noting
from lightning_zero.integration.launchers import make_launcher
from lightning_zero.integration.names import register_in
from lightning_zero.integration.options import (
    CheckpointStateName,
    FormatName,
    GradientStoreName,
    LayoutName,
    NativeName,
    PreflightName,
    StartMethod,
    StoreName,
    StrategyOptions,
    lists_options,
)
from lightning_zero.integration.precision import ZeroPrecision, as_zero_precision
from lightning_zero.integration.steps import SteppingStrategy
from lightning_zero.planning import Plan
from lightning_zero.planning.memory import Memory, out_of_memory
from lightning_zero.sharding import CollectiveError, Group, Mesh, ShardingPolicy, Subject
from lightning_zero.sharding.adoption import move_own
from lightning_zero.storage import InlineExecutor, make_executor


class ZeroStrategy(FromDeepSpeed, SteppingStrategy, CollectiveStrategy, CheckpointingStrategy):
    """Trains with parameters, gradients and optimizer state sharded over ranks.

    ============  ======================  ===================  ===============
    name          optimizer state         gradients            parameters
    ============  ======================  ===================  ===============
    ``zero0``     replicated              replicated           replicated
    ``zero1``     sharded                 full until reduced   replicated
    ``zero2``     sharded                 sharded              replicated
    ``zero3``     sharded                 sharded              sharded
    ============  ======================  ===================  ===============

    The names with ``_offload`` (stages 1 to 3) keep optimizer state and masters in host memory, those with ``_nvme``
    keep them on a disk; at stage 3 both also keep the parameter shards there.
    ZeRO: https://arxiv.org/abs/1910.02054, ZeRO-Offload: https://arxiv.org/abs/2101.06840,
    ZeRO-Infinity: https://arxiv.org/abs/2104.07857.

    The arguments ``accelerator`` to ``precision_plugin`` are those of
    :class:`~lightning.pytorch.strategies.DDPStrategy`.

    Most of the many public methods are those by which Lightning drives any strategy, as one object; the code of each
    subject (steps, checkpoints, ...) is in a base class.

    Args:
        stage: 0, 1, 2 or 3.
        offload_optimizer: where masters, optimizer state and reduced gradients rest. ``"none"``: on the device.
            ``"cpu"``: in host memory. ``"nvme"``: masters and optimizer state rest on a disk and pass through host
            memory tile by tile while they are updated; ``offload_gradients`` says where the gradients rest.
        offload_params: where parameter shards rest at stage 3: ``"none"`` (on the device), ``"cpu"`` (in host memory)
            or ``"nvme"`` (on a disk; the optimizer state must rest there, too).
        offload_fraction: fraction, in (0, 1], of the updated elements that is offloaded, in whole buckets. The last
            buckets in forward order stay on the device and are updated there. Every fraction gives the same bits with
            Adam(W), Adagrad, SGD and the CPU optimizers.
        nvme_path: folder for ``"nvme"`` on a local disk of every node. Each rank keeps a file there until it ends.
            Default: the environment variable ``LIGHTNING_ZERO_NVME_PATH``.
        nvme_buffer_gb: host memory, in 2^30 bytes per rank, for tiles on their way from and to the disk.
        nvme_checksums: compute a checksum of every tile that is written to the disk, and verify it when it is read.
        offload_gradients: where sharded gradients rest if the optimizer state rests on a disk: ``"cpu"`` (in host
            memory) or ``"nvme"`` (on the disk). ``"auto"``: in host memory if those of the rank fit into
            ``nvme_buffer_gb`` in the dtype in which micro-batches are summed (at least fp32), else on the disk. Without
            state on a disk gradients rest with the state, and another place is refused.
        accumulate_on_device: at stages 2 and 3 sum the offloaded gradients of a step's micro-batches on the device, and
            copy the sum to where it rests once. This takes 4 bytes of device memory per element of the rank's shard,
            and spares the host a pass over the gradients per micro-batch; the sums have the same bits. On CPU ranks,
            and at stages 0 and 1, which always do so, the option changes nothing.
        shard_size: number of neighbouring ranks that share one copy of the state; must divide the number of ranks.
            Default: the ranks of one node. Each node then holds a full copy, and only sums of gradient shards cross the
            network between nodes. The number of all ranks takes the least memory, and is the default if each node has
            one rank.
        bucket_size_mb: at stages 0 to 2: size in 2^20 bytes up to which small units share one bucket, a flat buffer
            that is reduced and gathered as a whole.
        units: modules whose parameters are gathered together at stage 3: their classes, class names, or patterns of
            module names (``"transformer.h.*"``). Default: the outermost repeated blocks.
        persistence_numel: at stage 3 parameters with at most this many elements (biases, norms) stay unsharded. This
            takes little memory and saves small collectives; 0 shards all parameters.
        max_live_numel: at stage 3 the next unit is gathered while one computes, unless more than this many elements of
            units would then be unsharded. ``None``: no limit, so two units are unsharded at a time. 0: nothing is
            gathered ahead.
        prefetch_mb: at stage 3 gather more units ahead than the next one, and fetch them from host memory before that,
            while all units that are ahead take at most this many 2^20 bytes, and within ``max_live_numel``.
        max_in_flight_mb: device memory, in 2^20 bytes, that gradients may take while they are reduced beside the
            backward, and as much again on their way to host memory. Beyond it backward waits for the oldest of them;
            the last bucket's may always be under way. On CPU ranks the option changes nothing.
        staging_buffer_mb: pinned host memory, in 2^20 bytes per rank and direction, for parameters that the host
            converts on their way to the device, and for gradients that it adds to others. Copies wait for room in it.
            There is at least one buffer, as large as the largest bucket's part needs.
        activation_offload: keep tensors that autograd saves in forward in pinned host memory until their backward; with
            activation checkpointing these are the inputs of the checkpointed modules. The newest 64 * 2^20 bytes stay
            on the device. The results have the same bits. On CPU ranks the option changes nothing.
        activation_offload_mb: least size in 2^20 bytes of a saved tensor that is moved to host memory.
        check_steps: number of first optimizer steps in which the ranks compare, before every collective, what they are
            about to do. If they differ, they get an error at once. In later steps they get it at the end of the step
            or, if a collective waits for a rank that never joins, after ``timeout``.
        detect_data_edits: for debugging, at stages 0 to 2: keep what was written through ``parameter.data`` between
            steps, even without ``gathered_parameters(writeback=True)``. For this every step reads the rank's shard
            twice more and waits for the device, and with offload for the whole update on the host.
        overlap: run copies between the device and host memory, updates on host memory, and reductions of gradients
            beside the training; the results have the same bits. ``False``: finish each one before the next begins,
            which is easier to debug. On CPU ranks reads and writes of a disk run beside it, and gathers ahead.
        update_in_backward: begin to update a bucket's shard as soon as its gradient is reduced, in the backward of a
            step's last micro-batch; the results have the same bits. This needs a single optimizer (an element-wise one
            of torch, or a CPU optimizer), ``skip_nonfinite=False``, and automatic optimization without
            ``gradient_clip_val``, loss scaler, and hooks between backward and step. After an error in such a backward
            nothing can be saved until a fit resumes from a checkpoint.
        native_optimizer: ``"auto"``: native kernels run torch's Adam(W), Adagrad and SGD if their state rests in host
            memory. ``"off"``: torch's own code runs.
        master_layout: how offloaded masters of 16-bit parameters are stored, for torch's optimizers that native kernels
            run. ``"fp32"``: as a tensor of 4 bytes per element. ``"split"``: as the parameter and 2 more bytes, which
            is exact for bf16. :class:`~lightning_zero.CPUAdamW` and its siblings have an argument of their own instead.
        preflight: reaction to a fit whose planned memory (without activations) exceeds that of a device, the machine,
            its control group or a limit of the process, counted over all ranks that share it. ``"error"``: end it on
            all ranks with a table of settings that would fit. ``"warn"``: warn and continue. ``"off"``: do not compare.
        skip_nonfinite: skip a step, on all ranks and with a warning, if a gradient is not finite. With a loss scaler
            (fp16) such steps are always skipped. A skipped step does not change parameters, optimizer state, step-wise
            schedulers and Lightning's ``WeightAveraging``; ``trainer.global_step`` counts it.
        max_consecutive_skips: end the run with an error on all ranks if this many steps of an optimizer in a row were
            skipped, since such a run makes no progress; ``None``: never. Skips with which a dynamic loss scaler lowers
            its scale do not count, as they end at its smallest scale.
        checkpoint_format: ``"full"``: one ordinary file, which all ranks write together (rank 0 alone if they share no
            file system). ``"sharded"``: a folder of ``torch.distributed.checkpoint``, to which each rank adds its part.
        checkpoint_state: how checkpoints store 8-bit optimizer state (``state_dtype=torch.int8``); other state is not
            affected. ``"fp32"``: decoded, so that torch's optimizers can load it. ``"compact"``: in 8 bits, a quarter
            of the bytes; this strategy resumes from it with any options, and ``lightning-zero consolidate`` decodes it.
        async_save: copy checkpoints during ``fit`` to host memory, and write them while training continues. This takes
            host memory for the rank's part of the checkpoint. An error is raised at the next save or at the end.
        checksums: write checksums of all tensors into checkpoints, and verify them when a checkpoint is loaded, which
            reads it once more, each rank a part.
        evaluation_masters: also make masters in ``validate``, ``test`` and ``predict`` before any ``fit``. Without
            masters such a run holds only the parameters, in the dtype of the computation. If this has 16 bits, the
            full-precision values are lost, and a later ``fit`` must load a checkpoint.
        timeout: seconds after which a collective fails if some rank has not joined it.
        start_method: how the other ranks are started: ``"popen"`` (runs the script again), ``"spawn"``, ``"fork"`` or
            ``"forkserver"``.
        process_group_backend: torch's backend, ``"nccl"`` or ``"gloo"``. Default: the one for the accelerator.

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
        offload_fraction: float = 1.0,
        nvme_path: str | None = None,
        nvme_buffer_gb: float = 0.25,
        nvme_checksums: bool = True,
        offload_gradients: GradientStoreName = "auto",
        accumulate_on_device: bool = False,
        shard_size: int | None = None,
        bucket_size_mb: float = 25.0,
        units: Sequence[str | type[nn.Module]] | None = None,
        persistence_numel: int = 10_000,
        max_live_numel: int | None = None,
        prefetch_mb: float = 0.0,
        max_in_flight_mb: float = 64.0,
        staging_buffer_mb: float = 256.0,
        activation_offload: bool = False,
        activation_offload_mb: float = 1.0,
        check_steps: int = 10,
        detect_data_edits: bool = False,
        overlap: bool = True,
        update_in_backward: bool = False,
        native_optimizer: NativeName = "auto",
        master_layout: LayoutName = "fp32",
        preflight: PreflightName = "error",
        skip_nonfinite: bool = True,
        max_consecutive_skips: int | None = 25,
        checkpoint_format: FormatName = "full",
        checkpoint_state: CheckpointStateName = "fp32",
        async_save: bool = False,
        checksums: bool = True,
        evaluation_masters: bool = False,
        timeout: float = 1800.0,
        start_method: StartMethod = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
    ) -> None:
        given = locals()  # by the names of the parameters, which are those of the options
        self._options = StrategyOptions(**{field.name: given[field.name] for field in fields(StrategyOptions)})
        self._policy = ShardingPolicy.from_stage(self.options.stage)
        self._undo, self._guards = [], []
        self.memory: Memory | None = None  # of the running fit, or of an evaluation that no fit preceded
        self._dtypes = {}
        self._executor = InlineExecutor()
        self._failure: Failure | None = None
        self._runs = 0  # the number of this run
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
        """Register ``zero0`` ... ``zero3_nvme``."""
        register_in(strategy_registry, cls)

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
        # On a rank beyond `devices` Lightning's own set-up would fail with an index error.
        if torch.distributed.is_initialized():
            engines.check_world_size(self.num_nodes, self.num_processes, "Trainer")
        super().setup_environment()
        self._runs, self._failure = self._runs + 1, None
        engines.check_world_size(self.num_nodes, self.num_processes, "Trainer")
        if self._mesh is None:
            self._mesh = engines.make_mesh(
                self.options, self.num_nodes, self.num_processes, self.local_rank, self.parallel_devices or ()
            )
            options = self.options
            lanes = options.overlap, options.in_flight_bytes, options.staging_bytes
            self._executor = make_executor(self.root_device, *lanes)
            if self.options.async_save:
                timeout = timedelta(seconds=self.options.timeout)
                self._background = Background(Group.for_thread(timeout), self._executor)
        # The engine of another Trainer would keep the values from before the next load.
        if self.lightning_module is not None:
            for engine in engines_of(self.lightning_module):
                if engine is not self._engine:
                    engines.release(engine)
            self._warn_of_copies(self.lightning_module)
            precision = self.precision_plugin
            assert isinstance(precision, ZeroPrecision)
            for callback in self.lightning_module.trainer.callbacks:  # type: ignore[attr-defined]
                # Callbacks set up before the strategy, and an earlier run may have sharded the module.
                self._undo += patches.unshard_for(callback, self._unsharded)
                self._undo += patches.average_in_full_precision(callback, precision.policy)
            self.end_guards()  # of a run that the tuner has stopped
            self._guards = saves.guard_exceptions(self.lightning_module.trainer, self._fail)

    def _warn_of_copies(self, module: pl.LightningModule) -> None:
        """Warn of callbacks that keep a full copy of the module on every rank, if parameters are sharded."""
        for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
            if patches.copies_module(callback) and self._policy.shard_params:
                rank_zero_warn(
                    f"{type(callback).__name__} keeps a full copy of {type(module).__name__} on every rank, and "
                    "gathers all weights every time that it averages or swaps them: the module and its copy must fit "
                    "into each rank's memory, which stage 3 otherwise makes unnecessary. "
                    "lightning_zero.callbacks.EMA keeps its average in shards"
                )

    @contextlib.contextmanager
    def _unsharded(self, writeback: bool, full_precision: bool) -> Iterator[None]:
        """Give hooks full weights to read or to replace."""
        if self._engine is None or self._engine.released:
            with self._full_precision or contextlib.nullcontext():  # what they load after the module's weights
                yield
            return
        with self._engine.gathered(self._engine.module.parameters(), writeback, full_precision):
            yield
        if writeback:
            self._engine.sync_buffers()  # each rank has also replaced its own buffers

    @contextlib.contextmanager
    def _computable(self) -> Iterator[None]:
        """Let each rank alone run the module, at full precision: its hooks find all units gathered."""
        with self._unsharded(writeback=False, full_precision=False), self._unsharded(False, full_precision=True):
            yield

    @override
    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Shard parameters one by one at stage 3, in ``configure_model`` and inside ``Trainer.init_module``.

        ``init_module`` starts the other ranks here, as ``fit`` would. With ``spawn`` or ``fork`` ranks begin inside
        ``fit``, so ``init_module`` initializes the whole module; use ``configure_model`` instead.
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
        return engines.init_in_shards(self.options, self._mesh, self.root_device)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._check_precision_flag(private.precision_flag(trainer))
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self._check_compiled(self.lightning_module)
        self.accelerator.setup(trainer)
        self.model_to_device()
        self._fitting = fitting = trainer.state.fn == TrainerFn.FITTING
        optimizers: list[Optimizer] = []
        self._synchronize_layers(self.lightning_module)
        if fitting:
            self.setup_optimizers(trainer)
            optimizers = [o for o in self.optimizers if not private.is_stand_in(o)]
        if fitting and self.options.update_in_backward:
            in_backward.check(trainer, self.lightning_module, optimizers, self.precision_plugin)
        if fitting or self._engine is None:
            # An earlier Trainer and its module refer to each other: what it has sharded would stay beside this run's.
            gc.collect()
        if self._engine is not None and not self._engine.released:
            self._engine.in_backward.share()  # one rank alone may know that an earlier fit has left torn weights
        self._settle_options(trainer, optimizers if fitting else None)
        if fitting or self._engine is None or not self._engine.placement.trains:  # otherwise a fit has left its state
            self.memory = self._describe_memory(self.lightning_module, optimizers if fitting else None, trainer)
            assert self._mesh is not None
            if fitting:
                preflight.check(self.memory, self._engine, self._mesh.world, self.options.preflight)
        full_precision, self._full_precision = self._full_precision, None
        if full_precision is not None:
            full_precision.forget_changed()
        self._shard(self.lightning_module, optimizers if fitting else None)
        if full_precision is not None:
            full_precision.give_to(self.engine)
        self.setup_precision_plugin()
        self._show_sums(trainer)
        self._look_for_readers(trainer)
        self._note_missing_batches(trainer)
        self._tell_monitors(trainer)
        for wrapper in self._lightning_optimizers:
            # The wrapper inherits the optimizer's class and would find the class's method before the engine's.
            wrapper.__dict__["zero_grad"] = wrapper.optimizer.zero_grad
        self._pass_over_skips(trainer.callbacks)  # type: ignore[attr-defined]
        assert self._mesh is not None
        self._undo += signals.end_together(trainer, self._mesh, self._runs)
        if fitting:
            self._undo += signals.requeue_together(trainer)
        for logger in trainer.loggers:
            self._undo += patches.compute_for_graph(logger, self._computable)
        if self._background is not None:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, ModelCheckpoint):
                    self._undo.append(patches.know_background(callback, self._background))
            self._undo += [patches.tell_after_saves(logger, self._background) for logger in trainer.loggers]
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if fitting and isinstance(callback, patches.OnShards):
                callback.on_sharded(trainer, self.lightning_module)
        connector = private.checkpoint_connector(trainer)
        connector.dump_checkpoint = functools.partial(self._dump, connector)  # type: ignore[method-assign]
        for subject in (Subject.FAILURE, Subject.WAIT):
            self._mesh.board.put(subject, "")  # of an earlier run, in which no rank is any more

    @override
    def _planned(self) -> Plan | None:
        return None if self.memory is None else self.memory.plan

    def _check_compiled(self, module: pl.LightningModule) -> None:
        if self._policy.shard_params and private.is_compiled(module):
            raise ValueError(
                f"torch.compile({type(module).__name__}) at stage 3: a graph of the whole module cannot gather the "
                "parameters of its blocks. Compile the blocks instead, `for block in self.blocks: block.compile()` in "
                "`__init__` or `configure_model`, or use a stage below 3"
            )

    def _check_precision_flag(self, flag: str) -> None:
        """Refuse a flag that contradicts the strategy's own plugin, which Lightning would silently ignore.

        32-true is Lightning's default, so it may also mean that no flag was given.
        """
        plugin = self.precision_plugin
        assert isinstance(plugin, ZeroPrecision)
        if flag not in ("32-true", plugin.precision):
            raise ValueError(
                f"Trainer(precision={flag!r}) contradicts the strategy's precision_plugin, which says "
                f"{plugin.precision!r}; give one of them"
            )

    @override
    def model_to_device(self) -> None:
        """Move parameters whose class does it in its own way; the engine moves the others bucket by bucket."""
        assert self.lightning_module is not None
        move_own(self.lightning_module, self.root_device)

    def _fail(self, error: BaseException) -> Failure:
        """The failure of this run by ``error``; the first call tells the other ranks of it."""
        if self._failure is None or self._failure.error is not error:
            torn = self._engine is not None and self._engine.in_backward.may_be_torn
            self._failure = Failure(error, self._mesh or Mesh.single(), self.launcher, self._runs, torn)
        return self._failure

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._fail(exception)
        if self.memory is not None and (side := out_of_memory(exception)) is not None:
            try:
                console = Console(file=sys.stderr)
                console.print(f"Rank {self.global_rank} is out of memory.", self.memory.report(side))
            except Exception as error:  # noqa: BLE001  (the original error is more important, and is raised anyway)
                exception.add_note(f"ZeroStrategy could not report what the memory holds: {error!r}")
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        # The shards stay for `trainer.save_checkpoint`, `test` and a second `fit`. No rank may wait for another here.
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        self._rng = self.memory = None
        self._begun = False
        self._forget_gradients()
        undo, self._undo = self._undo, []
        failure = None if self._failure is None else self._failure.error
        if failure is not None:
            undo.append(self.end_guards)
        self._failure = None
        with contextlib.ExitStack() as stack:  # runs all of them, the last first, even if one fails
            stack.callback(noting, failure, self.cluster_environment.teardown)  # last: the end of a save communicates
            stack.callback(self._end_background, failure)
            for part in (self.checkpoint_io, self.accelerator, self.precision_plugin):
                stack.callback(noting, failure, part.teardown)
            for end in undo:
                stack.callback(noting, failure, end)

    def _end_background(self, failure: BaseException | None) -> None:
        if self._background is None:
            return
        self._fitting = False
        try:
            self._background.wait()
        except (CheckpointError, CollectiveError):
            if failure is None:  # otherwise another error is reported, and this one was logged
                raise

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Process groups and threads cannot be pickled; a spawned rank makes its own.
        own = {"_engine": None, "_mesh": None, "_background": None, "_before": None, "_executor": InlineExecutor()}
        return {**super().__getstate__(), **own}
