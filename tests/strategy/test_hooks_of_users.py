"""Hooks that users put on parameters, modules and optimizers: they see what ddp shows them, and what they do counts."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import models
from helpers.ranks import RankPool, ranks, slow_unless
from strategy.fits import DDP, MOMENTUM, Lit, Recipe, assert_as_ddp, assert_same, fit, fit_each, main_names
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.sharding import FreedParameter

moments = pytest.mark.parametrize("moment", slow_unless(["batch 1"], ["__init__", "batch 1"]))


class Hooked(Lit):
    """Registers its hooks at a moment: in `__init__`, `configure_optimizers`, `on_train_start`, or before a batch."""

    def __init__(self, recipe: Recipe, moment: str = "on_train_start") -> None:
        super().__init__(recipe)
        self.moment = moment
        self.reach("__init__")

    def configure_optimizers(self) -> Any:
        self.reach("configure_optimizers")
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        self.reach("on_train_start")

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        self.reach(f"batch {index}")

    def reach(self, moment: str) -> None:
        if moment == self.moment:
            self.register()

    def register(self) -> None:
        raise NotImplementedError


# --------------------------------------------------------------------------------------------- the table of the docs

TABLE = Path(__file__).resolve().parents[2] / "docs" / "own-code.md"


def rows() -> Iterator[tuple[list[str], bool]]:
    """The hooks of each row of the page's first table that a fit calls, and whether parameters are freed in them."""
    table = re.search(r"^\|.*?\n\n", TABLE.read_text(), re.MULTILINE | re.DOTALL)
    assert table is not None
    for line in table.group().splitlines():
        if line.startswith("| `"):
            hooks, weights = line.strip("| ").split(" | ")
            names = [name for name in re.findall(r"`(\w+)`", hooks) if name not in NEVER]
            if names:
                yield names, "freed" in weights


NEVER = (
    "on_exception",
    "state_dict",
    "prepare_data",
    "setup",
    "configure_model",
    "on_load_checkpoint",
    "test_step",
    "predict_step",
)


class Watching(Lit):
    """Notes in every hook whether a parameter is freed: one of a unit, in steps one that is outside of all."""

    def look(self, hook: str) -> None:
        in_step = hook in ("training_step", "validation_step")
        parameter = self.model.norm.weight if in_step else self.model.blocks[0].up.weight
        self.notes.append((hook, isinstance(parameter, FreedParameter)))


def watched(name: str) -> Any:
    own = getattr(Lit, name)

    def hook(self: Watching, *args: Any, **kwargs: Any) -> Any:
        if name != "optimizer_step":
            self.look(name)
        output = own(self, *args, **kwargs)
        if name == "optimizer_step":
            self.look(name)
        return output

    return hook


def watch(strategy: str) -> Any:
    listed = [name for names, _ in rows() for name in names]
    module = type("Watching", (Watching,), {name: watched(name) for name in listed})
    return fit(strategy, MOMENTUM, module, limit_val_batches=1, num_sanity_val_steps=1)


@ranks(2)
@pytest.mark.parametrize("name", ["zero3", "zero2"])
def test_hooks_see_the_weights_that_the_page_says(pool: RankPool, name: str) -> None:
    seen = dict(pool.run(watch, name)[0].notes)
    expected = {hook: freed and name == "zero3" for hooks, freed in rows() for hook in hooks}
    assert seen == {hook: freed for hook, freed in expected.items() if hook in seen}
    # Nothing is loaded here; see tests/checkpoint/test_loads_of_users.py.
    assert expected.keys() - seen.keys() <= {"on_save_checkpoint", "load_state_dict", "_load_from_state_dict"}


# --------------------------------------------------------------------------------------------------- gradients


def scale(gradient: Tensor) -> Tensor:
    """Another function on each rank, and not a linear one: the sum over ranks would show another value."""
    return gradient.clamp(-0.01, 0.02) * (1 + dist.get_rank())


class ScalesGradient(Hooked):
    """Changes each local gradient before it is accumulated."""

    def register(self) -> None:
        for parameter in self.model.parameters():
            parameter.register_hook(scale)


class ChangesGrad(Hooked):
    """Changes `grad` in place when it has been accumulated."""

    def register(self) -> None:
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self.change)

    def change(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(scale(parameter.grad))


class ReplacesGrad(ChangesGrad):
    """Puts another tensor into `grad`."""

    def change(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad = scale(parameter.grad)


class ComesAndGoes(ChangesGrad):
    """Registers its hooks for every batch anew."""

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        hook = self.change
        self.handles = [p.register_post_accumulate_grad_hook(hook) for p in self.model.parameters()]

    def on_train_batch_end(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()


@ranks(2)
@main_names
@pytest.mark.parametrize(
    ("module", "moment"),
    [
        (ScalesGradient, "batch 1"),
        (ComesAndGoes, "never"),
        (ReplacesGrad, "__init__"),
        pytest.param(ChangesGrad, "configure_optimizers", marks=pytest.mark.slow),
        pytest.param(ScalesGradient, "on_train_start", marks=pytest.mark.slow),
    ],
)
def test_hooks_change_local_gradients(pool: RankPool, name: str, moment: str, module: type[Hooked]) -> None:
    assert_as_ddp(pool, name, functools.partial(module, moment=moment))


class DropsGrad(ChangesGrad):
    """Gives up the gradients of one block, as if it had not been used."""

    def change(self, parameter: nn.Parameter) -> None:
        if any(parameter is own for own in self.model.blocks[1].parameters()):
            parameter.grad = None


class FrozenBlock(Lit):
    """What `DropsGrad` must come to."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model.blocks[1].requires_grad_(False)


@ranks(2)
@main_names
def test_a_hook_may_drop_a_gradient(pool: RankPool, name: str) -> None:
    expected = pool.run(fit, DDP, MOMENTUM, FrozenBlock)[0].weights
    module = functools.partial(DropsGrad, moment="__init__")
    assert_same(pool.run(fit, name, MOMENTUM, module)[0].weights, expected)


class Manual(ChangesGrad):
    def __init__(self, recipe: Recipe, moment: str) -> None:
        super().__init__(recipe, moment)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.go_backward(models.next_token_loss(self.model, batch))
        optimizer.step()

    def go_backward(self, loss: Tensor) -> None:
        self.manual_backward(loss)


class CallsBackward(Manual):
    def go_backward(self, loss: Tensor) -> None:
        loss.backward()


@ranks(2)
@main_names
@moments
def test_hooks_work_in_a_backward_that_user_code_calls(pool: RankPool, name: str, moment: str) -> None:
    # Lightning has ddp average only what `manual_backward` does.
    expected = pool.run(fit, DDP, MOMENTUM, functools.partial(Manual, moment=moment))[0].weights
    actual = pool.run(fit, name, MOMENTUM, functools.partial(CallsBackward, moment=moment))[0].weights
    assert_same(actual, expected)


# ------------------------------------------------------------------------------------------ modules, optimizers


class FullBackward(Hooked):
    """Notes, and changes, what goes backward through modules."""

    def register(self) -> None:
        for module in (
            self.model,
            self.model.blocks[0],
            self.model.blocks[1].up,
            self.model.norm,
            self.model.head,
        ):
            module.register_full_backward_pre_hook(self.note)
            module.register_full_backward_hook(self.double)

    def note(self, module: nn.Module, outgoing: tuple[Tensor | None, ...]) -> None:
        self.notes += [g.norm().item() for g in outgoing if g is not None]

    def double(self, module: nn.Module, incoming: Any, outgoing: Any) -> Any:
        return tuple(None if g is None else 2 * g for g in incoming)


@ranks(2)
@main_names
@moments
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_full_backward_hooks_change_what_goes_backward(pool: RankPool, name: str, moment: str) -> None:
    module = functools.partial(FullBackward, moment=moment)
    expected, actual = pool.run(fit, DDP, MOMENTUM, module), pool.run(fit, name, MOMENTUM, module)
    assert_same(actual[0].weights, expected[0].weights)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.notes == theirs.notes


class StepHooks(Hooked):
    """Decays the rate before a step, and clamps weights after it."""

    def register(self) -> None:
        optimizer = self.trainer.optimizers[0]
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5
        self.notes.append("before")

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.notes.append("after")
        with torch.no_grad():
            for parameter in self.model.norm.parameters():
                parameter.clamp_(-0.1, 0.9)


@ranks(2)
def test_step_hooks_of_optimizers(pool: RankPool) -> None:
    expected, actual = (pool.run(fit, name, MOMENTUM, StepHooks)[0] for name in (DDP, "zero2_offload"))
    assert_same(actual.weights, expected.weights)
    assert actual.notes == ["before", "after"] * MOMENTUM.steps


class ReadsNorms(Lit):
    """Asks for the norm, and clips, in every hook between backward and step."""

    hook = "on_after_backward"

    def on_after_backward(self) -> None:
        self.look("on_after_backward", self.optimizers())

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.look("on_before_optimizer_step", optimizer)

    def look(self, hook: str, optimizer: Any) -> None:
        if hook == self.hook:
            self.notes.append(self.trainer.strategy.grad_norm(optimizer))
            self.notes.append(self.trainer.strategy.clip_grad_norm_(optimizer, 0.3))
            self.notes.append(self.trainer.strategy.grad_norm(optimizer))


class ReadsNormsLate(ReadsNorms):
    hook = "on_before_optimizer_step"


@ranks(2)
@main_names
def test_norms_and_clipping_in_hooks(pool: RankPool, name: str) -> None:
    expected = pool.run(fit, DDP, MOMENTUM, Lit, gradient_clip_val=0.3)[0].weights
    modules = [ReadsNorms, ReadsNormsLate]
    for module, result in zip(modules, pool.run(fit_each, name, MOMENTUM, modules)[0], strict=True):
        torch.testing.assert_close(result.weights, expected, rtol=1e-5, atol=1e-7)
        for before, returned, after in zip(*[iter(result.notes)] * 3, strict=True):
            assert before == returned > 0.3, module
            assert after == pytest.approx(0.3, rel=1e-4), module
