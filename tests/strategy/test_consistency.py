"""Ranks that go different ways under the Trainer get an error that names where, soon and everywhere."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import driver
from helpers import place
from helpers.ranks import RankError, RankPool, ranks
from lightning.fabric.plugins.environments import LightningEnvironment
from strategy.fits import Lit, Recipe, fit, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero import CollectiveError, ZeroStrategy
from lightning_zero.integration.launchers import ScriptLauncher
from lightning_zero.sharding import Board, Group, Mesh, Subject

STEPS = 12


def mesh_of(lit: Lit) -> Mesh:
    strategy = lit.trainer.strategy
    assert isinstance(strategy, ZeroStrategy)
    return strategy._mesh


class Astray(Lit):
    """From a step on, rank 1 leaves out the first block."""

    step = 0

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if self.step and self.global_step == self.step:  # in which nothing is checked
            driver.limit_waits(mesh_of(self), 5.0)
        if dist.get_rank() == 1 and self.global_step == self.step:
            blocks: Any = self.model.blocks
            self.model.blocks = nn.ModuleList([blocks[1]])
        return super().training_step(batch, index)


class AstrayLate(Astray):
    step = STEPS - 1


@ranks(4)
@pytest.mark.parametrize(
    "module", [pytest.param(Astray, id="first"), pytest.param(AstrayLate, id="late", marks=pytest.mark.slow)]
)
def test_another_branch_on_one_rank_is_an_error_on_all(pool: RankPool, module: type[Lit]) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(fit, {"stage": 3, "timeout": 1800.0}, Recipe(steps=STEPS), module)  # it is over long before that
    failures = caught.value.failures
    assert {failure.kind for failure in failures.values()} == {"CollectiveError"}
    assert all(
        "model.blocks.0" in failure.message or "model.blocks.1" in failure.message for failure in failures.values()
    )
    assert set(failures) == set(range(4))


class Failing(Lit):
    """Rank 1 fails in its second step; then the other begins to wait for it."""

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if index == 1:
            driver.limit_waits(mesh_of(self), 1.0)
            if dist.get_rank() == 1:
                raise LookupError("no such token")
            while not mesh_of(self).board.read(Subject.FAILURE):
                time.sleep(0.01)
        return super().training_step(batch, index)


class Uneven(Lit):
    """Rank 1 has a batch less than the other."""

    def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
        if index == 1:  # the last that both have
            driver.limit_waits(mesh_of(self), 1.0)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(list(super().loader())[dist.get_rank() :], batch_size=None)  # type: ignore[arg-type]


def error_of(module: type[Lit]) -> str:
    """The message with which a short fit ends on this rank."""
    with pytest.raises((CollectiveError, LookupError)) as caught:
        fit({"stage": 2}, Recipe(steps=3), module)
    if module is Uneven and dist.get_rank() == 1:
        # Lightning's, which has no timeout here: rank 0 goes on to its last batch.
        dist.broadcast(torch.tensor([0], device=place.device()), 0)
    return str(caught.value)


@ranks(2)
def test_the_rank_that_waits_for_one_that_failed_repeats_its_error(pool: RankPool) -> None:
    waited, _ = pool.run(error_of, Failing)
    assert waited.endswith("because rank 1 failed: LookupError: no such token")


class ReadsNotes(Lit):
    """Raises in its first step of the first fit; reads the notes of all ranks when they begin the second."""

    def on_fit_start(self) -> None:
        dist.barrier()
        board = mesh_of(self).board
        self.notes.append([board.read(subject) for subject in (Subject.FAILURE, Subject.WAIT)])

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if len(self.notes) == 1:
            raise LookupError("no such token")
        return super().training_step(batch, index)


def fit_after_a_failure() -> list[Any]:
    """The notes at the start of each fit, and those after the first."""
    trainer, lit = make_trainer("zero2"), ReadsNotes(Recipe(steps=1))
    with pytest.raises(LookupError):
        trainer.fit(lit)
    board = mesh_of(lit).board
    board.put(Subject.WAIT, "-")
    left = [len(board.read(subject)) > 0 for subject in (Subject.FAILURE, Subject.WAIT)]
    trainer.fit(lit)
    return [*lit.notes, left]


@ranks(2)
def test_the_error_of_a_fit_explains_none_of_the_next(pool: RankPool) -> None:
    assert pool.run(fit_after_a_failure) == [[[{}, {}], [{}, {}], [True, True]]] * 2


@ranks(2)
def test_a_loader_that_ran_out_is_named(pool: RankPool) -> None:
    first, second = pool.run(error_of, Uneven)
    assert "because a loader ran out of batches: on rank 1 after batch 2 of epoch 0; not yet on rank 0." in second
    assert "on rank 0 after batch 3 of epoch 0; on rank 1 after batch 2 of epoch 0." in first
    assert "Trainer(limit_train_batches=...)" in first


class Empty(Lit):
    """Rank 1 has no batch, which Lightning is told to accept."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        driver.limit_waits(mesh_of(self), 1.0)  # when the fit of the other rank has ended
        return super().training_step(batch, index)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(list(super().loader()) * (1 - dist.get_rank()), batch_size=None)  # type: ignore[arg-type]


class EmptyStream(Empty):
    """Its length is unknown."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Given([*super().train_dataloader()]), batch_size=None)


class Given(IterableDataset[Tensor]):
    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


def error_without_batches(module: type[Empty]) -> str:
    """The message with which a rank waits for one that has no batch."""
    try:
        make_trainer({"stage": 2}).fit(module(Recipe()))
    except CollectiveError as error:
        return str(error)
    if module is Empty:
        # Lightning's question before the first batch, to which this rank has not come.
        dist.broadcast(torch.tensor([0], device=place.device()), 0)
    dist.barrier()  # of `limit_waits`
    return ""


@ranks(2)
def test_a_rank_without_batches_is_named(pool: RankPool) -> None:
    for module in (Empty, EmptyStream):
        first, second = pool.run(error_without_batches, module)
        assert "a loader ran out of batches: on rank 1 before the first batch of epoch 0; not yet on rank 0." in first
        assert not second


class Stream(IterableDataset[Tensor]):
    """Its length is unknown; rank 1 has a batch less."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(12).view(3, 1, 4)[dist.get_rank() :])


def error_of_prediction() -> str:
    """The message with which a rank waits for one that has no more batches."""
    lit, trainer = Lit(Recipe()), make_trainer({"stage": 3, "timeout": 2.0})
    try:
        trainer.predict(lit, DataLoader(Stream(), batch_size=None))
    except CollectiveError as error:
        return str(error)
    return ""


@ranks(2)
def test_a_loader_of_unknown_length_that_ran_out_is_named(pool: RankPool) -> None:
    first, second = pool.run(error_of_prediction)
    assert "on rank 1 after batch 2 of the predict loader; not yet on rank 0." in first
    assert "limit_predict_batches" in first
    assert not second


def test_an_error_of_lightnings_own_collectives_gets_the_cause() -> None:
    store, strategy = dist.HashStore(), ZeroStrategy(2)
    strategy._mesh = Mesh(Group(), Group(), Group(), board=Board(0, 2, store))
    Board(1, 2, store).put(Subject.LOADER, "after batch 2 of epoch 0")
    error = RuntimeError("[/pytorch/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for send")
    strategy.on_exception(error)
    assert error.__notes__[0].startswith("a loader ran out of batches: on rank 1 after batch 2 of epoch 0; not yet on")
    own = ValueError("of the user")
    strategy.on_exception(own)
    assert not hasattr(own, "__notes__")
    assert Board(1, 2, store).explain() == "rank 0 failed: ValueError: of the user"


@ranks(2)
def test_small_parameters_stay_readable_by_default(pool: RankPool) -> None:
    """What every Trainer does; the other tests of this folder shard all parameters."""
    for result in pool.run(fit, {"stage": 3, "persistence_numel": 10_000}, Recipe(), ReadsNorms):
        assert len(result.notes) > 0


class ReadsNorms(Lit):
    def on_train_batch_end(self, *_: Any) -> None:
        self.notes += [float(p.sum()) for p in self.model.norm.parameters()]


def test_ranks_that_another_node_has_started_have_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_RANK", "1")
    launcher = ScriptLauncher(LightningEnvironment(), num_processes=2, num_nodes=2)
    launcher.procs = [subprocess.Popen(["sh", "-c", "kill -9 $$"])]
    assert launcher.ended_by_signal().startswith("rank 3 was ended by SIGKILL")
