"""What users do to optimizers while training: groups, state, rates, as under ddp."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import models
from helpers.ranks import RankError, RankPool, ranks
from strategy.fits import DDP, MOMENTUM, Lit, Recipe, assert_as_ddp, assert_same, assert_same_states, fit, main_names
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_zero import ZeroStrategy

Edit = Callable[["AtBatch2"], None]


class AtBatch2(Lit):
    """Does something to the optimizer before the third batch."""

    def __init__(self, recipe: Recipe, edit: Edit) -> None:
        super().__init__(recipe)
        self.edit = edit

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        if index == 2:
            self.edit(self)

    def configure_optimizers(self) -> Optimizer:
        if self.edit not in JOINING:
            return self.recipe.make_optimizer(self.model)
        return self.recipe.make_optimizer(self.model.blocks[0])


def add_group(lit: AtBatch2) -> None:
    rest = [p for name, p in lit.model.named_parameters() if "blocks.0" not in name]
    lit.trainer.optimizers[0].add_param_group({"params": rest, "lr": 0.05})


def extend_group(lit: AtBatch2) -> None:
    lit.trainer.optimizers[0].param_groups[0]["params"] += list(lit.model.blocks[1].parameters())


def exchange_groups(lit: AtBatch2) -> None:
    fresh = lit.recipe.make_optimizer(lit.model.blocks[1])
    forget_others(lit.trainer.optimizers[0], fresh.param_groups)


def drop_group(lit: AtBatch2) -> None:
    optimizer = lit.trainer.optimizers[0]
    forget_others(optimizer, optimizer.param_groups[:1])


def forget_others(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """torch's own `state_dict` fails where there is state of a parameter in no group."""
    kept = {id(p) for group in groups for p in group["params"]}
    for parameter in list(optimizer.state):
        if id(parameter) not in kept:
            del optimizer.state[parameter]
    optimizer.param_groups = groups


def change_rates(lit: AtBatch2) -> None:
    for group in lit.trainer.optimizers[0].param_groups:
        group["lr"] *= 0.25
        group["weight_decay"] = 0.01


def clear_state(lit: AtBatch2) -> None:
    lit.trainer.optimizers[0].state.clear()


def replace_state(lit: AtBatch2) -> None:
    lit.trainer.optimizers[0].state = defaultdict(dict)


def assign_state(lit: AtBatch2) -> None:
    state = lit.trainer.optimizers[0].state
    for parameter in lit.model.blocks[1].parameters():
        state[parameter] = {"momentum_buffer": torch.full(parameter.shape, 0.125)}


def load_partial_state(lit: AtBatch2) -> None:
    """The state of all but one parameter."""
    optimizer = lit.trainer.optimizers[0]
    groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    shapes = [[p.shape for p in g["params"]] for g in optimizer.param_groups]
    state, number = {}, 0
    for group, sizes in zip(groups, shapes, strict=True):
        group["params"] = list(range(number, number + len(sizes)))
        state |= {number + i: {"momentum_buffer": torch.full(s, 0.25)} for i, s in enumerate(sizes)}
        number += len(sizes)
    del state[1]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


JOINING = [add_group, extend_group, exchange_groups]
EDITS: list[Edit] = [
    *JOINING,
    drop_group,
    change_rates,
    clear_state,
    replace_state,
    assign_state,
    load_partial_state,
]


@ranks(2)
@main_names
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_edits_of_an_optimizer_count(pool: RankPool, name: str, edit: Edit) -> None:
    module = functools.partial(AtBatch2, edit=edit)
    expected, actual = pool.run(fit, DDP, MOMENTUM, module)[0], pool.run(fit, name, MOMENTUM, module)[0]
    assert_same(actual.weights, expected.weights)
    # ddp's state has indices for names.
    assert len(actual.optimizer_states[0]) == len(expected.optimizer_states[0])


@ranks(2)
@main_names
@pytest.mark.parametrize("edit", [clear_state, replace_state], ids=lambda edit: edit.__name__)
def test_cleared_state_counts_its_steps_anew(pool: RankPool, name: str, edit: Edit) -> None:
    recipe = Recipe(optimizer="rmsprop", steps=4)
    module = functools.partial(AtBatch2, edit=edit)
    expected, actual = pool.run(fit, DDP, recipe, module)[0], pool.run(fit, name, recipe, module)[0]
    assert_same(actual.weights, expected.weights)
    assert {float(state["step"]) for state in actual.optimizer_states[0].values()} == {2.0}


def read_state(lit: AtBatch2) -> None:
    optimizer = lit.trainer.optimizers[0]
    assert isinstance(lit.trainer.strategy, ZeroStrategy)
    assert not optimizer.state
    assert lit.model.norm.weight not in optimizer.state
    if lit.trainer.strategy.stage < 3:  # freed parameters cannot be copied
        assert type(copy.deepcopy(optimizer).state) is defaultdict
        assert type(pickle.loads(pickle.dumps(optimizer)).state) is defaultdict
    with pytest.raises(RuntimeError, match=r"trainer.strategy.optimizer_state\(optimizer\)"):
        optimizer.state[lit.model.norm.weight]["momentum_buffer"]


@ranks(2)
@main_names
def test_reading_sharded_state_says_what_to_do(pool: RankPool, name: str) -> None:
    plain = pool.run(fit, name, MOMENTUM)[0]
    read = pool.run(fit, name, MOMENTUM, functools.partial(AtBatch2, edit=read_state))[0]
    assert_same(read.weights, plain.weights)
    assert_same_states(read.optimizer_states[0], plain.optimizer_states[0])


# ---------------------------------------------------------------------------------------------- new parameters


class Grows(AtBatch2):
    """Has a parameter more from the third batch on."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = models.next_token_loss(self.model, batch)
        return loss + self.late.square().sum() if hasattr(self, "late") else loss


def grow(lit: AtBatch2) -> None:
    lit.late = nn.Parameter(torch.ones(3))
    lit.trainer.optimizers[0].add_param_group({"params": [lit.late]})


@ranks(2)
@main_names
def test_a_parameter_made_while_training_is_named(pool: RankPool, name: str) -> None:
    with pytest.raises(RankError, match=r"'late'.*joined Grows after.*configure_model") as caught:
        pool.run_within(10, fit, name, MOMENTUM, functools.partial(Grows, edit=grow))
    assert len(caught.value.failures) == 2


def join_foreign(lit: AtBatch2) -> None:
    lit.trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})


@ranks(2)
def test_a_parameter_of_no_module_is_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"shape \(3,\) that is not registered in AtBatch2"):
        pool.run_within(10, fit, "zero2", MOMENTUM, functools.partial(AtBatch2, edit=join_foreign))


# ------------------------------------------------------------------------------------------- several optimizers


class Overlapping(Lit):
    """Two optimizers over overlapping parameters, by turns."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer = self.optimizers()[index % 2]
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(models.next_token_loss(self.model, batch))
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        blocks = self.model.blocks
        first = SGD([*blocks[0].parameters(), *blocks[1].parameters()], lr=0.1, momentum=0.9)
        second = SGD([*blocks[1].parameters(), *self.model.norm.parameters()], lr=0.2, momentum=0.5)
        return [first, second]


@ranks(2)
@main_names
def test_optimizers_may_overlap(pool: RankPool, name: str) -> None:
    assert_as_ddp(pool, name, Overlapping)
