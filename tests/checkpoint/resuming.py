"""A stateful loader, and fits that save or resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from helpers import models
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from strategy.fits import Fitted, Lit, Recipe, StrategyArgument, make_trainer, observe
from torch import Tensor

from lightning_zero.checkpoint import CheckpointError


class StatefulLoader:
    """Goes on in the middle of an epoch where its state says so."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self.batches = batches
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        if self.position == len(self.batches):
            self.position = 0
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Resumable(Lit):
    def train_dataloader(self) -> StatefulLoader:
        batches = models.rank_batches(self.recipe.batches(dist.get_world_size()), dist.get_rank())
        return StatefulLoader(batches)


class Global(Resumable):
    """Cuts one global batch over however many ranks there are (1, 2 or 4)."""

    def train_dataloader(self) -> StatefulLoader:
        share = 4 // dist.get_world_size()
        mine = range(dist.get_rank() * share, (dist.get_rank() + 1) * share)
        return StatefulLoader([torch.cat([step[0][part] for part in mine]) for step in self.recipe.batches(4)])


class Start(Callback):
    """Notes with which step a fit begins."""

    step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step


class SaveAfter(Callback):
    """Saves once, after a step."""

    def __init__(self, step: int, path: str) -> None:
        self.step = step
        self.path = path
        self.saved = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step and not self.saved:
            trainer.save_checkpoint(self.path)
            self.saved = True  # micro-batches of the next step see the same step


def run(
    strategy: StrategyArgument,
    recipe: Recipe,
    module: type[Lit] = Resumable,
    *,
    steps: int,
    resume: str | None = None,
    save: tuple[int, str] | None = None,
    **flags: Any,
) -> Fitted:
    """Train to `steps` steps in all, from a checkpoint or from the start; save in between or not."""
    callbacks = [SaveAfter(*save)] if save else []
    flags = {"accumulate_grad_batches": recipe.micro, "max_epochs": -1, "max_steps": steps} | flags
    trainer = make_trainer(strategy, callbacks=callbacks, **flags)
    lit = module(recipe)
    trainer.fit(lit, ckpt_path=resume)
    return observe(trainer, lit)


def resume_last(strategy: StrategyArgument, recipe: Recipe, callback: type[Checkpoint], **options: Any) -> int:
    """The step with which a fit goes on from the last checkpoint of a callback."""
    callbacks = [start := Start(), callback(**options)]
    flags = {"enable_checkpointing": True, "accumulate_grad_batches": recipe.micro, "max_epochs": -1}
    trainer = make_trainer(strategy, callbacks=callbacks, max_steps=recipe.steps + 1, **flags)
    trainer.fit(Resumable(recipe), ckpt_path="last")
    return start.step


def save_at_end(
    strategy: StrategyArgument, recipe: Recipe, path: str, module: type[Lit] = Resumable, **flags: Any
) -> Fitted:
    """Train for the recipe's steps, and save after `fit` has ended."""
    trainer = make_trainer(strategy, **({"accumulate_grad_batches": recipe.micro} | flags))
    lit = module(recipe)
    trainer.fit(lit)
    trainer.save_checkpoint(path)
    return observe(trainer, lit)


def save_after_fit(strategy: StrategyArgument, recipe: Recipe, module: type[Lit], path: str, **flags: Any) -> str:
    """The error of the save on this rank; "saved" if there is none."""
    trainer = make_trainer(strategy, **flags)
    trainer.fit(module(recipe))
    try:
        trainer.save_checkpoint(path)
    except CheckpointError as error:
        return str(error)
    return "saved"
