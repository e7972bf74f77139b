"""What users write into parameters while training: values as under ddp, masters exact."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import models
from helpers.ranks import RankPool, ranks
from strategy.fits import (
    DDP,
    MOMENTUM,
    Fitted,
    Lit,
    Recipe,
    StrategyArgument,
    assert_close,
    assert_same,
    fit,
    main_names,
    main_names_and,
)
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

from lightning_zero import CPUAdamW, full_param, gathered_parameters

OTHER = Recipe(seed=7)
Edit = Callable[["Edited"], None]


class Edited(Lit):
    """Makes one edit after another, each at one batch, in one hook; at stage 3 that needs the context.

    Notes the weights after every batch.
    """

    def __init__(self, recipe: Recipe, edits: Sequence[Edit], hooks: Sequence[str] = ("on_train_batch_end",)) -> None:
        super().__init__(recipe)
        self.other = [OTHER.make_model()]  # in a list: no submodule
        self.edits, self.hooks = edits, hooks

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        self.reach("on_train_batch_start", index)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.reach("on_before_optimizer_step", self.trainer.global_step)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
        self.reach("on_train_batch_end", index)
        with gathered_parameters(self.model):
            self.notes.append({name: value.clone() for name, value in self.model.state_dict().items()})

    def reach(self, hook: str, index: int) -> None:
        number = index - 1
        if number in range(len(self.edits)) and hook == self.hooks[number % len(self.hooks)]:
            edit = self.edits[number]
            with gathered_parameters(self.model, writeback=edit in HIDDEN):
                edit(self)


@torch.no_grad()
def clamp(lit: Edited) -> None:
    for parameter in lit.model.parameters():
        parameter.clamp_(-0.2, 0.2)


def reset(lit: Edited) -> None:
    torch.manual_seed(3)
    for module in (lit.model.blocks[1].up, lit.model.blocks[0].norm1, lit.model.positions):
        module.reset_parameters()


def initialize(lit: Edited) -> None:
    torch.manual_seed(3)
    nn.init.xavier_uniform_(lit.model.blocks[0].qkv.weight)
    nn.init.zeros_(lit.model.blocks[0].project.bias)


def load_all(lit: Edited) -> None:
    lit.load_state_dict({f"model.{name}": value for name, value in lit.other[0].state_dict().items()})


def load_part(lit: Edited) -> None:
    lit.model.blocks[1].load_state_dict(lit.other[0].blocks[1].state_dict())


@torch.no_grad()
def copy_some(lit: Edited) -> None:
    for mine, theirs in zip(lit.model.blocks.parameters(), lit.other[0].blocks.parameters(), strict=True):
        mine.lerp_(theirs.to(mine.device), 0.25)
    lit.model.head.weight[1:3] = 0.5


def from_vector(lit: Edited) -> None:
    parameters = list(lit.model.parameters())
    vector_to_parameters(0.5 * parameters_to_vector(parameters).detach(), parameters)


def assign_data(lit: Edited) -> None:
    for mine, theirs in zip(lit.model.parameters(), lit.other[0].parameters(), strict=True):
        mine.data = theirs.data.clone()


def write_data(lit: Edited) -> None:
    for parameter in lit.model.parameters():
        parameter.data.mul_(0.5)


def round_to_half(lit: Edited) -> None:
    lit.model.half().float()


def there_and_back(lit: Edited) -> None:
    lit.model.to(torch.float64).to(torch.float32)


@torch.no_grad()
def round_in_place(lit: Edited) -> None:
    for parameter in lit.model.parameters():
        parameter.copy_(parameter.half())


def nothing(lit: Edited) -> None:
    pass


VISIBLE: list[Edit] = [clamp, reset, initialize, load_all, load_part, copy_some]
# These write what no version counter shows.
HIDDEN: list[Edit] = [from_vector, assign_data, write_data, round_to_half, there_and_back]
HOOKS = ["on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"]


def assert_same_after_every_batch(actual: Fitted, expected: Fitted, edits: Sequence[Edit]) -> None:
    for index, (mine, theirs) in enumerate(zip(actual.notes, expected.notes, strict=True)):
        differing = [name for name, value in theirs.items() if not torch.equal(mine[name], value)]
        made = [edit.__name__ for edit in edits[:index]]
        assert not differing, f"after batch {index}, with the edits {made}"
    assert_same(actual.weights, expected.weights)


@ranks(2)
@main_names
def test_edits_count(pool: RankPool, name: str) -> None:
    edits = [*VISIBLE, from_vector, assign_data, write_data]
    recipe = Recipe(optimizer="momentum", steps=len(edits) + 2)
    module = functools.partial(Edited, edits=edits)
    expected, actual = pool.run(fit, DDP, recipe, module)[0], pool.run(fit, name, recipe, module)[0]
    assert_same_after_every_batch(actual, expected, edits)


@ranks(2)
@main_names
def test_a_module_may_change_its_dtype_and_back(pool: RankPool, name: str) -> None:
    # ddp itself averages nothing any more once dtypes have changed.
    same, edits = [round_in_place, nothing], [round_to_half, there_and_back]
    expected = pool.run(fit, DDP, MOMENTUM, functools.partial(Edited, edits=same))[0]
    actual = pool.run(fit, name, MOMENTUM, functools.partial(Edited, edits=edits))[0]
    assert_same_after_every_batch(actual, expected, edits)


@ranks(2)
@main_names
def test_edits_count_in_every_hook(pool: RankPool, name: str) -> None:
    """The first between the micro-batches of a step, the second between its reduction and its update."""
    recipe = Recipe(optimizer="momentum", steps=4, micro=2, dtype=torch.float64)
    module = functools.partial(Edited, edits=[clamp] * len(HOOKS), hooks=HOOKS)
    expected, actual = pool.run(fit, DDP, recipe, module)[0], pool.run(fit, name, recipe, module)[0]
    for mine, theirs in zip([actual.weights, *actual.notes], [expected.weights, *expected.notes], strict=True):
        assert_close(mine, theirs)


# ------------------------------------------------------------------------------------- weights out and in again


class Swaps(Lit):
    """Shows validation an average of its own, and puts the weights back."""

    def on_validation_start(self) -> None:
        with gathered_parameters(self.model), torch.no_grad():
            self.backup = [parameter.clone() for parameter in self.model.parameters()]
            for parameter in self.model.parameters():
                parameter.mul_(0.75)

    def on_validation_end(self) -> None:
        with gathered_parameters(self.model), torch.no_grad():
            for parameter, value in zip(self.model.parameters(), self.backup, strict=True):
                parameter.copy_(value)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.notes.append(models.next_token_loss(self.model, batch).item())


class SwapsSplit(Swaps):
    def configure_optimizers(self) -> Optimizer:
        return CPUAdamW(self.model.parameters(), lr=1e-2, master_layout="split")


@ranks(2)
@main_names_and("precision", "bf16-mixed", "bf16-true")
def test_weights_come_back_exactly(pool: RankPool, name: StrategyArgument, precision: str) -> None:
    check_swaps(pool, name, Swaps, precision)


@ranks(2)
def test_masters_of_cpu_optimizers_come_back_exactly(pool: RankPool) -> None:
    check_swaps(pool, "zero3_offload", SwapsSplit, "bf16-true")


def check_swaps(pool: RankPool, name: StrategyArgument, module: type[Lit], precision: str) -> None:
    plain = pool.run(fit, name, MOMENTUM, module, precision=precision)[0]
    swapped = pool.run(fit, name, MOMENTUM, module, precision=precision, limit_val_batches=1, val_check_interval=1)[0]
    assert_same(swapped.weights, plain.weights)
    assert len(set(swapped.notes)) == MOMENTUM.steps


class Teaches(Lit):
    """A frozen copy of the model follows it by hand, by less in each step than 16 bits resolve."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.teacher = recipe.make_model().requires_grad_(False)
        self.notes = [{name: value.clone() for name, value in self.teacher.named_parameters()}]

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return super().training_step(batch, index) + 0 * models.next_token_loss(self.teacher, batch)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
        students = dict(self.model.named_parameters())
        for name, value in self.notes[0].items():
            value.mul_(0.999).add_(full_param(students[name]).to(value.device), alpha=0.001)
        with gathered_parameters(self, full_precision=True):
            for name, parameter in self.teacher.named_parameters():
                parameter.mul_(0.999).add_(students[name], alpha=0.001)
        if self.trainer.strategy.options.stage < 3:  # others are freed
            for parameter in self.teacher.parameters():
                seen = parameter.clone()
                assert torch.equal(seen, full_param(parameter).to(seen.dtype))


class TeachesInInferenceMode(Teaches):
    @torch.inference_mode()
    def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
        super().on_train_batch_end(outputs, batch, index)


@ranks(2)
@pytest.mark.parametrize("module", [Teaches, TeachesInInferenceMode])
@main_names_and("precision", "bf16-mixed", "bf16-true")
def test_an_average_by_hand_moves_at_full_precision(
    pool: RankPool, name: str, precision: str, module: type[Lit]
) -> None:
    fitted = pool.run(fit, name, MOMENTUM, module, precision=precision)[0]
    averaged = {name: fitted.weights[f"teacher.{name}"] for name in fitted.notes[0]}
    assert_same(averaged, fitted.notes[0])
    start = MOMENTUM.make_model().state_dict()
    assert all(0 < (value - start[name]).abs().max() < 0.01 for name, value in averaged.items())
