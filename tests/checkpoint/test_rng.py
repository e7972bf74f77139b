"""A resumed run draws the random numbers that the interrupted one would have drawn, on every rank."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoint.resuming import StatefulLoader
from helpers import models
from helpers.ranks import RankPool, ranks
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities.seed import isolate_rng
from strategy.fits import Fitted, Lit, Recipe, assert_same, make_trainer, observe
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_zero.checkpoint import rng
from lightning_zero.sharding import Group

RECIPE = Recipe(steps=4)
CPU = torch.device("cpu")


def seed(number: int) -> None:
    """On every rank otherwise."""
    torch.manual_seed(number + dist.get_rank())
    np.random.seed(number + dist.get_rank())
    random.seed(number + dist.get_rank())
    # A second normal number waits in each.
    np.random.standard_normal()
    random.gauss()


class Drawing(Lit):
    """Drops activations, and notes for every step what it was given and what the generators give."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = models.next_token_loss(lambda tokens: functional.dropout(self.model(tokens), 0.3), batch)
        drawn = [torch.rand(()).item(), np.random.standard_normal(), random.gauss()]
        self.notes.append([batch.sum().item(), *drawn])
        return loss * (1 + sum(map(abs, drawn)))


class Shuffled(Drawing):
    """Epochs in an order that is drawn; the split is drawn, too, by the seed that `run` gives."""

    def train_dataloader(self) -> Any:
        batches = models.rank_batches(self.recipe.batches(dist.get_world_size()), dist.get_rank())
        torch.randperm(5)
        return DataLoader(batches, batch_size=None, shuffle=True)  # type: ignore[arg-type]


class Counting(Shuffled):
    """Asks for the number of steps, for which Lightning makes the loader, and draws where a run and an epoch begin."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches >= RECIPE.steps
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        torch.rand(())

    def on_train_epoch_start(self) -> None:
        torch.rand(())


class ByEpoch(Drawing):
    """Has an order for each epoch, as a distributed sampler has; the loader begins it when it is iterated."""

    class Sampler:
        epoch = 0

        def __init__(self, number: int) -> None:
            self.number = number

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return self.number

        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(self.number, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def train_dataloader(self) -> Any:
        batches = models.rank_batches(self.recipe.batches(dist.get_world_size()), dist.get_rank())
        return DataLoader(batches, batch_size=None, sampler=self.Sampler(len(batches)))  # type: ignore[arg-type]


class DrawingLoader(StatefulLoader):
    """Draws when it is iterated, as torch's loader does."""

    def __iter__(self) -> Iterator[Tensor]:
        torch.rand(())
        return super().__iter__()


class Stateful(Drawing):
    def train_dataloader(self) -> Any:
        return DrawingLoader(models.rank_batches(self.recipe.batches(dist.get_world_size()), dist.get_rank()))


class SaveIn(Callback):
    """Saves in a hook, in its first call after a step, and draws where the test has finished its set-up."""

    def __init__(self, hook: str, step: int, path: str) -> None:
        self.step = step
        self.path = path
        self.saved = False
        setattr(self, hook, self._save)

    def _save(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step and not self.saved and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)
            self.saved = True


def run(
    strategy: str, module: type[Lit], save: tuple[str, int, str] | None = None, resume: str | None = None, **flags: Any
) -> Fitted:
    """Train from one seed, or resume from another."""
    seed(100 if resume is None else 500)
    trainer = make_trainer(strategy, callbacks=[SaveIn(*save)] if save else [], **flags)
    lit = module(RECIPE)
    trainer.fit(lit, ckpt_path=resume)
    return observe(trainer, lit)


def run_both(*args: Any, path: str, save: tuple[str, int], **flags: Any) -> tuple[Fitted, Fitted]:
    """The uninterrupted run, which saves, and one that resumes."""
    return run(*args, save=(*save, path), **flags), run(*args, resume=path, **flags)


EPOCHS = {"max_epochs": 3}
STEPS = {"max_epochs": -1, "max_steps": 10}
VALIDATED = {"limit_val_batches": 1, "num_sanity_val_steps": 1}


@ranks(2)
@pytest.mark.parametrize(
    ("module", "save", "flags"),
    [
        pytest.param(
            Stateful, ("on_validation_end", 2), STEPS | VALIDATED | {"val_check_interval": 2}, id="validated there"
        ),
        pytest.param(
            Shuffled, ("on_train_epoch_end", 4), STEPS | VALIDATED, id="at the end of an epoch, counting steps"
        ),
        pytest.param(Counting, ("on_train_epoch_end", 4), EPOCHS, id="at the end of an epoch"),
        pytest.param(ByEpoch, ("on_train_batch_end", 4), EPOCHS, id="after the last batch"),
    ],
)
def test_a_resumed_run_draws_what_the_interrupted_one_would_have(
    pool: RankPool, module: type[Lit], save: tuple[str, int], flags: dict[str, Any], tmp_path: Path
) -> None:
    results = pool.run(run_both, "zero3", module, path=str(tmp_path / "a.ckpt"), save=save, **flags)
    for whole, resumed in results:
        assert resumed.notes == whole.notes[save[1] :]
    whole, resumed = results[0]
    assert len(whole.notes) == whole.steps > save[1]
    assert whole.notes != results[1][0].notes
    assert_same(resumed.weights, whole.weights)


# ------------------------------------------------------------------------------------------- another number of ranks


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    with isolate_rng():
        yield


def states_of(seeds: list[int]) -> dict[str, Tensor]:
    """What ranks with these seeds would gather."""
    states = []
    for number in seeds:
        torch.manual_seed(number)
        np.random.seed(number)
        random.seed(number)
        states.append(rng.gather(Group(), CPU))
    return {name: torch.cat([state[name] for state in states]) for name in states[0]}


def draw(saved: dict[str, Tensor], rank: int) -> tuple[float, ...]:
    rng.restore(saved, rank, CPU)
    return torch.rand(()).item(), np.random.rand(), random.random()


def test_new_ranks_draw_otherwise_but_the_same_every_time() -> None:
    saved = states_of([3, 4])
    first = [draw(saved, rank) for rank in range(5)]
    assert [draw(saved, rank) for rank in range(5)] == first
    for drawn in zip(*first, strict=True):  # by generator
        assert len(set(drawn)) == 5
    assert first[0] == draw(states_of([3]), 0)
    assert first[1] == draw(states_of([4]), 0)


def test_what_all_ranks_drew_alike_new_ones_draw_alike() -> None:
    saved = states_of([3, 3])
    assert len({draw(saved, rank) for rank in range(4)}) == 1


def test_a_generator_that_was_not_saved_goes_on() -> None:
    saved = states_of([3])
    del saved["numpy"]
    draw(saved, 0)
    np.random.seed(11)
    expected = np.random.rand()
    np.random.seed(11)
    assert draw(saved, 0)[1] == expected


def resume_and_listen(strategy: str, path: str) -> tuple[list[Any], list[str]]:
    """What is drawn, and what is logged."""
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    listener, logger = Listener(), logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(listener)
    level = logger.level
    logger.setLevel(logging.INFO)  # whatever an earlier test of this rank has left
    try:
        return run(strategy, Stateful, resume=path, max_epochs=-1, max_steps=3).notes, heard
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (1, 2, "1 -> 2: each rank continues the random numbers that the same rank drew before, and ranks from 1 on"),
        (2, 1, "drew before, so"),
    ],
)
def test_another_number_of_ranks_is_told(rank_pools: Any, before: int, now: int, told: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    save = ("on_train_batch_end", 2, path)
    rank_pools(before).run(run, "zero2", Stateful, save=save, max_epochs=-1, max_steps=2)
    first, second = (rank_pools(now).run(resume_and_listen, "zero3", path) for _ in range(2))
    assert [notes for notes, _ in first] == [notes for notes, _ in second]
    assert len([message for message in first[0][1] if told in message]) == 1


# ----------------------------------------------------------------------------------------- what must not be disturbed


def draw_after_what_does_not_resume(strategy: str, path: str) -> dict[str, bool]:
    """Whether random numbers are what they are without the checkpoint."""

    def drawn() -> list[float]:
        return [torch.rand(()).item(), np.random.rand(), random.random()]

    run(strategy, Stateful, save=("on_train_batch_end", 2, path), max_epochs=-1, max_steps=3)
    outcomes = {}
    for name in ("validate", "test", "predict"):
        numbers = []
        for ckpt_path in (None, path):
            seed(100)
            getattr(make_trainer(strategy), name)(Stateful(RECIPE), ckpt_path=ckpt_path)
            numbers.append(drawn())
        outcomes[name] = numbers[0] == numbers[1]
    seed(100)
    expected = drawn()
    seed(100)
    Stateful.load_from_checkpoint(path, recipe=RECIPE)
    outcomes["load_from_checkpoint"] = drawn() == expected
    return outcomes


@ranks(2)
def test_only_a_fit_that_resumes_takes_the_states(pool: RankPool, tmp_path: Path) -> None:
    results = pool.run(draw_after_what_does_not_resume, "zero3", str(tmp_path / "a.ckpt"))
    assert results == [dict.fromkeys(("validate", "test", "predict", "load_from_checkpoint"), True)] * 2


class Failing(Stateful):
    """Ends when the checkpoint is loaded, before the first step."""

    def on_train_start(self) -> None:
        raise KeyError


def fit_after_a_failure(strategy: str, path: str) -> tuple[list[Any], list[Any]]:
    """What the first step draws in a new run, and in a Trainer's second fit whose first one failed to resume."""
    fresh = run(strategy, Stateful, save=("on_train_batch_end", 2, path), max_epochs=-1, max_steps=3)
    trainer = make_trainer(strategy, max_epochs=-1, max_steps=3)
    with pytest.raises(KeyError):
        trainer.fit(Failing(RECIPE), ckpt_path=path)
    seed(100)
    lit = Stateful(RECIPE)
    trainer.fit(lit)
    return fresh.notes[0][1:], lit.notes[0][1:]


@ranks(1)
def test_a_failed_resumption_leaves_nothing_for_the_next_fit(pool: RankPool, tmp_path: Path) -> None:
    ((fresh, second),) = pool.run(fit_after_a_failure, "zero2", str(tmp_path / "a.ckpt"))
    assert fresh == second


class SearchingLater(LearningRateFinder):
    """Searches for a learning rate when the first epoch begins."""

    def on_fit_start(self, *_: Any) -> None:
        """Leave the search to the epoch."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            self.lr_find(trainer, pl_module)


def search_and_draw(strategy: str, folder: str) -> list[float]:
    """What the steps of the last two epochs draw, each of which loads its data anew."""
    search = SearchingLater(num_training_steps=2, update_attr=False)
    flags = {"default_root_dir": folder, "reload_dataloaders_every_n_epochs": 1}
    trainer = make_trainer(strategy, callbacks=[search], max_epochs=3, **flags)
    lit = Shuffled(RECIPE)
    trainer.fit(lit)
    return [drawn for _, drawn, *_ in lit.notes[-2 * RECIPE.steps :]]


@ranks(1)
def test_what_a_search_goes_back_to_is_restored_once(pool: RankPool, tmp_path: Path) -> None:
    (drawn,) = pool.run(search_and_draw, "zero2", str(tmp_path))
    assert len(set(drawn)) == 2 * RECIPE.steps


# ----------------------------------------------------------------------------------------------------------- the file


def save_weights_too(strategy: str, path: str) -> None:
    seed(100)
    trainer = make_trainer(strategy)
    trainer.fit(Stateful(RECIPE))
    trainer.save_checkpoint(path)
    trainer.save_checkpoint(path + ".weights", weights_only=True)


@ranks(2)
def test_a_file_holds_plain_tensors(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    pool.run(save_weights_too, "zero2", path)
    states = torch.load(path, weights_only=True)[rng.ENTRY]
    assert {name: (state.dtype, len(state)) for name, state in states.items()} == {
        "torch": (torch.uint8, 2),
        "numpy": (torch.float64, 2),
        "python": (torch.float64, 2),
    }
    assert rng.ENTRY not in torch.load(path + ".weights", weights_only=True)
