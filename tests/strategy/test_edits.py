"""What users write into parameters while training: values as under ddp, masters exact."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import models
from helpers.ranks import RankPool, ranks
from strategy.fits import (
    DDP,
    MOMENTUM,
    Lit,
    Recipe,
    StrategyArgument,
    assert_as_ddp,
    assert_same,
    fit,
    main_names,
    slow_unless,
)
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

from lightning_zero import CPUAdamW, gathered_parameters

OTHER = Recipe(seed=7)
Edit = Callable[["Edited"], None]


class Edited(Lit):
    """Makes an edit in one hook, at the second batch; at stage 3 that needs the context."""

    def __init__(self, recipe: Recipe, edit: Edit, hook: str = "on_train_batch_end", writeback: bool = False) -> None:
        super().__init__(recipe)
        self.other = [OTHER.make_model()]  # in a list: no submodule
        self.edit, self.hook, self.writeback = edit, hook, writeback

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        self.reach("on_train_batch_start", index)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.reach("on_before_optimizer_step", self.trainer.global_step)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
        self.reach("on_train_batch_end", index)

    def reach(self, hook: str, index: int) -> None:
        if hook == self.hook and index == 1:
            with gathered_parameters(self.model, writeback=self.writeback):
                self.edit(self)


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
        mine.lerp_(theirs, 0.25)
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
HIDDEN: list[Edit] = [from_vector, assign_data, write_data]
HOOKS = ["on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"]


@ranks(2)
@main_names
@pytest.mark.parametrize("edit", VISIBLE + HIDDEN, ids=lambda edit: edit.__name__)
def test_edits_count(pool: RankPool, name: str, edit: Edit) -> None:
    assert_as_ddp(pool, name, functools.partial(Edited, edit=edit, writeback=edit in HIDDEN))


@ranks(2)
@main_names
@pytest.mark.parametrize(("edit", "same"), [(round_to_half, round_in_place), (there_and_back, nothing)])
def test_a_module_may_change_its_dtype_and_back(pool: RankPool, name: str, edit: Edit, same: Edit) -> None:
    # ddp itself averages nothing any more once dtypes have changed.
    expected = pool.run(fit, DDP, MOMENTUM, functools.partial(Edited, edit=same))[0]
    actual = pool.run(fit, name, MOMENTUM, functools.partial(Edited, edit=edit, writeback=True))[0]
    assert_same(actual.weights, expected.weights)


@ranks(2)
@main_names
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("micro", slow_unless([2], [1, 2]))
def test_edits_count_in_every_hook(pool: RankPool, name: str, hook: str, micro: int) -> None:
    recipe = Recipe(optimizer="momentum", steps=4, micro=micro, dtype=torch.float64)
    module = functools.partial(Edited, edit=clamp, hook=hook)
    expected, actual = pool.run(fit, DDP, recipe, module)[0], pool.run(fit, name, recipe, module)[0]
    torch.testing.assert_close(actual.weights, expected.weights, rtol=1e-9, atol=1e-12)


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
    layout = "split"

    def configure_optimizers(self) -> Optimizer:
        return CPUAdamW(self.model.parameters(), lr=1e-2, master_layout=self.layout)


class SwapsWhole(SwapsSplit):
    layout = "fp32"


@ranks(2)
@main_names
@pytest.mark.parametrize("precision", slow_unless(["32-true", "bf16-mixed"], ["32-true", "bf16-mixed", "bf16-true"]))
def test_weights_come_back_exactly(pool: RankPool, name: StrategyArgument, precision: str) -> None:
    check_swaps(pool, name, Swaps, precision)


@ranks(2)
@pytest.mark.parametrize("name", slow_unless(["zero3_offload"], ["zero2_offload", "zero3_offload"]))
@pytest.mark.parametrize("module", [SwapsSplit, SwapsWhole])
def test_masters_of_cpu_optimizers_come_back_exactly(pool: RankPool, name: str, module: type[Lit]) -> None:
    check_swaps(pool, name, module, "bf16-true")


def check_swaps(pool: RankPool, name: StrategyArgument, module: type[Lit], precision: str) -> None:
    plain = pool.run(fit, name, MOMENTUM, module, precision=precision)[0]
    swapped = pool.run(fit, name, MOMENTUM, module, precision=precision, limit_val_batches=1, val_check_interval=1)[0]
    assert_same(swapped.weights, plain.weights)
    assert len(set(swapped.notes)) == MOMENTUM.steps
