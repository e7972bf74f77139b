"""Callbacks see current weights, rates and decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from helpers import models
from helpers.ranks import RankPool, ranks
from helpers.reference import train_reference
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
)
from lightning.pytorch.loggers import CSVLogger
from strategy.fits import (
    Lit,
    Recipe,
    assert_same,
    fit,
    main_names,
    reduces_each,
    reference,
)
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero import gathered_parameters

MOMENTUM = Recipe(optimizer="momentum")


def weights_after_each_step(name: str, recipe: Recipe, world: int) -> list[dict[str, Tensor]]:
    batches = recipe.batches(world)
    return [reference(name, recipe, world, batches=batches[: n + 1]).weights for n in range(len(batches))]


class Reader(Callback):
    """Copies all parameters wherever a user's callback may read them after a step."""

    def __init__(self) -> None:
        self.seen: dict[str, list[dict[str, Tensor]]] = {"batch_end": [], "zero_grad": [], "batch_start": []}

    def read(self, module: LightningModule, where: str) -> None:
        with gathered_parameters(module):
            state = module.model.state_dict()
            self.seen[where].append({name: value.clone() for name, value in state.items()})

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.read(pl_module, "batch_end")

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, _: Optimizer) -> None:
        self.read(pl_module, "zero_grad")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.read(pl_module, "batch_start")


def fit_and_read(name: str, recipe: Recipe) -> dict[str, list[dict[str, Tensor]]]:
    reader = Reader()
    fit(name, recipe, callbacks=[reader])
    return reader.seen


@ranks(2)
@main_names
def test_callbacks_never_read_stale_parameters(pool: RankPool, name: str) -> None:
    after = weights_after_each_step(name, MOMENTUM, pool.world_size)
    before = [MOMENTUM.make_model().state_dict(), *after[:-1]]
    for seen in pool.run(fit_and_read, name, MOMENTUM):
        for where, expected in (("batch_end", after), ("zero_grad", before), ("batch_start", before)):
            for actual, weights in zip(seen[where], expected, strict=True):
                assert_same(actual, weights)


class Bare(Callback):
    """Reads parameters as a callback does that knows nothing of sharding."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen.append({name: value.clone() for name, value in pl_module.model.state_dict().items()})


def fit_and_read_bare(name: str, recipe: Recipe) -> list[dict[str, Tensor]]:
    reader = Bare()
    fit(name, recipe, callbacks=[reader])
    return reader.seen


@ranks(2)
def test_unsharded_parameters_need_no_context_to_be_read(pool: RankPool) -> None:
    name = "zero2_offload"
    expected = weights_after_each_step(name, MOMENTUM, 2)
    for seen in pool.run(fit_and_read_bare, name, MOMENTUM):
        for actual, weights in zip(seen, expected, strict=True):
            assert_same(actual, weights)


def fit_with_monitor(name: str, recipe: Recipe, folder: str) -> dict[str, list[float]]:
    monitor = LearningRateMonitor(logging_interval="step")
    fit(name, recipe, callbacks=[monitor], logger=CSVLogger(folder), log_every_n_steps=1)
    return monitor.lrs


@ranks(2)
def test_the_learning_rate_monitor_shows_the_rates_used(pool: RankPool, tmp_path: Path) -> None:
    recipe = Recipe(scheduled=True, options={"lr": 0.25})
    rates = pool.run(fit_with_monitor, "zero3", recipe, str(tmp_path))[0]
    assert rates == {"lr-AdamW/pg1": [0.25, 0.125, 0.0625], "lr-AdamW/pg2": [0.25, 0.125, 0.0625]}


class WorseOnOneRank(Lit):
    """Its metric stops improving on the last rank only."""

    def validation_step(self, batch: Tensor, index: int) -> None:
        last = dist.get_rank() == dist.get_world_size() - 1
        self.log("score", float(self.current_epoch) if last else 0.0, sync_dist=False)


@ranks(2)
def test_early_stopping_stops_all_ranks_together(pool: RankPool) -> None:
    stopping = EarlyStopping("score", patience=2, mode="max", min_delta=0.5)
    flags: dict[str, Any] = {"callbacks": [stopping], "max_epochs": 9, "limit_val_batches": 1}
    results = pool.run(fit, "zero3", MOMENTUM, WorseOnOneRank, **flags)
    assert [result.epochs for result in results] == [3, 3]


@ranks(2)
@main_names
def test_accumulation_may_be_scheduled(pool: RankPool, name: str) -> None:
    recipe = Recipe(optimizer="momentum", steps=4)
    flat = [step[0] for step in recipe.batches(pool.world_size)]
    schedule = GradientAccumulationScheduler({0: 1, 1: 2})
    results = pool.run(fit, name, recipe, callbacks=[schedule], max_epochs=2)
    batches = [*([ranks_of] for ranks_of in flat), flat[:2], flat[2:]]
    expected = accumulated_reference(name, recipe, pool.world_size, batches)
    assert_same(results[0].weights, expected)


def accumulated_reference(name: str, recipe: Recipe, world: int, batches: Any) -> dict[str, Tensor]:
    """Each step divides its losses by its own number of micro-batches."""
    return train_reference(
        recipe.make_model(), recipe.make_optimizer, batches, models.next_token_loss, reduce_each=reduces_each(name)
    ).weights
