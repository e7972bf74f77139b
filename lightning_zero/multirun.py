"""Hydra's sweeps and ranks that Lightning starts do not go together."""

from __future__ import annotations

import sys

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy


def why_not_in_sweep(strategy: DDPStrategy) -> str | None:
    """Why this job of a sweep cannot run on several ranks that Lightning starts by repeating the command line.

    Each of them would run the whole sweep. Nor does it help where the first job has one rank: a process that has
    launched once looks to its next Trainer like a rank that was started from outside, and launches nothing.

    Returns:
        What to do instead, or None where there is nothing to object to.
    """
    repeats = strategy._start_method == "popen" and isinstance(strategy.cluster_environment, LightningEnvironment)
    world_size = strategy.num_nodes * strategy.num_processes
    if not repeats or world_size == 1 or not _in_sweep():
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
