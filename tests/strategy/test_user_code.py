"""What user code does to optimizers, gradients, weights and Trainers between the steps: as it would be under ddp.

Two ranks: the sum of two gradients has one order, so ddp is the reference bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import models
from helpers.ranks import RankPool, ranks
from strategy.fits import Fitted, Lit, Recipe, assert_same, every_name, fit, make_trainer, observe, state_of
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

MOMENTUM = Recipe(optimizer="momentum", steps=4)
DDP = "ddp_find_unused_parameters_true"


def assert_as_ddp(pool: RankPool, name: str, module: type[Lit], recipe: Recipe = MOMENTUM, **flags: Any) -> None:
    expected, actual = pool.run(fit, DDP, recipe, module, **flags), pool.run(fit, name, recipe, module, **flags)
    assert_same(actual[0].weights, expected[0].weights)


# ---------------------------------------------------------------------------------------------------- clipping


class TwoClipped(Lit):
    """Both optimizers are clipped before the first steps; each clears its own gradients in between."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(models.next_token_loss(self.model, batch))
        for optimizer in (first, second):
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        first.step()
        first.zero_grad()
        second.step()
        second.zero_grad()

    def configure_optimizers(self) -> list[Optimizer]:
        body = [p for name, p in self.model.named_parameters() if "blocks" in name]
        rest = [p for name, p in self.model.named_parameters() if "blocks" not in name]
        return [SGD(body, lr=0.5), SGD(rest, lr=0.5)]


class PartlyCleared(Lit):
    """Gradients of one part are dropped after clipping."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(models.next_token_loss(self.model, batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        self.model.blocks[1].zero_grad()
        optimizer.step()


@ranks(2)
@every_name
@pytest.mark.parametrize("module", [TwoClipped, PartlyCleared])
def test_clipping_outlives_the_clearing_of_other_gradients(pool: RankPool, name: str, module: type[Lit]) -> None:
    # ddp clips by a factor of its own rounding: the norm's squares are added in another order.
    expected, actual = pool.run(fit, DDP, MOMENTUM, module), pool.run(fit, name, MOMENTUM, module)
    torch.testing.assert_close(actual[0].weights, expected[0].weights, rtol=1e-5, atol=1e-7)


# ------------------------------------------------------------------------------------------------------- edits


class ClampsData(Lit):
    """The weight clipping of the first Wasserstein GANs."""

    saves: str | None = None

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        if self.saves:
            self.trainer.save_checkpoint(self.saves)


class FillsData(Lit):
    def on_train_start(self) -> None:
        for parameter in self.model.parameters():
            parameter.data.fill_(0.25)


@ranks(2)
@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero1_offload", "zero2_offload"])
@pytest.mark.parametrize("module", [ClampsData, FillsData])
def test_edits_through_data_are_kept(pool: RankPool, name: str, module: type[Lit]) -> None:
    assert_as_ddp(pool, name, module)


@ranks(2)
@pytest.mark.parametrize("name", ["zero1", "zero2_offload"])
def test_edits_through_data_reach_the_masters_of_16_bit_parameters(pool: RankPool, name: str) -> None:
    recipe = Recipe(optimizer="sgd", options={"lr": 1e-9})
    weights = pool.run(fit, name, recipe, FillsData, precision="bf16-true")[0].weights
    # A master that bf16 rounds to 0.25 keeps its digits.
    assert all(torch.equal(value.bfloat16(), torch.full_like(value, 0.25).bfloat16()) for value in weights.values())


def fit_clamping(name: str, path: str | None) -> dict[str, Tensor]:
    lit = ClampsData(MOMENTUM)
    lit.saves = path
    trainer = make_trainer(name)
    trainer.fit(lit)
    return observe(trainer, lit).weights


@ranks(2)
@pytest.mark.parametrize("name", ["zero2", "zero2_offload"])
def test_saving_a_checkpoint_changes_nothing(pool: RankPool, name: str, tmp_path: Path) -> None:
    saved, unsaved = (pool.run(fit_clamping, name, path)[0] for path in (str(tmp_path / "a.ckpt"), None))
    assert_same(saved, unsaved)


class RawStep(Lit):
    """Steps torch's optimizer itself, and edits the weights right after."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(models.next_token_loss(self.model, batch))
        optimizer.step()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.clamp_(-0.1, 0.1)


@ranks(2)
@pytest.mark.parametrize("name", ["zero0", "zero1", "zero2", "zero1_offload", "zero2_offload"])
def test_edits_right_after_a_raw_step_are_kept(pool: RankPool, name: str) -> None:
    assert_as_ddp(pool, name, RawStep)


class InPlace(nn.Module):
    """Blocks whose outputs are views, changed in place by what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(models.VOCAB, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3))
        self.head = nn.Linear(6, models.VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            y = block(x)
            y += x
            x = y.relu_()
        return self.head(x)


class InPlaceLit(Lit):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        torch.manual_seed(0)
        self.model = InPlace()


@ranks(2)
@every_name
def test_outputs_of_blocks_may_be_changed_in_place(pool: RankPool, name: str) -> None:
    assert_as_ddp(pool, name, InPlaceLit)


# -------------------------------------------------------------------------------------------------- optimizers


class Mixed(Lit):
    """Groups that keep different state."""

    def configure_optimizers(self) -> Optimizer:
        body = [p for name, p in self.model.named_parameters() if "blocks" in name]
        rest = [p for name, p in self.model.named_parameters() if "blocks" not in name]
        return SGD([{"params": rest, "momentum": 0.0}, {"params": body, "momentum": 0.9}], lr=0.1)


@ranks(2)
@every_name
def test_groups_may_keep_different_state(pool: RankPool, name: str, tmp_path: Path) -> None:
    expected, actual = pool.run(fit, DDP, MOMENTUM, Mixed), pool.run(fit, name, MOMENTUM, Mixed)
    assert_same(actual[0].weights, expected[0].weights)
    states, weights = actual[0].optimizer_states[0], actual[0].weights
    assert {n for n in states if "momentum_buffer" in states[n]} == {n for n in weights if "blocks" in n}
    for n, state in states.items():
        assert all(value.shape == weights[n].shape for value in state.values() if isinstance(value, Tensor)), n


class Reuses(Lit):
    """Returns the same optimizer in every fit."""

    kept: Optimizer | None = None

    def configure_optimizers(self) -> Optimizer:
        if self.kept is None:
            self.kept = self.recipe.make_optimizer(self.model)
        return self.kept


def fit_twice(name: str) -> dict[str, Tensor]:
    lit = Reuses(MOMENTUM)
    trainer = make_trainer(name)
    trainer.fit(lit)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(lit)
    return state_of(trainer)


@ranks(2)
@every_name
def test_the_same_optimizer_goes_on_in_a_second_fit(pool: RankPool, name: str) -> None:
    assert_same(pool.run(fit_twice, name)[0], pool.run(fit_twice, DDP)[0])


class Swaps(Lit):
    """Trains one half, then as many parameters of the other."""

    def on_train_epoch_start(self) -> None:
        group = self.optimizers().param_groups[0]
        group["params"] = list(self.model.blocks[self.current_epoch].parameters())

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.model.blocks[0].parameters(), lr=0.1)


@ranks(2)
@every_name
def test_a_groups_parameters_may_be_exchanged(pool: RankPool, name: str) -> None:
    assert_as_ddp(pool, name, Swaps, max_epochs=2)


@ranks(1)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam], ids=lambda m: m.__name__)
def test_fused_optimizers_train(pool: RankPool, make: Any) -> None:
    weights = [pool.run(fit_fused, name, make)[0].weights for name in ("auto", "zero1", "zero3")]
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-6, atol=1e-7)


def fit_fused(name: str, make: Any) -> Fitted:
    class Fused(Lit):
        def configure_optimizers(self) -> Optimizer:
            return make(self.model.parameters(), lr=0.01, fused=True)

    return fit(name, Recipe(), Fused)


# ----------------------------------------------------------------------------------------------- two Trainers


def save_after_another(name: str, path: str) -> None:
    lit = Lit(MOMENTUM)
    first, second = make_trainer(name), make_trainer(name)
    first.fit(lit)
    second.test(lit, verbose=False)
    first.save_checkpoint(path)


@ranks(2)
@every_name
def test_a_trainer_that_lost_its_module_says_so_when_it_saves(pool: RankPool, name: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="another Trainer has taken over this module"):
        pool.run(save_after_another, name, str(tmp_path / "a.ckpt"))
    assert not (tmp_path / "a.ckpt").exists()


def save_after_release(path: str) -> None:
    trainer = make_trainer("zero2")
    trainer.fit(Lit(MOMENTUM))
    trainer.strategy.release()
    trainer.save_checkpoint(path)


@ranks(2)
def test_saving_after_release_says_what_to_do(pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="Save checkpoints and read optimizer state before the release"):
        pool.run(save_after_release, str(tmp_path / "a.ckpt"))
