"""Stages 1 and 2 on several ranks: what an update made stale is gathered under the next forward, in one order."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device import sim
from device.test_overlap import BF16, Case, Late, left_by, start
from device.test_update_under_forward import Held
from device.where import DevicePool, device_of_rank
from engine import driver
from engine.driver import Session
from helpers import models
from helpers.ranks import RankPool
from lightning import Callback, LightningDataModule
from lightning.pytorch.callbacks import LearningRateFinder
from strategy.fits import Lit, Recipe, fit, make_trainer, state_of
from torch import Tensor

from lightning_zero.callbacks import Breakdown
from lightning_zero.sharding import BucketState, Mesh
from lightning_zero.sharding.pending import PendingParameter
from lightning_zero.storage import Executor, InlineExecutor, StreamExecutor
from lightning_zero.update import make_updater

STEPS, DEPTH = 3, 4


def begin(make: Callable[[torch.device], Executor], case: Case) -> tuple[Session, torch.device]:
    device = device_of_rank(sim.DEVICE)
    model = models.TinyTransformer(depth=DEPTH)
    return start(case, make(device), device, model, Mesh.create()), device


def forward(model: Any, tokens: Tensor, order: list[int]) -> Tensor:
    x = model.tokens(tokens)
    for number in order:
        x = model.blocks[number](x)
    return model.head(model.norm(x)).square().mean()


# By rank: the blocks that each runs in a step, and those whose parameters it reads before.
ORDERS = ([0, 1, 2, 3], [2, 0]), ([3, 1], [0]), ([0], [2, 1])
READS = ([3], []), ([], [1]), ([2], [])


def train(make: Callable[[torch.device], Executor], case: Case) -> list[Tensor]:
    session, device = begin(make, case)
    engine, rank, saw = session.engine, dist.get_rank(), []
    ((batch,),), *_ = models.make_batches(1, 1, 1)
    deferred = []
    for orders, reads in zip(ORDERS, READS, strict=True):
        session.optimizer.zero_grad()
        with engine.forward_context():
            saw += [session.model.blocks[number].up.weight.detach().clone() for number in reads[rank]]
            loss = forward(session.model, batch.to(device), orders[rank])
            if len(deferred) != 1:  # a collective: what is left comes before; otherwise when the forward has ended
                saw.append(engine.full_param(session.model.blocks[1].up.weight))
        assert not any(bucket.deferred for bucket in engine.buckets)
        driver.backward(engine, loss, last=True)
        engine.clip_grad_norm_(session.optimizer, 0.5)
        session.optimizer.step()
        engine.end_step(reads=False)
        deferred.append(any(bucket.deferred for bucket in engine.buckets))
    assert deferred == [engine.placement.executor.overlaps] * STEPS
    engine.settle()
    return [tensor.cpu() for tensor in [*saw, *left_by(session)]]


@pytest.mark.simulated
@pytest.mark.device("lazy")
@pytest.mark.parametrize("case", [Case(1), Case(2, precision=BF16), Case(2, host=False)], ids=str)
def test_ranks_that_enter_units_in_other_orders_train_as_inline(device_pool2: DevicePool, case: Case) -> None:
    expected = device_pool2.run(train, inline, case)
    for make in (Late, StreamExecutor):
        for actual, wanted in zip(device_pool2.run(train, make, case), expected, strict=True):
            assert all(map(torch.equal, actual, wanted))


def inline(device: torch.device) -> InlineExecutor:
    return InlineExecutor()


def steps_between_units(make: Callable[[torch.device], Executor]) -> list[Tensor]:
    """A second optimizer steps after another number of units on each rank, and has a part of a later one."""
    session, device = begin(make, Case(2))
    engine, model, own = session.engine, session.model, session.model.blocks[3].down.weight
    parts = [parameter for parameter in model.parameters() if parameter is not own], [own]
    first, second = (torch.optim.AdamW(part, lr=1e-2) for part in parts)
    engine.attach([make_updater(optimizer, engine) for optimizer in (first, second)])
    ((batch,),), *_ = models.make_batches(1, 1, 1)
    with engine.forward_context():
        loss = forward(model, batch.to(device), [0, 1, 2, 3])
    driver.backward(engine, loss, last=True)
    first.step()
    engine.end_step(reads=False)
    with engine.forward_context():
        x = model.tokens(batch.to(device))
        for block in model.blocks[: 3 - 2 * dist.get_rank()]:
            x = block(x)
        second.step()
        assert not any(bucket.deferred for bucket in engine.buckets)
        first.step()
        engine.end_step(reads=False)
        engine.buckets[-2].unshard()  # and begin to gather the last one
        engine.end_step()
        assert not any(bucket.deferred for bucket in engine.buckets)
    engine.settle()
    return left_by(session)


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_a_step_begins_when_all_ranks_have_gathered_what_is_left_of_another(device_pool2: DevicePool) -> None:
    """Or a rank would gather for itself what others change before they gather it."""
    expected = device_pool2.run(steps_between_units, inline)
    for make in (Late, StreamExecutor):
        for actual, wanted in zip(device_pool2.run(steps_between_units, make), expected, strict=True):
            assert all(map(torch.equal, actual, wanted))


def waits_for_no_later_update(stage: int) -> list[bool]:
    session, device = begin(Held, Case(stage, precision=BF16))
    engine, executor = session.engine, session.engine.placement.executor
    assert isinstance(executor, Held)
    ((batch,),), *_ = models.make_batches(1, 1, 1)
    later, seen = engine.bucket_of(session.model.blocks[1].down.weight), []
    assert later is not None

    def after_first_unit(*_: Any) -> None:
        seen.append(later.updating)
        if later.updating:
            executor.gate.set()

    session.model.blocks[0].register_forward_hook(after_first_unit)
    for _ in range(2):
        with engine.forward_context():
            loss = forward(session.model, batch.to(device), [0, 1, 2, 3])
        driver.backward(engine, loss, last=True)
        executor.word = later.name
        session.optimizer.step()
        engine.end_step(reads=False)
    engine.settle()
    return seen


@pytest.mark.simulated
@pytest.mark.device("lazy")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_unit_waits_for_no_later_update(device_pool2: DevicePool, stage: int) -> None:
    assert device_pool2.run(waits_for_no_later_update, stage) == [[False, True]] * 2


def asks_while_another_rank_updates() -> list[Tensor]:
    session, device = begin(Held, Case(3))
    engine, executor, saw = session.engine, session.engine.placement.executor, []
    assert isinstance(executor, Held)
    ((batch,),), *_ = models.make_batches(1, 1, 1)
    weight = session.model.blocks[1].down.weight
    later = engine.bucket_of(weight)
    assert later is not None

    def after_first_unit(*_: Any) -> None:
        if later.updating:
            threading.Timer(0.3, executor.gate.set).start()
            saw.append(engine.full_param(session.model.tokens.weight))

    session.model.blocks[0].register_forward_hook(after_first_unit)
    for _ in range(2):
        with engine.forward_context():
            loss = forward(session.model, batch.to(device), [0, 1, 2, 3])
        driver.backward(engine, loss, last=True)
        executor.word = later.name if dist.get_rank() == 0 else "nothing"
        session.optimizer.step()
        engine.end_step(reads=False)
    return [*saw, engine.full_param(weight)]


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_a_collective_comes_after_those_that_a_lane_issues(device_pool2: DevicePool) -> None:
    """Also where one rank's lane still waits for an update and another's does not."""
    for actual, expected in zip(*device_pool2.run(asks_while_another_rank_updates), strict=True):
        assert torch.equal(actual, expected)


def reads_alone() -> str:
    session, device = begin(StreamExecutor, Case(2))
    engine = session.engine
    ((batch,),), *_ = models.make_batches(1, 1, 1)
    with engine.forward_context():
        loss = forward(session.model, batch.to(device), [0])
    driver.backward(engine, loss, last=True)
    session.optimizer.step()
    engine.end_step(reads=False)
    parameter = session.model.blocks[0].up.weight
    assert isinstance(parameter, PendingParameter)
    message = ""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="before the ranks have gathered") as caught:
            parameter.sum()
        message = str(caught.value)
    with engine.gathered([parameter]):
        parameter.sum()
    assert all(bucket.state is BucketState.GATHERED for bucket in engine.buckets[:2])
    return message


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_a_rank_that_reads_alone_is_told_so_and_starts_no_collective(device_pool2: DevicePool) -> None:
    message, _ = device_pool2.run(reads_alone)
    assert "blocks.0" in message


# ------------------------------------------------------------------------------------------------------ with Lightning


class Penalized(Lit):
    """Its loss reads parameters before their units have run; it notes them in hooks that come after some steps."""

    def note(self, where: str) -> None:
        self.notes.append((where, [p.detach().double().square().sum().item() for p in self.parameters()]))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        buckets = self.trainer.strategy.engine.buckets  # type: ignore[attr-defined]
        self.notes.append(("deferred", [float(any(bucket.deferred for bucket in buckets))]))
        penalty = sum(p.square().sum() for p in reversed([*self.parameters()]))
        return models.next_token_loss(self.model, batch) + 1e-3 * penalty

    def on_train_epoch_end(self) -> None:
        self.note("epoch end")

    def on_validation_start(self) -> None:
        self.note("validation")

    def on_train_end(self) -> None:
        self.note("end")


class Reader(Callback):
    """Reads after every step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.note("batch end")


class ReadingData(LightningDataModule):
    """Reads before every step."""

    def __init__(self, lit: Penalized) -> None:
        super().__init__()
        self.lit = lit
        self.train_dataloader, self.val_dataloader = lit.train_dataloader, lit.val_dataloader

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        self.lit.note("batch")
        return batch


def fit_penalized(accelerator: str, reader: str) -> tuple[dict[str, Tensor], list[Any]]:
    flags: dict[str, Any] = {"callbacks": [Reader()]} if reader == "callback" else {}
    lit = Penalized(Recipe(steps=4, optimizer="momentum"))
    options = {"val_check_interval": 2, "limit_val_batches": 1, "max_epochs": 2, "num_sanity_val_steps": 0}
    strategy = {"stage": 2, "offload_optimizer": "cpu", "bucket_size_mb": 0.001}
    trainer = make_trainer(strategy, accelerator=accelerator, **options, **flags)
    trainer.fit(lit, datamodule=ReadingData(lit) if reader == "data" else None)
    return state_of(trainer), lit.notes


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_hooks_and_training_steps_see_what_they_see_without_overlap(
    device_pool2: DevicePool, rank_pools: Callable[..., RankPool]
) -> None:
    """And only a hook that may read after every step costs the gathers under forward."""
    for reader in ("", "callback", "data"):
        expected = rank_pools(2).run(fit_penalized, "cpu", reader)
        for (weights, notes), (own, seen) in zip(
            device_pool2.run(fit_penalized, sim.DEVICE, reader), expected, strict=True
        ):
            assert all(torch.equal(weights[name], value) for name, value in own.items())
            deferred = [values[0] for where, values in notes if where == "deferred"]
            assert deferred == [float(not reader and index not in (0, 2, 4, 6)) for index in range(8)]
            for (where, values), (_, wanted) in zip(notes, seen, strict=True):
                assert where == "deferred" or values == pytest.approx(wanted, rel=1e-12)


class ReadsAlone(Lit):
    """One rank reads a parameter in each step, before a collective of Lightning's that comes before the units run."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model = models.TinyTransformer(depth=DEPTH)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        weight = self.model.blocks[-1].up.weight
        bucket = self.trainer.strategy.engine.bucket_of(weight)  # type: ignore[attr-defined]
        assert bucket.deferred == (index > 0)
        value = weight.sum().item() if self.global_rank == index % 2 else 0.0
        if index == 1:
            self.log("value", value, sync_dist=True)
        elif index == 2:
            self.all_gather(value)
        elif index == 3:
            self.trainer.strategy.barrier()
        else:
            self.trainer.strategy.broadcast(index)
        return models.next_token_loss(self.model, batch)


def fit_reading_alone() -> dict[str, Tensor]:
    strategy = {"stage": 2, "offload_optimizer": "cpu", "bucket_size_mb": 0.001}
    trainer = make_trainer(strategy, accelerator=sim.DEVICE)
    trainer.fit(ReadsAlone(Recipe(steps=5, optimizer="momentum")))
    return state_of(trainer)


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_a_read_of_one_rank_before_a_collective_of_lightning_ends(device_pool2: DevicePool) -> None:
    """The other rank issues the gathers that the reader waits for before it waits for the reader."""
    first, second = device_pool2.run(fit_reading_alone)
    assert all(torch.equal(first[name], value) for name, value in second.items())


def fit_after_a_search(folder: str) -> None:
    strategy = {"stage": 2, "offload_optimizer": "cpu", "bucket_size_mb": 0.001}
    search = LearningRateFinder(num_training_steps=2, update_attr=False)
    fit(strategy, Recipe(), Penalized, accelerator=sim.DEVICE, callbacks=[search], default_root_dir=folder)


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_hooks_read_in_a_search_for_a_learning_rate(device_pool2: DevicePool, tmp_path: Path) -> None:
    """It replaces the callbacks of the Trainer while it trains."""
    device_pool2.run(fit_after_a_search, str(tmp_path))


def fit_with_persistent(accelerator: str) -> dict[str, Tensor]:
    strategy = {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu", "persistence_numel": 40}
    return fit(strategy, Recipe(steps=3, micro=2), accelerator=accelerator, gradient_clip_val=0.3).weights


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_what_stays_unsharded_at_stage_3_is_gathered_likewise(
    device_pool2: DevicePool, rank_pools: Callable[..., RankPool]
) -> None:
    expected = rank_pools(2).run(fit_with_persistent, "cpu")
    for weights, own in zip(device_pool2.run(fit_with_persistent, sim.DEVICE), expected, strict=True):
        assert all(torch.equal(weights[name], value) for name, value in own.items())


def fit_compiled(compiled: bool) -> dict[str, Tensor]:
    lit = Lit(Recipe(steps=3, optimizer="momentum"))
    strategy = {"stage": 2, "offload_optimizer": "cpu", "bucket_size_mb": 0.001}
    trainer = make_trainer(strategy, accelerator=sim.DEVICE, max_epochs=2)
    trainer.fit(torch.compile(lit, backend="eager") if compiled else lit)
    return state_of(trainer)


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_all_is_gathered_before_a_graph_around_the_whole_module(device_pool2: DevicePool) -> None:
    for weights, own in zip(*(device_pool2.run(fit_compiled, compiled) for compiled in (True, False)), strict=True):
        assert all(torch.equal(weights[name], value) for name, value in own.items())


class FailsLast(Callback):
    """The updates of the last step fail beside the training; notes what hooks are told."""

    def __init__(self) -> None:
        self.told = ""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if index == 2:
            trainer.strategy.engine.updaters[0].update = self.fail

    def fail(self, view: Any) -> None:
        raise OSError("no update")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.told = str(exception)


def fit_that_fails_last() -> tuple[str, str]:
    callback = FailsLast()
    with pytest.raises(OSError, match="no update") as caught:
        fit("zero2_offload", Recipe(steps=3), accelerator=sim.DEVICE, callbacks=[callback])
    return callback.told, str(caught.value)


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_an_update_that_fails_last_ends_the_fit(device_pool1: DevicePool) -> None:
    """And not its teardown, when nobody is told."""
    ((told, error),) = device_pool1.run(fit_that_fails_last)
    assert told == error


def holds_the_first_units(make: Callable[[torch.device], Executor]) -> list[Tensor]:
    device = device_of_rank(sim.DEVICE)
    case, model = Case(3, precision=BF16, prefetch_mb=1.0), models.TinyTransformer(depth=DEPTH)
    session = start(case, make(device), device, model, Mesh.create())
    engine = session.engine
    ((batch,),), *_ = models.make_batches(1, 1, 1)
    freed = {id(parameter) for parameter in session.model.blocks[3].parameters()}
    with engine.gathered([parameter for parameter in session.model.parameters() if id(parameter) not in freed]):
        for _ in range(3):
            session.optimizer.zero_grad()
            with engine.forward_context():
                if dist.get_rank() == 1:
                    session.model.blocks[2].up.weight.sum()
                loss = forward(session.model, batch.to(device), [0, 3, 1, 2])
            driver.backward(engine, loss, last=True)
            session.optimizer.step()
            engine.end_step(reads=False)
    engine.settle()
    return [tensor.cpu() for tensor in left_by(session)]


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_units_that_are_held_are_gathered_before_those_of_the_lane(device_pool2: DevicePool) -> None:
    """Code holds some units over several steps, and another one, whose turn comes before theirs, is gathered ahead."""
    expected = device_pool2.run(holds_the_first_units, inline)
    for make in (Late, StreamExecutor):
        for actual, wanted in zip(device_pool2.run(holds_the_first_units, make), expected, strict=True):
            assert all(map(torch.equal, actual, wanted))


def copies_after_a_fit() -> list[int]:
    trainer = make_trainer("zero2", accelerator=sim.DEVICE, callbacks=[Breakdown(skip_steps=1)], limit_train_batches=3)
    trainer.fit(Lit(Recipe()))
    trainer.strategy.release()
    return [made.global_step for made in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer)))]


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_a_trainer_is_copied_and_pickled_after_a_fit_whose_gathers_were_deferred(device_pool2: DevicePool) -> None:
    assert device_pool2.run(copies_after_a_fit) == [[3, 3]] * 2
