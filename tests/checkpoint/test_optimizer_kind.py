"""Another optimizer, or other groups, than a checkpoint was written with: what fits is loaded, the rest is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.resuming import Resumable, run, save_at_end
from helpers import models
from helpers.ranks import RankError, RankPool, ranks, slow_unless
from strategy.fits import Lit, Recipe, StrategyArgument, assert_same_states, make_trainer, observe
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from lightning_zero import CPUAdagrad, CPUAdam, CPUAdamW, CPULion
from lightning_zero.checkpoint.state import KIND
from lightning_zero.integration.advice import WEIGHTS_ALONE

RECIPE = Recipe(steps=2)
Make = Callable[[Any], Optimizer]


def momentum(parameters: Any) -> SGD:
    return SGD(parameters, momentum=0.9)


def amsgrad(parameters: Any) -> AdamW:
    return AdamW(parameters, amsgrad=True)


class Chosen(Resumable):
    """With any optimizer; `recorded` is whether a checkpoint that it loads says of which class its optimizer was."""

    make: Make = AdamW
    recorded = True

    def configure_optimizers(self) -> Optimizer:
        return type(self).make(self.parameters())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not self.recorded:
            for state in checkpoint["optimizer_states"]:
                del state[KIND]


def resume_from_each(
    strategy: StrategyArgument, pairs: list[tuple[Make, Make]], folder: str, recorded: bool, steps: int
) -> list[str]:
    """How loading ended for each writer and reader: "", or the error."""
    Chosen.recorded = recorded
    outcomes = []
    for number, (Chosen.make, reader) in enumerate(pairs):
        path = f"{folder}/{number}.ckpt"
        save_at_end(strategy, RECIPE, path, Chosen, max_epochs=-1, max_steps=steps)
        Chosen.make = reader
        try:
            resumed = run(strategy, RECIPE, Chosen, steps=steps + 2, resume=path)
        except ValueError as error:
            outcomes.append(str(error))
        else:
            assert resumed.steps == steps + 2
            outcomes.append("")
    return outcomes


FITTING: list[tuple[Make, Make]] = [
    (AdamW, CPUAdam),
    (CPUAdamW, Adam),
    (AdamW, amsgrad),  # the saved hyperparameters count
]
MORE_FITTING: list[tuple[Make, Make]] = [
    (Adam, AdamW),
    (amsgrad, CPUAdam),
    (RAdam, AdamW),
    (CPUAdagrad, Adagrad),
    (SGD, momentum),
    (momentum, SGD),
]
OTHER: list[tuple[Make, Make, str]] = [
    (AdamW, momentum, "AdamW keeps exp_avg, exp_avg_sq of model.tokens.weight, SGD keeps momentum_buffer;"),
    (AdamW, SGD, "SGD keeps no state;"),
    (AdamW, CPULion, "CPULion keeps exp_avg;"),
    (AdamW, Adagrad, "Adagrad keeps sum;"),
    (AdamW, RMSprop, "RMSprop keeps square_avg;"),
    (AdamW, NAdam, "NAdam keeps exp_avg, exp_avg_sq, mu_product;"),
    (momentum, AdamW, "SGD keeps momentum_buffer of model.tokens.weight, AdamW keeps exp_avg, exp_avg_sq;"),
    (CPULion, AdamW, "CPULion keeps exp_avg of"),
    (RMSprop, Adagrad, "RMSprop keeps square_avg of"),
]


@ranks(1)
@pytest.mark.parametrize(
    ("pairs", "recorded"),
    [(FITTING, False), pytest.param(MORE_FITTING, True, marks=pytest.mark.slow)],
    ids=["few", "more"],
)
def test_state_that_an_optimizer_can_use_is_loaded(
    pool: RankPool, pairs: list[tuple[Make, Make]], recorded: bool, tmp_path: Path
) -> None:
    assert pool.run(resume_from_each, "zero2_offload", pairs, str(tmp_path), recorded, 2) == [[""] * len(pairs)]


@ranks(1)
@pytest.mark.parametrize("recorded", slow_unless([True], [True, False]))
def test_state_of_another_kind_is_an_error_that_says_what_differs(
    pool: RankPool, recorded: bool, tmp_path: Path
) -> None:
    pairs = [(writer, reader) for writer, reader, _ in OTHER]
    ((*errors,),) = pool.run(resume_from_each, "zero2_offload", pairs, str(tmp_path), recorded, 2)
    for (writer, _, message), error in zip(OTHER, errors, strict=True):
        kind = "SGD" if writer is momentum else writer.__name__  # type: ignore[attr-defined]
        assert (message if recorded else message.replace(kind + " keeps", "wrote the checkpoint keeps", 1)) in error
        assert error.endswith(WEIGHTS_ALONE)


@ranks(1)
def test_before_the_first_step_hyperparameters_tell(pool: RankPool, tmp_path: Path) -> None:
    pairs: list[tuple[Make, Make]] = [(Adam, CPUAdamW), (SGD, AdamW), (AdamW, SGD)]
    ((fits, *errors),) = pool.run(resume_from_each, "zero3", pairs, str(tmp_path), True, 0)
    assert fits == ""
    assert errors[0].startswith("SGD has no betas, eps, which AdamW needs; configure the optimizer that was saved")
    assert errors[1].startswith("AdamW has no dampening, momentum, which SGD needs")


# ------------------------------------------------------------------------------------------------------- all or nothing


class Halves(Lit):
    """One optimizer for the blocks, one for the rest."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        self.manual_backward(models.next_token_loss(self.model, batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [AdamW(self.model.blocks.parameters()), AdamW(self.model.norm.parameters())]


def load_misfits(strategy: StrategyArgument) -> tuple[list[str], list[Any], list[Any]]:
    """The errors, and the optimizers' state and groups before and after."""
    lit, trainer = Halves(RECIPE), make_trainer(strategy)
    trainer.fit(lit)

    def seen() -> list[Any]:
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        return [observe(trainer, lit).optimizer_states, rates]

    before = seen()
    blocks, norm = (copy.deepcopy(trainer.strategy.optimizer_state(optimizer)) for optimizer in trainer.optimizers)
    for group in blocks["param_groups"]:
        group["lr"] = 7.0
    for state in blocks["state"].values():
        state["exp_avg"] += 1
    sums = {name: {"sum": state["exp_avg"]} for name, state in norm["state"].items()}
    renamed = [{**group, "params": ["model.scale", *group["params"][1:]]} for group in norm["param_groups"]]
    plain = AdamW(reversed([*RECIPE.make_model().blocks.parameters()]))
    for parameter in plain.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    errors = []
    for states in (
        [blocks, {**norm, "state": sums, KIND: "Adagrad"}],
        [blocks, {**norm, "param_groups": renamed}],
        [blocks, {**norm, "param_groups": norm["param_groups"] * 2}],
        [blocks],
        [plain.state_dict(), norm],  # as many parameters in another order, without names
    ):
        with pytest.raises(ValueError, match="configure") as caught:
            trainer.strategy.load_optimizer_state_dict({"optimizer_states": states})
        errors.append(str(caught.value))
    return errors, before, seen()


@ranks(1)
def test_what_does_not_fit_changes_nothing(pool: RankPool) -> None:
    ((errors, before, after),) = pool.run(load_misfits, "zero3")
    kind, renamed, groups, optimizers, shape = errors
    assert kind.startswith("Adagrad keeps sum of model.norm.weight, AdamW keeps exp_avg, exp_avg_sq;")
    assert "model.norm.weight, model.scale" in renamed
    assert groups.startswith("the checkpoint has 2 parameter groups for AdamW, which has 1;")
    assert optimizers.startswith("the checkpoint has 1 optimizers, the module 2;")
    assert "exp_avg of model.blocks.0.norm1.bias has shape (6, 13) in the checkpoint, the parameter (6,);" in shape
    assert all(error.endswith(WEIGHTS_ALONE) for error in errors)
    assert before[1] == after[1]
    for old, new in zip(before[0], after[0], strict=True):
        assert_same_states(new, old)


class OneGroup(Resumable):
    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters())


class OtherGroups(Resumable):
    def configure_optimizers(self) -> Optimizer:
        first, *rest = self.parameters()
        return AdamW([{"params": rest}, {"params": [first]}])


@ranks(2)
def test_other_groups_are_an_error_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    path, name = str(tmp_path / "a.ckpt"), "zero3_offload"
    pool.run(save_at_end, name, RECIPE, path)
    for module, message in (
        (OneGroup, "2 parameter groups for AdamW, which has 1"),
        (OtherGroups, "parameter group 0"),
    ):
        with pytest.raises(RankError, match=rf"ValueError: (the checkpoint has )?{message}") as caught:
            pool.run_within(10, run, name, RECIPE, module, steps=6, resume=path)
        assert WEIGHTS_ALONE in str(caught.value)
        assert len(caught.value.failures) == 2
