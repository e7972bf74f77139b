"""What users do to optimizers while training: groups, state, rates, as under ddp."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import models
from helpers.ranks import RankError, RankPool, ranks
from strategy.fits import (
    DDP,
    MOMENTUM,
    Lit,
    Recipe,
    assert_close,
    assert_same,
    assert_same_states,
    fit,
    main_names,
    optimizer_state,
    state_of,
)
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_zero import ZeroStrategy

Edit = Callable[["Edited"], None]


class Edited(Lit):
    """Does something to the optimizer before the third batch and each that follows, as long as there is something.

    Notes the weights after every batch, and for how many parameters there is state.
    """

    def __init__(self, recipe: Recipe, edits: Sequence[Edit]) -> None:
        super().__init__(recipe)
        self.edits = edits

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        for edit in self.edits[index - 2 : index - 1] if index >= 2 else ():
            edit(self)

    def on_train_batch_end(self, *_: Any) -> None:
        states = optimizer_state(self.trainer, self.trainer.optimizers[0])
        self.notes.append((state_of(self.trainer), len(states)))


class BeginsWithABlock(Edited):
    def configure_optimizers(self) -> Optimizer:
        return self.recipe.make_optimizer(self.model.blocks[0])


def add_group(lit: Edited) -> None:
    rest = [p for name, p in lit.model.named_parameters() if "blocks" not in name]
    lit.trainer.optimizers[0].add_param_group({"params": rest, "lr": 0.05})


def extend_group(lit: Edited) -> None:
    lit.trainer.optimizers[0].param_groups[0]["params"] += list(lit.model.blocks[1].parameters())


def exchange_groups(lit: Edited) -> None:
    fresh = lit.recipe.make_optimizer(lit.model.blocks[1])
    forget_others(lit.trainer.optimizers[0], fresh.param_groups)


def drop_group(lit: Edited) -> None:
    optimizer = lit.trainer.optimizers[0]
    forget_others(optimizer, optimizer.param_groups[:1])


def forget_others(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """torch's own `state_dict` fails where there is state of a parameter in no group."""
    kept = {id(p) for group in groups for p in group["params"]}
    for parameter in list(optimizer.state):
        if id(parameter) not in kept:
            del optimizer.state[parameter]
    optimizer.param_groups = groups


def change_rates(lit: Edited) -> None:
    for group in lit.trainer.optimizers[0].param_groups:
        group["lr"] *= 0.25
        group["weight_decay"] = 0.01


def clear_state(lit: Edited) -> None:
    lit.trainer.optimizers[0].state.clear()


def replace_state(lit: Edited) -> None:
    lit.trainer.optimizers[0].state = defaultdict(dict)


def assign_state(lit: Edited) -> None:
    state = lit.trainer.optimizers[0].state
    for parameter in lit.model.blocks[1].parameters():
        state[parameter] = {"momentum_buffer": torch.full(parameter.shape, 0.125)}


def load_partial_state(lit: Edited) -> None:
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


@ranks(2)
@main_names
def test_edits_of_an_optimizer_count(pool: RankPool, name: str) -> None:
    edits = [
        extend_group,
        add_group,
        change_rates,
        load_partial_state,
        assign_state,
        clear_state,
        replace_state,
        drop_group,
        exchange_groups,
    ]
    recipe = Recipe(optimizer="momentum", steps=len(edits) + 3)
    module = functools.partial(BeginsWithABlock, edits=edits)
    expected, actual = pool.run(fit, DDP, recipe, module)[0], pool.run(fit, name, recipe, module)[0]
    for index, ((mine, count), (theirs, expected_count)) in enumerate(zip(actual.notes, expected.notes, strict=True)):
        differing = [key for key, value in theirs.items() if not torch.equal(mine[key], value)]
        made = [edit.__name__ for edit in edits[: max(index - 1, 0)]]
        assert not differing, f"after batch {index}, with the edits {made}"
        assert count == expected_count, f"after batch {index}, with the edits {made}"


class Loads(Edited):
    """Loads state with more digits than the parameters have, and notes what there is of it then."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe, [load_digits])


def load_digits(lit: Edited) -> None:
    optimizer = lit.trainer.optimizers[0]
    groups, saved = [], {}
    for group in optimizer.param_groups:
        numbers = {len(saved) + number: parameter for number, parameter in enumerate(group["params"])}
        groups.append({**group, "params": [*numbers]})
        saved |= {n: {"momentum_buffer": torch.full(p.shape, 1 / 3 + n)} for n, p in numbers.items()}
    optimizer.register_load_state_dict_pre_hook(lambda _, loaded: {**loaded, "state": saved})
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    names = {id(parameter): name for name, parameter in lit.model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    found = optimizer_state(lit.trainer, optimizer)
    if lit.global_rank == 0:
        assert_same_states(found, dict(zip(order, saved.values(), strict=True)))


@ranks(2)
@main_names
def test_state_that_is_loaded_keeps_its_digits(pool: RankPool, name: str) -> None:
    """Also where parameters have 16 bits, to which torch converts it."""
    pool.run(fit, name, Recipe(optimizer="momentum", steps=3), Loads, precision="bf16-mixed")


def drop_some(optimizer: Optimizer, *_: Any) -> None:
    """Freezes by dropping gradients before the step, and makes one."""
    first, second, *rest = (parameter for group in optimizer.param_groups for parameter in group["params"])
    first.grad, second.grad = None, torch.full(second.shape, 0.25)
    for parameter in rest[::2]:
        parameter.grad = None


class Drops(Lit):
    """Steps by hand: torch calls these hooks before a closure, which brings new gradients."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        if index == 1:
            optimizer.optimizer.register_step_pre_hook(drop_some)
        self.manual_backward(models.next_token_loss(self.model, batch))
        optimizer.step()
        optimizer.zero_grad()


@ranks(2)
@main_names
def test_gradients_that_step_hooks_drop_are_not_used(pool: RankPool, name: str) -> None:
    recipe = Recipe(optimizer="momentum", steps=4)
    assert_same(pool.run(fit, name, recipe, Drops)[0].weights, pool.run(fit, DDP, recipe, Drops)[0].weights)


@ranks(2)
@main_names
@pytest.mark.parametrize("edit", [clear_state, replace_state], ids=lambda edit: edit.__name__)
def test_cleared_state_counts_its_steps_anew(pool: RankPool, name: str, edit: Edit) -> None:
    recipe = Recipe(optimizer="rmsprop", steps=4)
    module = functools.partial(Edited, edits=[edit])
    expected, actual = pool.run(fit, DDP, recipe, module)[0], pool.run(fit, name, recipe, module)[0]
    assert_same(actual.weights, expected.weights)
    assert {float(state["step"]) for state in actual.optimizer_states[0].values()} == {2.0}


def read_state(lit: Edited) -> None:
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
    read = pool.run(fit, name, MOMENTUM, functools.partial(Edited, edits=[read_state]))[0]
    assert_same(read.weights, plain.weights)
    assert_same_states(read.optimizer_states[0], plain.optimizer_states[0])


# ----------------------------------------------------------------------------------------- classes with own methods


class Own(Optimizer):
    """Its ``step`` needs a closure and takes a keyword; its ``zero_grad`` clears before every other step only."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})
        self.asked: list[bool] = []  # an object that Lightning's wrapper of the optimizer shares

    def step(self, closure: Callable[[], Any], *, factor: float = 1.0) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"] * factor)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.asked.append(set_to_none)
        if len(self.asked) % 2:
            super().zero_grad(set_to_none)


class PassesOn(SGD):
    """Its ``step`` and ``zero_grad`` name none of their arguments."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.asked: list[bool] = []

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.asked.append(True)
        super().zero_grad(*args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any], answer: str = "") -> str:  # type: ignore[override]
        super().load_state_dict(state_dict)
        return answer


class Doubles(SGD):
    """Changes what torch has loaded."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                if key in state_dict["state"]:
                    self.state[parameter]["momentum_buffer"] *= 2


class WithDoubles(Edited):
    def configure_optimizers(self) -> Optimizer:
        return Doubles(self.model.parameters())


def load_without_method(lit: Edited) -> None:
    """As code does that knows only torch's class; the method of ours is left out, and what it replaces."""
    optimizer = lit.trainer.optimizers[0]
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    state = {n: {"momentum_buffer": torch.full(p.shape, 0.5)} for n, p in enumerate(lit.model.parameters())}
    Optimizer.load_state_dict(optimizer, {"state": state, "param_groups": [{**group, "params": [*state]}]})


@ranks(2)
@main_names
def test_an_own_class_may_change_what_it_has_loaded(pool: RankPool, name: str) -> None:
    recipe = Recipe(steps=5)
    module = functools.partial(WithDoubles, edits=[load_partial_state, load_without_method])
    assert_same(pool.run(fit, name, recipe, module)[0].weights, pool.run(fit, DDP, recipe, module)[0].weights)


class WithOwn(Lit):
    def configure_optimizers(self) -> Optimizer:
        return Own(self.model.parameters())

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=closure, factor=0.25 * (index + 1))

    def on_train_end(self) -> None:
        self.notes = [len(self.trainer.optimizers[0].asked)]


class WithPassedOn(WithOwn):
    def configure_optimizers(self) -> Optimizer:
        return PassesOn(self.model.parameters())

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        if index % 2:
            optimizer.step(closure=closure)
        else:
            optimizer.optimizer.step(closure)

    def on_train_end(self) -> None:
        super().on_train_end()
        optimizer: Any = self.trainer.optimizers[0]
        (group,) = optimizer.param_groups
        loaded = {"state": {}, "param_groups": [{**group, "params": list(range(len(group["params"])))}]}
        self.notes.append(len(optimizer.load_state_dict(loaded, answer="taken")))


class WithOwnByHand(WithOwn):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = models.next_token_loss(self.model, batch)
            self.manual_backward(loss)
            return loss

        loss = optimizer.step(closure, factor=0.25 * (index + 1))
        self.notes.append(float(loss))
        with pytest.raises(TypeError, match="unknown"):
            optimizer.step(closure, unknown=1)

    def on_train_end(self) -> None:
        self.notes.append(len(self.trainer.optimizers[0].asked))


@ranks(2)
@main_names
@pytest.mark.parametrize("module", [WithOwn, WithPassedOn, WithOwnByHand])
def test_methods_of_an_own_class_are_called_as_they_are(pool: RankPool, name: str, module: Any) -> None:
    recipe = Recipe(steps=4, dtype=torch.float64)
    expected, actual = pool.run(fit, DDP, recipe, module)[0], pool.run(fit, name, recipe, module)[0]
    assert_close(actual.weights, expected.weights)
    assert actual.notes == pytest.approx(expected.notes, rel=1e-12)


# ---------------------------------------------------------------------------------------------- new parameters


class Grows(Edited):
    """Has a parameter more from the third batch on."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = models.next_token_loss(self.model, batch)
        return loss + self.late.square().sum() if hasattr(self, "late") else loss


def grow(lit: Edited) -> None:
    lit.late = nn.Parameter(torch.ones(3))
    lit.trainer.optimizers[0].add_param_group({"params": [lit.late]})


@ranks(2)
@main_names
def test_a_parameter_made_while_training_is_named(pool: RankPool, name: str) -> None:
    with pytest.raises(RankError, match=r"'late'.*joined Grows after.*configure_model") as caught:
        pool.run_within(10, fit, name, MOMENTUM, functools.partial(Grows, edits=[grow]))
    assert len(caught.value.failures) == 2


def join_foreign(lit: Edited) -> None:
    lit.trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})


@ranks(2)
def test_a_parameter_of_no_module_is_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"shape \(3,\) that is not registered in Edited"):
        pool.run_within(10, fit, "zero2", MOMENTUM, functools.partial(Edited, edits=[join_foreign]))
