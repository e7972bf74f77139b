"""Launchers, which start the other ranks, and the jobs that they cannot start."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_zero import checkpoint as _checkpoint
from lightning_zero.engine import gathered_parameters
from lightning_zero.integration import private
from lightning_zero.sharding import Board, CollectiveError, Subject, is_communication_error, tells_an_end

_SECONDS_TO_END = 1.0
_KILLED = ", nearly always because host memory ran out: see `dmesg`, the container's log and `lightning-zero doctor`"


class ScriptLauncher(private.SubprocessScriptLauncher):
    """Starts the other ranks by running the script again."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        _recover_checkpoints(trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def ended_by_signal(self) -> str:
        """Says which of the ranks that this process has started ended by a signal; they had no time to say why."""
        deadline = time.monotonic() + _SECONDS_TO_END
        while self.procs and all(process.poll() is None for process in self.procs) and time.monotonic() < deadline:
            time.sleep(0.01)  # its connections are closed before it has ended
        first = self.cluster_environment.node_rank() * self.num_processes
        signals = {rank: -(process.poll() or 0) for rank, process in enumerate(self.procs, start=first + 1)}
        return "; ".join(
            f"rank {rank} was ended by {signal.Signals(number).name}{_KILLED if number == signal.SIGKILL else ''}"
            for rank, number in signals.items()
            if number > 0
        )


class GatheringLauncher(private.MultiProcessingLauncher):
    """Starts all ranks from the main process, to which they send the module's ``state_dict`` after teardown."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        _recover_checkpoints(trainer)
        return super().launch(function, *args, trainer=trainer, **kwargs)

    @override
    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> Any:
        with gathered_parameters(trainer.lightning_module):
            return super()._collect_rank_zero_results(trainer, results)


def tell_why(exception: BaseException, board: Board, launcher: object) -> None:
    """Name this rank's error to the ranks that wait for it; where it waited itself, say last why another is gone.

    Args:
        exception: with which this rank's fit ends.
        board: of the ranks.
        launcher: of this process.
    """
    if not is_communication_error(exception):
        board.put(Subject.FAILURE, " ".join(f"{type(exception).__name__}: {exception}".split()))
        return
    # Those of Lightning's own collectives do not say it.
    if not isinstance(exception, CollectiveError) and (cause := _cause(exception, board)):
        exception.add_note(cause)
    if isinstance(launcher, ScriptLauncher) and (ended := launcher.ended_by_signal()):
        exception.add_note(ended)


def _cause(exception: BaseException, board: Board) -> str:
    if cause := board.explain():
        return cause
    missing = board.describe(board.find_missing(None, tells_an_end(str(exception))))
    late = f"{missing} did not come: killed, say, or the node or the network to it is down" if missing else ""
    return board.explain() or late


def make_launcher(strategy: DDPStrategy) -> ScriptLauncher | GatheringLauncher:
    """The launcher of the strategy's start method.

    Raises:
        ValueError: for a job of a sweep that it would start again, and in a notebook, where there is no script.
    """
    if reason := why_not_in_sweep(strategy):
        raise ValueError(reason)
    method = private.start_method(strategy)
    if method == "popen" and hasattr(sys, "ps1"):
        raise ValueError(
            "start_method='popen' starts the other ranks by running the script again, and in a notebook there is none. "
            "Use the class and start_method='fork', as in Trainer(strategy=lightning_zero.ZeroStrategy(stage=2, "
            "start_method='fork'))"
        )
    if method != "popen":
        return GatheringLauncher(strategy, start_method=method)  # type: ignore[arg-type]  # checked by the options
    assert strategy.cluster_environment is not None
    return ScriptLauncher(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)


def why_not_in_sweep(strategy: DDPStrategy) -> str | None:
    """Why this job of a sweep cannot run on several ranks that Lightning starts by repeating the command line.

    Each of them would run the whole sweep. Nor does it help where the first job has one rank: a process that has
    launched once looks to its next Trainer like a rank that was started from outside, and launches nothing.

    Returns:
        What to do instead, or None where there is nothing to object to.
    """
    by_command_line = isinstance(strategy.cluster_environment, LightningEnvironment)
    world_size = strategy.num_nodes * strategy.num_processes
    if not by_command_line or private.start_method(strategy) != "popen" or world_size == 1 or not _in_sweep():
        return None
    return (
        f"Hydra's multirun cannot run this job on {world_size} ranks: Lightning starts them by running the command "
        "line again, and each would run the whole sweep. Let torchrun start the ranks:\n"
        f"  torchrun --nproc_per_node {strategy.num_processes} train.py --multirun ...\n"
        "or give every job a command of its own:\n"
        f"  for s in zero1 zero2; do python train.py strategy=$s trainer.devices={strategy.num_processes}; done\n"
        "or use one rank per job or, where the script needs no results of the ranks, strategy.start_method=spawn"
    )


def _in_sweep() -> bool:
    """Whether Hydra runs a job of ``--multirun``; an application without Hydra does not import it for this."""
    if "hydra.core.hydra_config" not in sys.modules:
        return False
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def _recover_checkpoints(trainer: pl.Trainer | None) -> None:
    """Before Lightning looks for the last one: it may have lost its name, where its save was killed between renames."""
    for callback in trainer.checkpoint_callbacks if trainer is not None else ():
        if isinstance(callback, ModelCheckpoint) and callback.dirpath and "://" not in str(callback.dirpath):
            _checkpoint.recover_all(Path(callback.dirpath))
