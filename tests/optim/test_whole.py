"""Optimizers that need whole parameters, over shards, against one plain process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.cases import Case, check_cases
from engine.driver import Setup, assert_equal, run_step, start
from helpers import models
from helpers.ranks import RankPool, ranks, slow_unless
from helpers.whole import OF_LIBRARIES, WHOLE, CountsSteps, Ruled
from torch import Tensor

from lightning_zero.sharding import Mesh

STAGES = (0, 1, 2, 3)
CLIP = 0.3


def sample(stage: int) -> list[Case]:
    """Every optimizer; every two settings meet in some case of some stage."""
    return [
        Case(
            Setup(stage, offload=(index + stage) % 2 == 0),
            optimizer,
            model=("transformer", "optional", "frozen")[(index + stage) % 3],
            accumulate=(1, 3)[(index // 2 + stage) % 2],
            clip_norm=(None, CLIP)[(index + index // 2 + stage // 2) % 2],
            # The factor of a clipped float64 gradient shows the order in which squares were added.
            dtype=(torch.float64, torch.float32)[(index + index // 2 + stage // 2) % 2],
            flagged=models.by_turns,
        )
        for index, optimizer in enumerate(WHOLE)
    ]


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_those_of_libraries_are_bitwise_equal(pool: RankPool, name: str) -> None:
    pytest.importorskip(name.partition(".")[0])
    check_cases(pool, [Case(Setup(stage, offload=stage > 1), name) for stage in STAGES])


@ranks(2)
@pytest.mark.parametrize("stage", slow_unless((1, 3), STAGES))
def test_optimizers_of_whole_parameters_are_bitwise_equal(pool: RankPool, stage: int) -> None:
    check_cases(pool, sample(stage))


@pytest.mark.slow
@ranks(1, 4)
def test_so_they_are_on_other_numbers_of_ranks(pool: RankPool) -> None:
    """A third of the cases: every optimizer at some stage, every stage with some of them."""
    check_cases(pool, [case for stage in STAGES for case in sample(stage)[-stage % 3 :: 3]])


class Assigns(Ruled):
    """Assigns `data`, as some of torch's old rules do."""

    def rule(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.data = parameter.data - group["lr"] * gradient * parameter.norm()


class Counts(CountsSteps):
    def rule(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        parameter.add_(gradient, alpha=-group["lr"] / self.calls)


@pytest.mark.parametrize("optimizer", [Assigns, Counts])
def test_data_may_be_assigned_and_steps_be_counted_in_attributes(optimizer: type[Ruled]) -> None:
    model, plain = models.make_model("mlp"), models.make_model("mlp")
    session = start(model, lambda m: optimizer(m.parameters()), Setup(2), Mesh.single())
    reference = optimizer(plain.parameters())
    for ((batch,),) in models.make_batches(3, 1, 1):
        run_step(session, [batch], settle=True)
        reference.zero_grad()
        models.next_token_loss(plain, batch).backward()
        reference.step()
    assert_equal(dict(model.named_parameters()), dict(plain.named_parameters()))


class WritesLate(Ruled):
    """Element-wise; begins to keep what it has seen of gradients in the group when no trial sees it, as SWATS."""

    def rule(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        if state["step"] >= 5:
            group["late"] = float(gradient.norm())
        parameter.add_(gradient, alpha=-group["lr"])


class CountsAndWritesLate(Counts):
    """The same beside a count, on whole parameters."""

    def rule(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        WritesLate.rule(self, parameter, gradient * parameter.norm(), state, group)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", [WritesLate, CountsAndWritesLate])
def test_what_is_written_outside_the_state_after_the_trial_is_an_error(optimizer: type[Ruled]) -> None:
    session = start(models.make_model("mlp"), lambda m: optimizer(m.parameters()), Setup(2), Mesh.single())
    *batches, ((last,),) = models.make_batches(5, 1, 1)
    for ((batch,),) in batches:
        run_step(session, [batch], settle=True)
    with pytest.raises(ValueError, match=rf"{optimizer.__name__} keeps state outside `state`.*changes 'late' in"):
        run_step(session, [last], settle=True)
