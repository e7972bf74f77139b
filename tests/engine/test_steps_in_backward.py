"""Optimizers that step inside a backward, in hooks of parameters, as in PyTorch's tutorial on memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import driver
from engine.driver import Setup
from helpers import place
from helpers.ranks import RankPool, ranks
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_zero import full_grad
from lightning_zero.engine import Engine
from lightning_zero.update import make_updater

Act = Callable[[Engine, torch.optim.Optimizer, Parameter], Any]
ACTS: dict[str, Act] = {
    "a step": lambda engine, optimizer, parameter: optimizer.step(),
    "full_grad": lambda engine, optimizer, parameter: full_grad(parameter),
    "a norm": lambda engine, optimizer, parameter: engine.grad_norm(optimizer),
}


def make_model() -> nn.Module:
    """Units of two layers: the backward of the first one follows what the hooks of the second one do."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2)]
    return nn.Sequential(*blocks).double()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2 * step + rank))


def train(stage: int, act: str, raw: bool) -> dict[str, Tensor]:
    """Two steps of one optimizer per parameter, each made in the parameter's hook; the weights."""
    model = place.placed(make_model())
    optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}
    engine = driver.make_engine(model, Setup(stage), optimizers=list(optimizers.values()))
    engine.attach([make_updater(optimizer, engine, "auto") for optimizer in optimizers.values()])

    def hook(parameter: Parameter) -> None:
        ACTS[act](engine, optimizers[parameter], parameter)
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for step in range(2):
        with engine.forward_context():
            loss = model(place.placed(batch(step, dist.get_rank()))).square().sum()
        if raw:
            loss.backward()
        else:
            driver.backward(engine, loss)
    engine.settle()
    return driver.copy_of_parameters(engine)


@ranks(2)
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_optimizers_may_step_in_hooks_of_their_parameters(pool: RankPool, stage: int, raw: bool) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(2):
        losses = [model(batch(step, rank)).square().sum() for rank in range(pool.world_size)]
        optimizer.zero_grad()
        (torch.stack(losses).sum() / pool.world_size).backward()
        optimizer.step()
    for weights in pool.run(train, stage, "a step", raw):
        torch.testing.assert_close(weights, {name: value.detach() for name, value in model.named_parameters()})


def refused(act: str, raw: bool) -> None:
    with pytest.raises(RuntimeError, match=r"inside a backward.*Call it after the backward"):
        train(3, act, raw)


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("act", ACTS)
def test_what_would_free_parameters_that_backward_reads_is_refused(pool2: RankPool, act: str, raw: bool) -> None:
    pool2.run(refused, act, raw)
