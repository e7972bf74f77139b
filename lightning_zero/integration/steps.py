"""Steps of the strategy: forward, backward and update by the engine, and user code's questions about them."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import ThroughputMonitor, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zero.integration import engines, patches, private, readers
from lightning_zero.integration.base import EngineStrategy
from lightning_zero.integration.overridden import overrides
from lightning_zero.integration.precision import ZeroPrecision, unwrap
from lightning_zero.integration.uneven import EvenPasses, note_missing_batches
from lightning_zero.sharding import Subject
from lightning_zero.storage import Phase

_AFTER_BACKWARD = "on_after_backward"


class SteppingStrategy(EngineStrategy):
    """Part of :class:`~lightning_zero.ZeroStrategy`: runs each step through the engine."""

    # Acts before hooks that read parameters after some steps. `None`: hooks may read any after every step.
    _before: readers.Before | None = None
    _passes: EvenPasses | None = None  # of the running evaluation, if its forwards gather

    @contextlib.contextmanager
    def _forward_context(self) -> Iterator[None]:
        assert self.lightning_module is not None
        if private.is_compiled(self.lightning_module):
            self.engine.settle()  # nothing can be gathered inside the graph of the whole module
        self._in_step = True
        try:
            with self.engine.forward_context():
                yield
        finally:
            self._in_step = False

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._note_last_batch()
        with self._forward_context():
            output = super().training_step(*args, **kwargs)
        return self._no_gradients() if output is None and self._may_lack_a_loss() else output

    def _note_last_batch(self) -> None:
        """Note where this rank's loader ended, for the error of ranks that may later wait for it in vain."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.is_last_batch and self._mesh is not None:
            number, epoch = trainer.fit_loop.epoch_loop.batch_idx + 1, trainer.current_epoch
            self._mesh.board.put(Subject.LOADER, f"after batch {number} of epoch {epoch}")

    def _note_missing_batches(self, trainer: pl.Trainer) -> None:
        """Have a fit note where this rank's loader gives no batch, for the same error."""
        mesh = self.engine.placement.mesh
        if trainer.state.fn == TrainerFn.FITTING and mesh.world.size > 1:
            self._undo += note_missing_batches(trainer, mesh.board)

    def _may_lack_a_loss(self) -> bool:
        """Whether a rank may skip a backward that others run: not if they gather parameters in it."""
        assert self.lightning_module is not None
        return self.lightning_module.automatic_optimization and self.world_size > 1 and not self._policy.shard_params

    def _no_gradients(self) -> Tensor:
        """Makes a loss that depends on no parameter, since Lightning does not accept ``None`` on several ranks."""
        return torch.zeros((), dtype=torch.float32, device=self.root_device, requires_grad=True)

    @contextlib.contextmanager
    def _evaluation_context(self) -> Iterator[None]:
        with self._forward_context():
            yield
        if self._passes is not None:
            self._passes.end_batch()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_context():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_context():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_context():
            return super().predict_step(*args, **kwargs)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._mesh is not None:
            self._mesh.board.put(Subject.LOADER, "")  # clears the note of an earlier fit

    def _begin_evaluation(self) -> None:
        self.engine.sync_buffers()
        assert self.lightning_module is not None
        mesh = self.engine.placement.mesh
        gathers = self._policy.shard_params and mesh.shard.size > 1
        self._passes = EvenPasses(self.lightning_module.trainer, self.engine, mesh) if gathers else None

    on_validation_start = on_test_start = on_predict_start = _begin_evaluation

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
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        self._check_attached(unwrap(optimizer))
        with engines.ending_steps(self.engine, self._may_be_read()):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _check_attached(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that is none of those for which the fit has made shards."""
        attached = any(updater.optimizer is optimizer for updater in self.engine.updaters)
        if not attached and not private.is_stand_in(optimizer):
            raise RuntimeError(
                f"this {type(optimizer).__name__} became one of the Trainer's optimizers after the fit had begun, and "
                "its state is not sharded: expected an optimizer that configure_optimizers returned at the start. "
                "Change the groups of that one instead, return all optimizers from configure_optimizers and step them "
                "in manual optimization, or begin another fit, trainer.fit(module), whose configure_optimizers returns "
                "the new one"
            )

    def _may_be_read(self) -> bool:
        """Whether hooks may read any parameter between a step and the next forward."""
        assert self.lightning_module is not None
        # `LearningRateFinder` runs steps with callbacks of its own.
        callbacks: list[pl.Callback] = self.lightning_module.trainer.callbacks  # type: ignore[attr-defined]
        return self._before is None or self._before not in callbacks

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.engine.settle()  # code after the fit may read parameters
        steps, skipped = self.engine.outcomes.counts()
        if skipped:
            # In any healthy run a loss scaler skips some steps while it looks for a scale.
            searching = isinstance(plugin := self.precision_plugin, ZeroPrecision) and plugin.scaler is not None
            say = rank_zero_info if searching and 10 * skipped <= steps else rank_zero_warn
            say(f"ZeroStrategy: {skipped} of {steps} optimizer steps were skipped: a gradient was not finite")

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> float:
        """Clip the averaged gradients of ``optimizer`` by their global norm; returns the norm before clipping.

        It works as :func:`torch.nn.utils.clip_grad_norm_`, but without a pass over the gradients: the update applies
        the factor. Collective.
        """
        return self.engine.clip_grad_norm_(unwrap(optimizer), max_norm)

    def grad_norm(self, optimizer: Optimizer) -> float:
        """The global L2 norm of the averaged gradients of ``optimizer``, after any clipping so far. Collective."""
        return self.engine.grad_norm(unwrap(optimizer))

    @property
    def loss_scale(self) -> float:
        """The factor by which the next loss is multiplied for backward; 1 without a loss scaler."""
        return self.engine.loss_scale

    @property
    def skipped_steps(self) -> int:
        """Number of optimizer steps that all ranks skipped since a gradient was not finite; resumed runs add to it."""
        return self.engine.skipped_steps

    def last_step_skipped(self, optimizer: Optimizer) -> bool:
        """Whether the last step of ``optimizer`` was skipped on all ranks."""
        outcome = self.engine.last_step(unwrap(optimizer))
        return outcome is not None and outcome.skipped

    def last_grad_norm(self, optimizer: Optimizer) -> float | None:
        """The global L2 norm of the gradients of the last step of ``optimizer``, before clipping; for logging.

        It is ``inf`` or ``nan`` if a gradient was, and ``None`` before the first step.
        """
        outcome = self.engine.last_step(unwrap(optimizer))
        return None if outcome is None else outcome.grad_norm

    def _show_sums(self, trainer: pl.Trainer) -> None:
        """Show averaged sums of the first micro-batches to ``on_after_backward``, if it is overridden. Collective.

        Replicas sum in the last micro-batch only, and what is summed on the device is averaged then.
        """
        assert self.lightning_module is not None
        callbacks: Sequence[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        own = [overrides(self.lightning_module, _AFTER_BACKWARD)]
        own += [overrides(callback, _AFTER_BACKWARD) for callback in callbacks]
        placement, fitting = self.engine.placement, trainer.state.fn == TrainerFn.FITTING
        if fitting and self._policy.shard_grads and not placement.collects_slices:
            world = placement.mesh.world
            self.engine.shows_sums = any(world.all_gather_object(any(own), "ask for hooks after backward"))

    def _look_for_readers(self, trainer: pl.Trainer) -> None:
        """Find out whether code may read parameters after a step. Collective."""
        self._before = None
        mesh, fitting = self.engine.placement.mesh, trainer.state.fn == TrainerFn.FITTING
        if not fitting or mesh.shard.size == 1 or not self.engine.placement.executor.overlaps:
            return
        assert self.lightning_module is not None
        own = readers.reads_after_each_step(trainer, self.lightning_module)
        if not any(mesh.world.all_gather_object(own, "ask for hooks after steps")):
            callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
            callbacks.insert(0, before := readers.Before(self.engine.end_step))
            self._undo += [lambda: callbacks.remove(before), lambda: setattr(self, "_before", None)]
            self._before = before

    def _tell_monitors(self, trainer: pl.Trainer) -> None:
        """Tell Lightning's monitors the device's peak in this precision; they know the dtypes of its own plugins."""
        precision = self.precision_plugin
        assert isinstance(precision, ZeroPrecision)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ThroughputMonitor) and callback.available_flops is not None:  # it knows the device
                private.tell_peak(callback, get_available_flops(self.root_device, precision.compute_dtype))

    def _forget_gradients(self) -> None:
        """Clear the last averaged gradients, which are meaningless after the fit."""
        if self._engine is not None and not self._engine.released:
            self._engine.zero_grad(p for bucket in self._engine.buckets for p in bucket.parameters)

    def _pass_over_skips(self, callbacks: Sequence[pl.Callback]) -> None:
        """Make schedulers and averaged weights that follow the optimizer step by step ignore skipped steps."""
        taken: Counter[int] = Counter()
        for config in self.lr_scheduler_configs:
            if isinstance(optimizer := getattr(config.scheduler, "optimizer", None), Optimizer):
                skipped = functools.partial(self._passes_over, config, optimizer, taken)
                self._undo.append(patches.skip_scheduler_steps(config, skipped))
        for callback in callbacks:
            if isinstance(callback, WeightAveraging):
                self._undo.append(patches.skip_average_updates(callback, self._skipped_all))

    def _passes_over(self, config: LRSchedulerConfig, optimizer: Optimizer, taken: Counter[int]) -> bool:
        """Whether a call of this scheduler's ``step`` belongs to steps of ``optimizer`` that were all skipped.

        Args:
            config: of the scheduler; with a ``frequency``, or in manual optimization, a call may follow several steps.
            optimizer: that it schedules.
            taken: number of steps taken before the last call, by id of the config; it is brought up to date.
        """
        assert self.lightning_module is not None
        before, taken[id(config)] = taken[id(config)], self.engine.outcomes.taken(unwrap(optimizer))
        # In manual optimization Lightning ignores the interval: the training step calls the scheduler itself.
        automatic = self.lightning_module.automatic_optimization
        per_step = config.interval == "step" if automatic else self._in_step
        return per_step and taken[id(config)] == before and self.last_step_skipped(optimizer)

    def _skipped_all(self) -> bool:
        """Whether no optimizer has changed a weight in its last step, or none has made one since the run resumed."""
        outcomes = [self.engine.last_step(unwrap(optimizer)) for optimizer in self.optimizers]
        return all(outcome is None or outcome.skipped for outcome in outcomes)
