"""Every kind of model in `zoo`, trained sharded, against plain PyTorch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from engine import driver, zoo
from engine.driver import Meshes, RankResult, Setup, assert_close, assert_equal
from helpers import models
from helpers.ranks import RankPool, ranks
from helpers.reference import Batches, Trained, train_reference
from torch import Tensor, nn

STAGES = (1, 2, 3)
STEPS = 4
MICRO = 2
OPTIMIZER = models.optimizer_factory("adamw")


def model_and_batches(name: str, world: int, seed: int = 0) -> tuple[nn.Module, Batches]:
    """In float64 where results are close only."""
    model = zoo.make(name, seed)
    if zoo.KINDS[name].exact:
        return model, zoo.make_batches(STEPS, MICRO, world)
    return model.double(), zoo.make_batches(STEPS, MICRO, world, torch.float64)


def train_kind(name: str, setups: Sequence[Setup]) -> list[tuple[RankResult, dict[str, Tensor]]]:
    """What training left with each set-up, and this rank's own buffers before it took rank 0's."""
    rank, meshes, results = dist.get_rank(), Meshes(), []
    for setup in setups:
        model, batches = model_and_batches(name, dist.get_world_size(), seed=rank)
        session = driver.start(model, OPTIMIZER, setup, meshes.of(setup))
        for step in batches:
            driver.run_step(session, [micro[rank] for micro in step], zoo.loss_of)
        own = zoo.own_buffers(session.model)
        session.engine.sync_buffers()
        results.append((driver.finish(session), own))
    return results


@functools.cache
def reference_of(name: str, world: int, reduce_each: bool) -> Trained:
    model, batches = model_and_batches(name, world)
    trained = train_reference(model, OPTIMIZER, batches, zoo.loss_of, reduce_each=reduce_each)
    # A parameter without elements has no state on any shard.
    state = {name: state for name, state in trained.optimizer_state.items() if trained.weights[name].numel()}
    return dataclasses.replace(trained, optimizer_state=state)


def check(pool: RankPool, name: str, stages: Sequence[int], offload: bool = False) -> None:
    setups = [Setup(stage, offload=offload, units=zoo.KINDS[name].units) for stage in stages]
    compare = assert_equal if zoo.KINDS[name].exact else assert_close
    for setup, per_rank in zip(setups, zip(*pool.run_within(20, train_kind, name, setups), strict=True), strict=True):
        expected = reference_of(name, pool.world_size, setup.stage >= 2)
        driver.assert_trained(driver.combine([result for result, _ in per_rank]), expected, compare)
        for (_, own), plain in zip(per_rank, expected.buffers, strict=True):
            compare(own, plain)


def moved(name: str, world: int) -> bool:
    """Whether training changed anything at all."""
    initial = zoo.make(name).state_dict()
    return any(not torch.equal(value, initial[key]) for key, value in reference_of(name, world, True).weights.items())


@pytest.mark.filterwarnings("ignore:LSTM with projections", "ignore:.*weight_norm. is deprecated")
@ranks(1, 2)
@pytest.mark.parametrize("name", zoo.KINDS)
def test_trains_as_in_torch(pool: RankPool, name: str) -> None:
    assert moved(name, pool.world_size)
    check(pool, name, STAGES)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections", "ignore:.*weight_norm. is deprecated")
@ranks(4)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", zoo.KINDS)
def test_trains_as_in_torch_on_more_ranks(pool: RankPool, name: str, offload: bool) -> None:
    check(pool, name, STAGES, offload)
