"""Parameters that get no gradient: on a rank, in a micro-batch, in a step, or ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from engine import driver
from engine.cases import STEPS, Case, check_cases, every_stage, every_stage_and_rank, make_model, run_cases, stages_on
from engine.driver import Meshes, RankResult, Setup, assert_close
from helpers import models
from helpers.ranks import RankPool, ranks
from helpers.reference import train_reference
from torch import Tensor, nn

STAGES = (0, 1, 2, 3)
ADAPTER = "blocks.1.adapter.weight"
Flagged = Callable[[int, int, int], bool]

PATTERNS: list[Flagged] = [
    models.never,
    models.always,
    models.not_on_rank_0,
    models.only_in_step_1,
    models.not_in_step_1,
    models.by_turns,
]


def optional(setup: Setup, flagged: Flagged, optimizer: str = "adamw", **options: object) -> Case:
    return Case(setup, optimizer, "optional", flagged=flagged, **options)  # type: ignore[arg-type]


@stages_on((3, 2), slow=[(1, 2), (2, 4)])
def test_parameters_move_exactly_when_some_rank_uses_them(pool: RankPool, stage: int) -> None:
    setup = Setup(stage, offload=stage > 1)
    cases = [optional(setup, flagged) for flagged in PATTERNS]
    cases += [optional(setup, flagged, "momentum", accumulate=3) for flagged in PATTERNS]
    cases += [optional(setup, models.by_turns, optimizer, clip_norm=0.3) for optimizer in ("adagrad", "rmsprop")]
    check_cases(pool, cases)


@every_stage
@pytest.mark.parametrize("native", ["off", "auto"])
def test_an_unused_parameter_stands_still(pool: RankPool, stage: int, native: driver.NativeOptimizer) -> None:
    """Weights, moments and `step`, whatever the weight decay."""
    setup = Setup(stage, offload=True, native=native)
    flags = (models.never, models.only_in_step_1, models.always)
    trained = run_cases(pool, [optional(setup, flagged) for flagged in flags])
    initial = make_model("optional").state_dict()[ADAPTER]
    unused, once, used = trained
    assert torch.equal(unused.weights[ADAPTER], initial)
    assert ADAPTER not in unused.optimizer_state
    assert float(once.optimizer_state[ADAPTER]["step"]) == 1
    assert float(used.optimizer_state[ADAPTER]["step"]) == STEPS


@every_stage_and_rank
def test_frozen_parameters_are_left_alone(pool: RankPool, stage: int) -> None:
    cases = [Case(Setup(stage), optimizer, "frozen", accumulate=2) for optimizer in ("adamw", "momentum")]
    check_cases(pool, cases)


class Branches(nn.Module):
    """Sums linear maps in an order that the rank chooses; gradients become ready in the reverse order."""

    def __init__(self, order: Sequence[int] = (0, 1, 2, 3)) -> None:
        super().__init__()
        self.order = tuple(order)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = x + self.branches[index](x * (index + 1))
        return x * self.scale


def branches(order: Sequence[int] = (0, 1, 2, 3)) -> Branches:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Branches(order).double()


def square_loss(model: nn.Module, batch: Tensor) -> Tensor:
    if isinstance(model, Branches):
        model.order = ORDERS[int(batch[0, 4])]
    return model(batch[:, :4]).square().sum()


ORDERS = ((0, 1, 2, 3), (2, 0, 3, 1), (1, 3), (3,))


def branch_batches(world: int) -> list[list[list[Tensor]]]:
    """The last column says which order a rank takes; ranks differ in every step."""
    generator = torch.Generator().manual_seed(0)

    def batch(step: int, rank: int) -> Tensor:
        values = torch.randn(2, 5, generator=generator, dtype=torch.float64)
        values[:, 4] = (step + rank) % len(ORDERS)
        return values

    return [[[batch(step, rank) for rank in range(world)]] for step in range(4)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train_branches(stage: int, settle: bool) -> RankResult:
    rank, setup = dist.get_rank(), Setup(stage, bucket_size_mb=1e-5)
    batches = [[micro[rank] for micro in step] for step in branch_batches(dist.get_world_size())]
    mesh = Meshes().of(setup)
    return driver.train(branches(), sgd, batches, setup, mesh, loss_fn=square_loss, settle=settle)


def check_branches(pool: RankPool, stage: int, *, settle: bool) -> None:
    trained = driver.combine(pool.run_within(10, train_branches, stage, settle))
    expected = train_reference(branches(), sgd, branch_batches(pool.world_size), square_loss, reduce_each=stage >= 2)
    assert_close(trained.weights, expected.weights)


@ranks(4, slow=(2,))
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_may_become_ready_in_any_order(pool: RankPool, stage: int) -> None:
    """Some ranks skip branches too, so that their buckets are complete only at the flush."""
    check_branches(pool, stage, settle=True)


@ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_units_may_be_entered_in_any_order(pool: RankPool, stage: int) -> None:
    """What the last step made stale is gathered in one order, whichever unit a rank enters first, or never."""
    check_branches(pool, stage, settle=False)


class TwoUses(nn.Module):
    """One unit whose first layer is used once more by flagged batches, under reentrant checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor, again: bool) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.second(checkpoint(self.first, x, use_reentrant=True))
        return checkpoint(self.first, x, use_reentrant=True) if again else x


def two_uses() -> TwoUses:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return TwoUses().double()


def two_uses_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch.clone().requires_grad_(), bool(batch[0, 0] > 0)).square().sum()


def two_uses_batches(world: int) -> list[list[list[Tensor]]]:
    """Rank 0 uses the layer once, the others twice."""
    generator = torch.Generator().manual_seed(0)

    def batch(rank: int) -> Tensor:
        values = torch.randn(2, 4, generator=generator, dtype=torch.float64)
        values[0, 0] = 1.0 if rank else -1.0
        return values

    return [[[batch(rank) for rank in range(world)]] for _ in range(3)]


def train_two_uses(stage: int) -> RankResult:
    rank, setup = dist.get_rank(), Setup(stage)
    batches = [[micro[rank] for micro in step] for step in two_uses_batches(dist.get_world_size())]
    return driver.train(two_uses(), sgd, batches, setup, Meshes().of(setup), loss_fn=two_uses_loss)


@ranks(2)
def test_gradients_may_arrive_again_on_some_ranks_only(pool: RankPool) -> None:
    trained = driver.combine(pool.run_within(10, train_two_uses, 2))
    batches = two_uses_batches(pool.world_size)
    expected = train_reference(two_uses(), sgd, batches, two_uses_loss, reduce_each=True)
    assert_close(trained.weights, expected.weights)
