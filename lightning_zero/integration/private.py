"""Lightning's private names, each behind a name of ours, with the reason why no public name suffices.

This is the only file that uses private names of Lightning. ``tests/test_private_names.py`` fails if another file does,
and if an upgrade of Lightning has removed a name. Private names that a subclass shares with its base class cannot be
hidden behind a function; ``INHERITED`` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.types import _MAP_LOCATION_TYPE, _PATH
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, ThroughputMonitor, WeightAveraging
from lightning.pytorch.core import saving
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.trainer.connectors import checkpoint_connector as choosing
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from torch import nn
from torch.optim import Optimizer

# Types of public arguments and attributes.
CheckpointConnector = _CheckpointConnector
Evaluation = _EvaluationLoop | _PredictionLoop
FitLoop = _FitLoop
MapLocation = _MAP_LOCATION_TYPE
PathLike = _PATH
StrategyRegistryType = _StrategyRegistry

# The base class of the object that ``fabric.no_backward_sync`` uses; it has no public name.
BackwardSyncControl = _BackwardSyncControl

# Base classes of launchers. Lightning offers them only to its own strategies, but nothing else starts ranks.
MultiProcessingLauncher = _MultiProcessingLauncher
SubprocessScriptLauncher = _SubprocessScriptLauncher

# The method of ModelCheckpoint that links `last.ckpt` to a file that an asynchronous save has not yet completed.
LINK_CHECKPOINT = "_link_checkpoint"

# The method of the connector of checkpoints that chooses the one to load, and the one of ModelCheckpoint that lists the
# last ones for it.
CHOOSE = "_select_ckpt_path"
FIND_LAST = "_find_last_checkpoints"

# The method of the signal connector that saves a checkpoint and requeues a job of SLURM.
REQUEUE = "_slurm_sigusr_handler_fn"

# Its method that handles SIGTERM, and that of the loop over batches that asks, before each, whether rank 0 has got it.
TERMINATE = "_sigterm_notifier_fn"
ASK_TO_END = "_broadcast_sigterm_tensor"

# By class of ours: the private names of its base class that it overrides or uses.
INHERITED: dict[str, dict[str, str]] = {
    "EngineStrategy": {
        "_layer_sync": "applied in a run's set-up, as in that of the base which ours replaces",
    },
    "ZeroStrategy": {
        "_configure_launcher": "overridden: the choice of a launcher has no public hook",
        "_launcher": "set there; `launcher` can only be read",
        "_lightning_optimizers": "the wrappers that manual optimization steps; they get the engine's `zero_grad`",
        "_precision_plugin": "behind `precision_plugin`, whose default differs here",
    },
    "ZeroFabricStrategy": {
        "_backward_sync_control": "what `fabric.no_backward_sync` calls",
        "_precision": "behind `precision`, whose setter accepts other plugins here",
    },
    "GatheringLauncher": {
        "_collect_rank_zero_results": "overridden: the last moment at which ranks can gather the results to send",
        "_wrapping_function": "overridden: it runs in a rank, which has no public hook for the run's error",
        "_recover_results_in_main_process": "overridden: the module's layers must be there before weights are loaded",
    },
    "EMA": {
        "_average_model": "the model that Lightning's hooks update and swap; here it is in shards",
        "_copy_average_to_current": "overridden: shards are swapped",
        "_device": "an argument that has no public attribute",
        "_latest_update_step": "restarts with each Trainer",
        "_swap_models": "overridden: shards are swapped",
        "_use_buffers": "an argument that has no public attribute",
    },
}


def link_method(callback: ModelCheckpoint) -> Any:
    """The method behind ``LINK_CHECKPOINT``."""
    return callback._link_checkpoint


def choose_method(connector: CheckpointConnector) -> Any:
    """The method behind ``CHOOSE``."""
    return connector._select_ckpt_path


def average_of(callback: WeightAveraging | StochasticWeightAveraging) -> nn.Module | None:
    """The copy of the module in which the callback averages; ``None`` outside a fit."""
    average: nn.Module | None = callback._average_model
    return average


def tell_peak(monitor: ThroughputMonitor, peak: int | None) -> None:
    """Tell a monitor the device's operations per second; its set-up, before, has made objects that know another number.

    Args:
        monitor: that has measured nothing in this run.
        peak: ``None``: not known.
    """
    monitor.available_flops = peak
    for throughput in monitor._throughputs.values():
        throughput.available_flops = peak


def signal_connector(trainer: pl.Trainer) -> Any:
    """Handles signals; no hook comes between a signal and what Lightning does in its handler."""
    return trainer._signal_connector


def requeue_method(connector: Any) -> Any:
    """The method behind ``REQUEUE``."""
    return connector._slurm_sigusr_handler_fn


def ask_method(loop: Any) -> Any:
    """The method behind ``ASK_TO_END``."""
    return loop._broadcast_sigterm_tensor


def end_failed(trainer: pl.Trainer, error: BaseException) -> None:
    """Do what Lightning does when a run fails, which it does only in the process that has called ``fit``."""
    _interrupt(trainer, error)
    trainer._teardown()


def is_stand_in(optimizer: Optimizer) -> bool:
    """Whether Lightning made the optimizer for a module that configures none."""
    return isinstance(optimizer, _MockOptimizer)  # it has a parameter and a group like any other


def draws_graph(logger: TensorBoardLogger) -> bool:
    """The argument ``log_graph``, whose name the method has."""
    return bool(logger._log_graph)


def precision_flag(trainer: pl.Trainer) -> str:
    """The flag ``Trainer(precision=...)``; the public ``trainer.precision`` is the plugin's precision."""
    flag: str = trainer._accelerator_connector._precision_flag
    return flag


def checkpoint_connector(trainer: pl.Trainer) -> _CheckpointConnector:
    """The object that collects checkpoints; no hook distinguishes its requests for state from the user's."""
    return trainer._checkpoint_connector


def evaluation_of(trainer: pl.Trainer) -> Evaluation:
    """The loop of the evaluation that runs; in a fit there are others."""
    loop = trainer._active_loop
    assert isinstance(loop, Evaluation)
    return loop


def batches_of(loop: Evaluation) -> list[float]:
    """Numbers of batches that the loaders of an evaluation give in turn; infinity for one without a length.

    Loaders that are iterated at the same time count as one. Only the combined loader knows which of both they are.
    """
    assert loop._combined_loader is not None
    assert loop._data_fetcher is not None
    if loop._combined_loader._mode == "sequential":
        return [*loop.max_batches]
    length = loop._data_fetcher.length
    return [math.inf if length is None else length]


def renew_iterator(loop: FitLoop) -> None:
    """Have a starting loop make its iterator anew for the epoch that it begins; it made the one it has in its set-up.

    A loop that goes on after an epoch makes it where the run that was saved did. One that restarts makes none itself.
    """
    loop._resuming_from_checkpoint = False
    if loop.restarting:
        assert loop._data_fetcher is not None
        assert loop._combined_loader is not None
        for loader in loop._combined_loader.flattened:  # the loop does so later, when workers have the first indices
            _set_sampler_epoch(loader, loop.epoch_progress.current.processed)  # type: ignore[attr-defined]
        iter(loop._data_fetcher)


def report(module: nn.Module, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
    """Make ``LightningModule.device`` and ``dtype`` say so; the public ``to`` would move and cast the parameters."""
    _update_properties(module, device=device, dtype=dtype)


def is_compiled(module: pl.LightningModule) -> bool:
    """Whether the module was compiled by ``torch.compile``; the Trainer unwraps it, and only this attribute is left."""
    return module._compiler_ctx is not None


def start_method(strategy: DDPStrategy | FabricDDPStrategy) -> str:
    """The argument of the constructor, which has no public attribute."""
    return strategy._start_method


def reading(checkpoint: dict[str, Any]) -> AbstractContextManager[None]:
    """Make a context in which ``cls.load_from_checkpoint`` uses ``checkpoint`` instead of reading its path.

    Only the function that reads the file cannot read folders, so only this one is replaced. Overrides of the method,
    its ``hparams_file`` and the migration of old checkpoints work as for a file.
    """
    return _replaced(saving, "pl_load", lambda *_, **__: checkpoint)


def asking(filesystem_of: Callable[[PathLike], Any]) -> AbstractContextManager[None]:
    """Make a context in which the search for the last checkpoint asks these file systems for the times of its finds.

    Args:
        filesystem_of: by a path or URL, an object with the methods ``exists`` and ``modified``.
    """
    return _replaced(choosing, "get_filesystem", filesystem_of)


@contextmanager
def _replaced(module: ModuleType, name: str, function: Callable[..., Any]) -> Iterator[None]:
    names = vars(module)
    own = names[name]
    names[name] = function
    try:
        yield
    finally:
        names[name] = own
