"""Stage 3 gathers the next unit ahead, within its limit, and keeps small parameters whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import driver
from engine.cases import Case, check_cases
from engine.driver import Session, Setup
from helpers.ranks import RankPool, ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.sharding import Bucket, BucketState, Mesh, MixedPrecisionPolicy
from lightning_zero.sharding.reducer import Reducer

WIDTH = 8
BLOCKS = 5
UNIT = WIDTH * WIDTH + WIDTH  # elements of a block, which needs no padding
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
Order = Sequence[int]


class Block(nn.Module):
    """Tells what its neighbours' buckets are when it computes."""

    def __init__(self, observe: Callable[[], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.observe = observe

    def forward(self, x: Tensor) -> Tensor:
        self.observe()
        return torch.tanh(self.linear(x))


class Ordered(nn.Module):
    """Runs its blocks in the order that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(self.observe) for _ in range(BLOCKS))
        self.order: Order = range(BLOCKS)
        self.reentrant = False
        self.session: Session | None = None
        self.seen: list[list[BucketState]] = []  # the blocks' states whenever one computes

    def observe(self) -> None:
        if self.session is not None:
            self.seen.append([unit.state for unit in units(self.session)])

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            block = self.blocks[number]
            # Of what a checkpoint detaches, some blocks get a view.
            call = block if number % 2 else (lambda x, block=block: block(x[None])[0])
            x = checkpoint(call, x, use_reentrant=True) if self.reentrant else block(x)
        return x


def units(session: Session) -> list[Bucket]:
    return [bucket for bucket in session.engine.buckets if bucket.shards_params]


def start(mesh: Mesh | None = None, **options: Any) -> Session:
    session = driver.start(
        Ordered(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), Setup(3, **options), mesh or Mesh.single()
    )
    session.model.session = session
    assert len(units(session)) == BLOCKS
    return session


def train(session: Session, order: Order) -> list[list[BucketState]]:
    """One step; the states that each block saw in forward."""
    session.model.order = order
    session.model.seen = []
    driver.run_step(session, [torch.ones(2, WIDTH)], lambda model, x: model(x.requires_grad_(model.reentrant)).sum())
    return session.model.seen


def ahead(states: Sequence[Sequence[BucketState]]) -> list[list[int]]:
    return [[i for i, state in enumerate(each) if state is BucketState.GATHERING] for each in states]


def test_the_next_in_module_order_is_gathered_from_the_first_step() -> None:
    session = start()
    seen = train(session, range(BLOCKS))
    assert ahead(seen) == [[1], [2], [3], [4], []]
    for number, states in enumerate(seen):
        assert states[number] is BucketState.GATHERED
        assert sum(state is not BucketState.SHARDED for state in states) <= 2


def test_backward_goes_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    session = start()
    began: list[str] = []
    begin = Bucket.begin_unshard

    def noted(bucket: Bucket) -> None:
        if bucket.state is BucketState.SHARDED:
            whole = [b.name for b in units(session) if b.state is BucketState.GATHERED]
            began.append(f"{bucket.names[0][:8]} while {[name[:8] for name in whole]}")
        begin(bucket)

    with session.engine.forward_context():
        loss = session.model(torch.ones(2, WIDTH)).sum()
    monkeypatch.setattr(Bucket, "begin_unshard", noted)
    driver.backward(session.engine, loss)
    assert began == [
        "blocks.4 while []",
        *(f"blocks.{n} while ['blocks.{n + 1}']" for n in reversed(range(BLOCKS - 1))),
    ]


def test_another_order_is_learnt_in_one_step() -> None:
    session = start()
    order = [3, 0, 4, 4, 1]
    train(session, order)
    assert ahead(train(session, order)) == [[0], [4], [], [1], []]


def test_units_are_freed_in_an_evaluation_after_one_with_gradients() -> None:
    """A force field takes a gradient that has a gradient itself, after which nobody but the flush frees the units."""
    session = start()
    x = torch.ones(2, WIDTH, requires_grad=True)
    with torch.no_grad(), session.engine.forward_context(), torch.enable_grad():
        torch.autograd.grad(session.model(x).sum(), x, create_graph=True)
    session.model.seen = []
    with torch.no_grad(), session.engine.forward_context():
        session.model(x)
    assert all(sum(state is not BucketState.SHARDED for state in states) <= 2 for states in session.model.seen)


def test_evaluation_has_an_order_of_its_own() -> None:
    session = start()
    for _ in range(2):
        with torch.no_grad(), session.engine.forward_context():
            session.model.order, session.model.seen = [4, 2], []
            session.model(torch.ones(2, WIDTH))
    assert ahead(session.model.seen) == [[2], []]
    assert ahead(train(session, range(BLOCKS))) == [[1], [2], [3], [4], []]


def test_what_was_gathered_in_vain_is_freed() -> None:
    session = start()
    with torch.no_grad(), session.engine.forward_context():
        session.model.order = [0]
        session.model(torch.ones(2, WIDTH))
        assert units(session)[1].state is BucketState.GATHERING
    assert all(unit.state is BucketState.SHARDED for unit in units(session))
    train(session, [0])
    assert all(unit.state is BucketState.SHARDED for unit in units(session))


def test_a_unit_gathered_ahead_of_which_a_part_is_called_stays_unsharded() -> None:
    session = start()
    with torch.no_grad(), session.engine.forward_context():
        session.model.blocks[0](torch.ones(2, WIDTH))
        session.model.blocks[1].linear(torch.ones(2, WIDTH))
        session.model.blocks[3](torch.ones(2, WIDTH))
        assert bool(session.model.blocks[1].linear.weight.isfinite().all())


def test_nothing_is_gathered_ahead_of_a_unit_that_runs_alone() -> None:
    session = start()
    with torch.no_grad():
        session.model.blocks[1](torch.ones(2, WIDTH))
    assert all(unit.state is BucketState.SHARDED for unit in units(session))


def most_live(limit: int | None, orders: Sequence[Order], reentrant: bool = False) -> int:
    """The most elements that whole units have when a gather begins."""
    session = start(max_live_numel=limit)
    session.model.reentrant = reentrant
    begin, live = Bucket.begin_unshard, [0]

    def noted(bucket: Bucket) -> None:
        begin(bucket)
        live.append(sum(u.layout.padded_numel for u in units(session) if u.flat.untyped_storage().size()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "begin_unshard", noted)
        for order in orders:
            train(session, order)
    return max(live)


ORDERS = [range(BLOCKS), [3, 1, 4], [0, 2, 1, 1, 4, 3], range(BLOCKS)]


@pytest.mark.parametrize(("limit", "most"), [(0, 1), (UNIT, 1), (2 * UNIT - 1, 1), (2 * UNIT, 2)])
def test_the_limit_is_kept_also_when_the_order_changes(limit: int, most: int) -> None:
    assert most_live(limit, ORDERS) == most * UNIT


def test_more_units_are_gathered_ahead_while_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both directions and in whatever order was seen; the next one in any case."""
    size = 4 * UNIT / 2**20
    session = start(prefetch_mb=2.5 * size)
    assert ahead(train(session, range(BLOCKS))) == [[1, 2], [2, 3], [3, 4], [4], []]
    order = [3, 0, 4, 4, 1]
    train(session, order)
    assert ahead(train(session, order)) == [[0, 4], [4], [], [1], []]
    began: list[int] = []
    for number, unit in enumerate(units(session)):
        monkeypatch.setattr(unit, "begin_unshard", partial(note_begun, began, number, unit, unit.begin_unshard))
    with session.engine.forward_context():
        session.model.order = range(BLOCKS)
        loss = session.model(torch.ones(2, WIDTH)).sum()
    began.clear()
    driver.backward(session.engine, loss)
    assert began == [*reversed(range(BLOCKS))]
    limited = start(prefetch_mb=2.5 * size, max_live_numel=2 * UNIT)
    assert ahead(train(limited, range(BLOCKS))) == [[1], [2], [3], [4], []]


def note_begun(began: list[int], number: int, unit: Bucket, begin: Callable[[], None]) -> None:
    if unit.state is BucketState.SHARDED:
        began.append(number)
    begin()


def test_without_a_limit_one_unit_is_gathered_ahead() -> None:
    assert most_live(None, ORDERS) == 2 * UNIT


def test_reentrant_checkpointing_frees_and_reduces_units_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(Reducer, "end_unit", lambda self, unit: ended.append(unit) or [])
    assert most_live(0, [range(BLOCKS)] * 2, reentrant=True) == UNIT
    assert len(ended) == 2 * BLOCKS


def train_on_a_rank(orders: Sequence[Order], setup: Setup) -> list[Tensor]:
    torch.manual_seed(0)
    model = Ordered()
    session = driver.start(model, lambda m: torch.optim.AdamW(m.parameters(), lr=0.1), setup)
    for step, order in enumerate(orders):
        model.order = order
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        driver.run_step(session, [x, x], lambda model, x: model(x).square().sum())
    return list(driver.finish(session).weights.values())


@ranks(2, slow=(4,))
def test_neither_order_nor_limit_changes_a_bit(pool: RankPool) -> None:
    def run(**options: Any) -> list[list[Tensor]]:
        return pool.run(train_on_a_rank, ORDERS, Setup(**options))

    expected = run(stage=2)
    for options in ({}, {"max_live_numel": 0}, {"prefetch_mb": 2.5e-4 * UNIT}, {"persistence_numel": WIDTH}):
        for ours, theirs in zip(run(stage=3, **options), expected, strict=True):
            assert all(map(torch.equal, ours, theirs))


# ------------------------------------------------------------------------------------------------- small parameters


def test_small_parameters_stay_unsharded() -> None:
    session = start(persistence_numel=WIDTH)
    small = [p for p in session.model.parameters() if p.dim() == 1]
    assert len(small) == BLOCKS
    assert sum(bucket.shards_params for bucket in session.engine.buckets) == BLOCKS
    assert not any(bucket.shards_params for bucket in session.engine.buckets if bucket.parameters[0].dim() == 1)
    train(session, range(BLOCKS))
    assert all(bool(p.isfinite().all()) for p in small)  # readable at any time


def test_small_parameters_of_many_units_share_a_bucket() -> None:
    session = start(persistence_numel=WIDTH, bucket_size_mb=25)
    kept = [bucket for bucket in session.engine.buckets if not bucket.shards_params]
    assert [len(bucket.parameters) for bucket in kept] == [BLOCKS]


@ranks(2)
@pytest.mark.parametrize(
    "persistence", [13, *(pytest.param(numel, marks=pytest.mark.slow) for numel in (0, 40, 10**9))]
)
def test_training_with_small_parameters_kept_is_bitwise_equal(pool: RankPool, persistence: int) -> None:
    plain = Setup(3, persistence_numel=persistence)
    cases = [Case(setup, accumulate=2) for setup in (plain, dataclasses.replace(plain, offload=True))]
    cases += [Case(plain, model=model) for model in ("frozen", "checkpointed", "looped")]
    cases += [Case(dataclasses.replace(plain, precision=BF16), autocast=True, accumulate=2)]
    check_cases(pool, cases)


def evaluate_after_a_raw_step() -> bool:
    session = driver.start(
        Ordered(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), Setup(3, persistence_numel=WIDTH)
    )
    with torch.no_grad():
        session.model.blocks[2](torch.ones(2, WIDTH))
    driver.run_step(session, [torch.ones(2, WIDTH)], lambda model, x: model(x).sum())
    # A unit on its own reads what the step has made out of date.
    with torch.no_grad():
        alone = session.model.blocks[2](torch.ones(2, WIDTH))
    session.engine.release()
    return torch.equal(alone, session.model.blocks[2](torch.ones(2, WIDTH)))


def test_a_unit_that_runs_alone_sees_current_small_parameters(pool2: RankPool) -> None:
    assert all(pool2.run(evaluate_after_a_raw_step))
