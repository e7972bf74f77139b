"""Trainings that run on an engine and on the reference, many in one run of a rank pool."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import driver
from engine.driver import Compare, Meshes, RankResult, Setup, assert_equal
from helpers import models, place
from helpers.ranks import RankPool
from helpers.reference import Batches, Trained, train_reference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.sharding.partition import is_norm

STEPS = 3  # the first records the order of units, the second follows it, and the third is as all others
TIMEOUT = 30.0  # a lost collective hangs: it should cost less than the pool's own limit


def stages_on(*settings: tuple[int, int], slow: Sequence[tuple[int, int]] = ()) -> pytest.MarkDecorator:
    """Run a test that uses the fixture `pool` once per pair of a stage and a world size; `slow` ones are slow tests."""
    values = [pytest.param(world, stage, id=f"{world}ranks-{stage}") for stage, world in settings]
    values += [pytest.param(world, stage, id=f"{world}ranks-{stage}", marks=pytest.mark.slow) for stage, world in slow]
    return pytest.mark.parametrize(("pool", "stage"), values, indirect=["pool"])


# Gradients are kept whole at stages 0 and 1, parameters sharded at 3: the fast tests run with one of each kind.
every_stage = stages_on((1, 2), (3, 2), slow=[(0, 2), (2, 2)])
every_stage_and_rank = stages_on((1, 2), (3, 2), slow=[(0, 2), (2, 2), (3, 1)])


class Checkpointed(models.TinyTransformer):
    """A transformer that computes its blocks' activations again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class Looped(Checkpointed):
    """Each block runs twice, so that under reentrant checkpointing its gradients arrive twice."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in [*self.blocks, *self.blocks]:
            x = checkpoint(block, x, use_reentrant=True) if self.reentrant else block(x)
        return self.head(self.norm(x))


class Recursive(nn.Module):
    """A block that calls itself between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.WIDTH, models.WIDTH)
        self.second = nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        y = self.first(x).tanh()
        return self.second(self(y, depth - 1) if depth else y)


class SelfCalling(nn.Sequential):
    """Blocks that call themselves, between an embedding and a head."""

    def __init__(self) -> None:
        blocks = nn.Sequential(Recursive(), Recursive())
        super().__init__(nn.Embedding(models.VOCAB, models.WIDTH), blocks, nn.Linear(models.WIDTH, models.VOCAB))


class Alike(nn.Sequential):
    """Matrices of equal shape, large enough to be multiplied in batches on the host."""

    def __init__(self) -> None:
        blocks = [nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20)) for _ in range(3)]
        super().__init__(nn.Embedding(models.VOCAB, 20), *blocks, nn.Linear(20, models.VOCAB))


CONSTRUCTORS: dict[str, Callable[[], nn.Module]] = {
    **models.CONSTRUCTORS,
    "alike": Alike,
    "checkpointed": functools.partial(Checkpointed, reentrant=False),
    "reentrant": functools.partial(Checkpointed, reentrant=True),
    "looped": functools.partial(Looped, reentrant=False),
    "self_calling": SelfCalling,
    "looped_reentrant": functools.partial(Looped, reentrant=True),
}


def make_model(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """As `helpers.models.make_model`, with more models."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return CONSTRUCTORS[name]().to(dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """One training; `like` is the model of the reference, where that is another one."""

    setup: Setup
    optimizer: str = "adamw"
    model: str = "transformer"
    like: str | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    flagged: Callable[[int, int, int], bool] = models.never

    @property
    def loss_fn(self) -> Callable[[nn.Module, Tensor], Tensor]:
        return autocast_loss if self.autocast else models.next_token_loss

    def batches(self, world: int) -> Batches:
        return models.make_batches(STEPS, self.accumulate, world, flagged=self.flagged)


def autocast_loss(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast(place.device().type, dtype=torch.bfloat16):
        return models.next_token_loss(model, batch)


def train_cases(cases: Sequence[Case]) -> list[RankResult]:
    """On every rank; only rank 0 has the reference's initial weights."""
    meshes, rank = Meshes(), dist.get_rank()
    return [train_case(case, meshes, rank) for case in cases]


def train_case(case: Case, meshes: Meshes, rank: int) -> RankResult:
    return driver.train(
        make_model(case.model, dtype=case.dtype, seed=rank),
        models.optimizer_factory(case.optimizer),
        [[micro[rank] for micro in step] for step in case.batches(dist.get_world_size())],
        case.setup,
        meshes.of(case.setup),
        loss_fn=case.loss_fn,
        clip_norm=case.clip_norm,
        clip_value=case.clip_value,
    )


def reference_of(case: Case, world: int) -> Trained:
    """What `case` must give on `world` ranks."""
    # What the reference does not depend on must not multiply its runs.
    setup = Setup(
        stage=2 if case.setup.stage >= 2 else 1, precision=case.setup.precision, shard_size=case.setup.shard_size
    )
    return _reference_of(dataclasses.replace(case, setup=setup, model=case.like or case.model), world)


@functools.cache
def _reference_of(case: Case, world: int) -> Trained:
    precision = case.setup.precision
    low = precision.param_dtype
    return train_reference(
        make_model(case.model, dtype=case.dtype),
        models.optimizer_factory(case.optimizer),
        case.batches(world),
        case.loss_fn,
        reduce_each=case.setup.stage >= 2,
        clip_norm=case.clip_norm,
        clip_value=case.clip_value,
        cast=None if low is None else functools.partial(cast, dtype=low, keep_norms=precision.keep_norms),
        reduce_dtype=precision.reduce_dtype,
        grad_dtype=precision.grad_dtype,
        shard_size=case.setup.shard_size,
    )


def cast(model: nn.Module, dtype: torch.dtype, keep_norms: bool) -> nn.Module:
    for module in model.modules():
        if not (keep_norms and is_norm(module)):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    return model


def run_cases(pool: RankPool, cases: Sequence[Case]) -> list[Trained]:
    """The ranks' common result of each case."""
    per_rank = pool.run_within(TIMEOUT, train_cases, cases)
    return [driver.combine(results) for results in zip(*per_rank, strict=True)]


def check_cases(pool: RankPool, cases: Sequence[Case], compare: Compare = assert_equal) -> None:
    """Every case gives the reference's result; all that do not are listed."""
    wrong: list[str] = []
    for case, trained in zip(cases, run_cases(pool, cases), strict=True):
        expected = reference_of(case, pool.world_size)
        try:
            driver.assert_trained(trained, expected, compare)
            if case.clip_norm is not None:
                assert trained.norms == pytest.approx(expected.norms, rel=1e-12 if compare is assert_equal else 1e-6)
                assert min(expected.norms) > case.clip_norm, "this case clips nothing"
        except AssertionError as error:
            wrong.append(f"{describe(case)}: {str(error)[:500]}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)} cases", *wrong[:5]])


def describe(value: Any) -> str:
    """The fields that differ from their defaults."""
    parts = []
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        if dataclasses.is_dataclass(given):
            parts.append(describe(given))
        elif given != field.default:
            parts.append(f"{field.name}={getattr(given, '__name__', given)}")
    return ", ".join(filter(None, parts))
