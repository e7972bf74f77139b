"""A training script as users write it: `train_tiny.py '[{"strategy": ..., "out": ...}]'`, run by a launcher.

It makes one training for every entry of the list.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from lightning import Trainer
from lightning.fabric.strategies.launchers import subprocess_script
from strategy.fits import Lit, Recipe
from torch import Tensor

from lightning_zero import ZeroStrategy, gathered_parameters

RECIPE = Recipe(optimizer="momentum", steps=4)


class FailsOn(Lit):
    """Raises on one rank in the second step, or is killed; -1: on none."""

    def __init__(self, recipe: Recipe, rank: int, killed: bool) -> None:
        super().__init__(recipe)
        self.rank, self.killed = rank, killed

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if index == 1 and dist.get_rank() == self.rank:
            if self.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise LookupError(f"rank {self.rank} gave up")
        return super().training_step(batch, index)


class Unhurried(subprocess_script._ChildProcessObserver):
    """Lightning's looks every five seconds, and may end this process while it is about to say why another has ended."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, sleep_period=3600)


def train(strategy: str | dict[str, Any], out: str, fail_on: int = -1, killed: bool = False) -> None:
    trainer = Trainer(
        strategy=ZeroStrategy(**strategy) if isinstance(strategy, dict) else strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        limit_val_batches=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = FailsOn(RECIPE, fail_on, killed)
    trainer.fit(module)
    with gathered_parameters(module):
        if trainer.is_global_zero:
            torch.save(module.model.state_dict(), out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    subprocess_script._ChildProcessObserver = Unhurried  # type: ignore[misc]
    for options in json.loads(sys.argv[1]):
        train(**options)
