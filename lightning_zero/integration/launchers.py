"""Launchers, which start the other ranks, and refuse jobs that they cannot start."""

from __future__ import annotations

import functools
import signal
import sys
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_zero import checkpoint as _checkpoint
from lightning_zero.integration import private, resuming, saves, signals
from lightning_zero.integration.base import EngineStrategy
from lightning_zero.integration.overridden import overrides
from lightning_zero.integration.patches import replace_methods

_SECONDS_TO_END = 1.0
_KILLED = ", nearly always because host memory ran out: see `dmesg`, the container's log and `lightning-zero doctor`"


class ScriptLauncher(private.SubprocessScriptLauncher):
    """Starts the other ranks by running the script again."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        function = resuming.prepared(function, trainer)
        result = super().launch(function, *args, trainer=trainer, **kwargs)
        if trainer is not None:
            assert isinstance(trainer.strategy, EngineStrategy)
            trainer.strategy.end_guards()  # otherwise the callbacks are told of the error next
        return result

    def ended_by_signal(self) -> str:
        """Says which of the ranks that this process started were ended by a signal, and could not report an error."""
        deadline = time.monotonic() + _SECONDS_TO_END
        while self.procs and all(process.poll() is None for process in self.procs) and time.monotonic() < deadline:
            time.sleep(0.01)  # a killed process closes its connections shortly before it ends
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
        function = resuming.prepared(function, trainer)
        sigterm = signals.PassOn()
        try:
            with sigterm:
                return super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException:
            if trainer is not None:  # its callbacks are told of the error next; not before, since ranks get copies
                assert isinstance(trainer.strategy, EngineStrategy)
                trainer.strategy.undo_in_teardown(saves.guard_exceptions(trainer, lambda _: _InOtherProcesses()))
            raise
        finally:
            if trainer is not None:
                private.signal_connector(trainer).received_sigterm = sigterm.came

    @override
    def _wrapping_function(
        self, process_idx: int, trainer: pl.Trainer | None, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        signals.enter_rank()
        self.procs = []  # of an earlier launch, in a fork: none of them is a child of this process
        run = function if trainer is None else functools.partial(_run_on_rank, trainer, function)
        try:
            super()._wrapping_function(process_idx, trainer, run, *args, **kwargs)
        except SIGTERMException:
            sys.exit(signals.TERMINATED)
        except (SystemExit, KeyboardInterrupt) as error:  # torch would take this rank for one that has sent its results
            raise RuntimeError(
                f"{error!r} has ended this rank, which must run to the end like all others. To end a fit early, set "
                "trainer.should_stop on all ranks"
            ) from error

    @override
    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> Any:
        fitted = trainer.state.fn == TrainerFn.FITTING  # otherwise Lightning reads the weights, but sends none
        module = trainer.lightning_module
        # Bucket by bucket, to rank 0's host, and then by the names in the module, which loads them.
        state = _checkpoint.state_for(module, trainer.strategy.lightning_module_state_dict()) if fitted else {}
        undo = replace_methods(module, {"state_dict": lambda *_, **__: state})
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            undo()

    @override
    def _recover_results_in_main_process(self, worker_output: Any, trainer: pl.Trainer) -> None:
        module, own = trainer.lightning_module, trainer.lightning_module.load_state_dict
        if worker_output.weights_path is not None:  # otherwise no weights come, as after an evaluation
            _configure_model(module, trainer)

        def load(module: pl.LightningModule, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            _warn_of_lost(module, state.keys() - module.state_dict().keys())
            return own(state, *args, **kwargs)

        undo = replace_methods(module, {"load_state_dict": load})
        try:
            super()._recover_results_in_main_process(worker_output, trainer)
        finally:
            undo()


class _InOtherProcesses:
    """The failure of ranks, for the process that has started them: a refusal to save."""

    def why_no_save(self, trainer: pl.Trainer) -> str:
        """Say where the weights were."""
        return (
            "this process has started the ranks and has none of their weights. The ranks save where all of them fail "
            "at the same place of the training; otherwise resume from an earlier checkpoint"
        )


def _run_on_rank(trainer: pl.Trainer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs the function in a rank whose weights callbacks can save if it fails, and which tells the others of it."""
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        signals.end_in_peace()
        private.end_failed(trainer, error)
        raise


def _configure_model(module: pl.LightningModule, trainer: pl.Trainer) -> None:
    """Makes the layers that each rank has made in its copy of the module, for the weights that come from there.

    On the host, since a process that has used CUDA cannot be forked again, and in full precision, which is sent.
    """
    if not overrides(module, "configure_model"):
        return
    module.trainer = trainer
    with isolate_rng(include_cuda=False):  # the ranks have drawn the numbers
        try:
            module.configure_model()
        except Exception as error:  # noqa: BLE001  (a fit has ended, whose other results must not be lost)
            rank_zero_warn(
                f"{type(module).__name__}.configure_model failed in the process that has started the ranks, where it "
                f"makes the layers for their weights: {error!r}. It may use no other rank, and no device"
            )


def _warn_of_lost(module: pl.LightningModule, names: AbstractSet[str]) -> None:
    """Warns of weights of the ranks that have no place in this process's module."""
    if names:
        listed = ", ".join(sorted(names)[:3]) + ", ..." * (len(names) > 3)
        rank_zero_warn(
            f"{len(names)} of the tensors that the ranks have trained are lost, since {type(module).__name__} has no "
            f"place for them in the process that has started the ranks: {listed}. Make such layers in __init__ or "
            "configure_model, which runs here, too; of this fit, load a checkpoint by load_from_checkpoint"
        )


def make_launcher(strategy: EngineStrategy) -> ScriptLauncher | GatheringLauncher:
    """Makes the launcher for the strategy's start method.

    Raises:
        ValueError: for a job of a sweep, which each rank would run again, and in a notebook, which has no script.
    """
    if reason := why_not_in_sweep(strategy):
        raise ValueError(reason)
    method = private.start_method(strategy)
    if method == "popen" and hasattr(sys, "ps1"):
        raise ValueError(
            "start_method='popen' starts the other ranks by running the script again, but a notebook has no script. "
            "Use the class and start_method='fork', as in Trainer(strategy=lightning_zero.ZeroStrategy(stage=2, "
            "start_method='fork'))"
        )
    if method != "popen":
        return GatheringLauncher(strategy, start_method=method)  # type: ignore[arg-type]  # checked by the options
    assert strategy.cluster_environment is not None
    return ScriptLauncher(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)


def why_not_in_sweep(strategy: DDPStrategy | FabricDDPStrategy) -> str | None:
    """Says why this job of a sweep cannot run on several ranks that Lightning starts by repeating the command line.

    Each rank would run the whole sweep. This also holds if the first job has one rank: to its next Trainer, a process
    that has launched once looks like a rank that was started from outside, and launches nothing.

    Returns:
        A text that says what to do instead, or None if the job can run.
    """
    by_command_line = isinstance(strategy.cluster_environment, LightningEnvironment)
    world_size = strategy.num_nodes * strategy.num_processes
    if not by_command_line or private.start_method(strategy) != "popen" or world_size == 1 or not _in_sweep():
        return None
    return (
        f"Hydra's multirun cannot run this job on {world_size} ranks: Lightning starts them by running the command "
        "line again, and each would run the whole sweep. Let torchrun start the ranks:\n"
        f"  torchrun --nproc_per_node {strategy.num_processes} train.py --multirun ...\n"
        "or start each job by its own command:\n"
        f"  for s in zero1 zero2; do python train.py strategy=$s trainer.devices={strategy.num_processes}; done\n"
        "or use one rank per job or, if the script needs no results of the ranks, strategy.start_method=spawn"
    )


def _in_sweep() -> bool:
    """Whether Hydra runs a job of ``--multirun``. This does not import Hydra if the application has not."""
    if "hydra.core.hydra_config" not in sys.modules:
        return False
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
