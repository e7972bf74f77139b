"""What moves activations, on the CPU's own memory, where torch compiles; `device/test_activations.py` has the rest."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import models
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_zero.engine.activations import (
    ActivationLimits,
    ActivationOffload,
    NoOffload,
    PinnedCopies,
    make_activations,
)
from lightning_zero.storage import InlineExecutor, make_executor

CPU = torch.device("cpu")


def make_offload(limits: ActivationLimits) -> tuple[ActivationOffload, PinnedCopies]:
    copies = PinnedCopies(CPU, InlineExecutor())
    return ActivationOffload(CPU, copies, limits), copies


@pytest.mark.slow
def test_compiled_modules_compute_the_same() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    offload, copies = make_offload(ActivationLimits(0, 0))
    x = torch.rand(5, 6)
    for _ in range(2):  # graphs are made in the first
        model(x).square().sum().backward()
        with offload.saving():
            loss = checkpoint(compiled, x, use_reentrant=False).exp().sum() * 0 + compiled(x).square().sum()
        loss.backward()
        offload.end_backward()
    assert copies.nbytes > x.nbytes
    for ours, theirs in zip(compiled.parameters(), model.parameters(), strict=True):
        assert ours.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_on_cpu_ranks_nothing_moves() -> None:
    limits = ActivationLimits(0)
    assert isinstance(make_activations(CPU, make_executor(CPU, overlap=True), limits, list), NoOffload)


@pytest.mark.parametrize("enabled", [True, False])
def test_only_forwards_that_are_differentiated_save(enabled: bool) -> None:
    offload, copies = make_offload(ActivationLimits(0))
    with torch.set_grad_enabled(enabled), offload.saving():
        models.make_model("mlp")(torch.zeros(2, 3, dtype=torch.long))
    assert bool(copies.nbytes) is enabled


def test_hooks_of_the_users_come_first() -> None:
    seen: list[Tensor] = []
    offload, copies = make_offload(ActivationLimits(0))
    x = torch.rand(5, requires_grad=True)
    with offload.saving(), torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        x.exp().sin().sum().backward()
    assert seen
    assert not copies.nbytes
