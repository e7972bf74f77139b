"""What user code does to optimizers, gradients, weights and Trainers between the steps: as it would be under ddp.

Two ranks: the sum of two gradients has one order, so ddp is the reference bit for bit.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers import models
from helpers.ranks import RankPool, ranks
from strategy.fits import (
    DDP,
    MOMENTUM,
    Lit,
    Recipe,
    assert_as_ddp,
    assert_same,
    fit,
    fit_each,
    main_names,
    make_trainer,
    observe,
    state_of,
)
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_zero import gathered_parameters
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.sharding import FreedParameter

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
@main_names
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


def detecting(name: str) -> dict[str, Any]:
    return {**STRATEGIES[name], "detect_data_edits": True}


@ranks(2)
def test_edits_through_data_are_kept_on_demand(pool: RankPool) -> None:
    assert_as_ddp(pool, detecting("zero1"), ClampsData)


@ranks(2)
def test_edits_through_data_reach_the_masters_of_16_bit_parameters(pool: RankPool) -> None:
    recipe = Recipe(optimizer="sgd", options={"lr": 1e-9})
    weights = pool.run(fit, detecting("zero2_offload"), recipe, FillsData, precision="bf16-true")[0].weights
    # A master that bf16 rounds to 0.25 keeps its digits.
    assert all(torch.equal(value.bfloat16(), torch.full_like(value, 0.25).bfloat16()) for value in weights.values())


def fit_clamping(name: str, path: str | None) -> dict[str, Tensor]:
    lit = ClampsData(MOMENTUM)
    lit.saves = path
    trainer = make_trainer(detecting(name))
    trainer.fit(lit)
    return observe(trainer, lit).weights


@ranks(2)
def test_saving_a_checkpoint_changes_nothing(pool: RankPool, tmp_path: Path) -> None:
    saved, unsaved = (pool.run(fit_clamping, "zero2_offload", path)[0] for path in (str(tmp_path / "a.ckpt"), None))
    assert_same(saved, unsaved)


class Calibrates(Lit):
    """Validation, in inference mode, assigns a buffer and changes another in place, by each rank's own batches."""

    scale: Tensor
    counts: Tensor

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("counts", torch.zeros(models.VOCAB))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.notes.append((self.scale.item(), self.counts.tolist()))
        drawn = 0.1 * self.model.head.weight.sum(1) @ self.counts
        return super().training_step(batch, index) * self.scale + drawn

    def validation_step(self, batch: Tensor, index: int) -> None:
        super().validation_step(batch, index)
        self.scale = 0.5 * self.scale + 0.1 * batch.float().mean()
        self.counts += batch.flatten().bincount(minlength=models.VOCAB)


@ranks(2)
@main_names
def test_buffers_that_validation_changes_are_those_of_rank_0(pool: RankPool, name: str) -> None:
    flags = {"max_epochs": 3, "limit_val_batches": 2}
    expected, actual = (pool.run(fit, strategy, MOMENTUM, Calibrates, **flags) for strategy in (DDP, name))
    assert_same(actual[0].weights, expected[0].weights)  # and buffers
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.metrics == theirs.metrics
        assert ours.notes == theirs.notes
    first, others = actual[0].notes[MOMENTUM.steps], actual[1].notes[MOMENTUM.steps :]
    assert first not in (actual[0].notes[0], others[0])  # what validation did on this rank
    assert first in others


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
@main_names
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
@main_names
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
@main_names
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
@main_names
def test_a_groups_parameters_may_be_exchanged(pool: RankPool, name: str) -> None:
    assert_as_ddp(pool, name, Swaps, max_epochs=2)


class Fused(Lit):
    def configure_optimizers(self) -> Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=0.01, fused=True)


@ranks(1)
def test_fused_optimizers_train(pool: RankPool) -> None:
    weights = [pool.run(fit, name, Recipe(), Fused)[0].weights for name in ("auto", "zero1", "zero3")]
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], rtol=1e-6, atol=1e-7)


# ----------------------------------------------------------------------------------------------- two Trainers


def save_after_another(name: str, path: str) -> None:
    lit = Lit(MOMENTUM)
    first, second = make_trainer(name), make_trainer(name)
    first.fit(lit)
    second.test(lit, verbose=False)
    first.save_checkpoint(path)


@ranks(2)
@main_names
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


# ------------------------------------------------------------------------------------- graphs that units do not own


class Penalized(InPlaceLit):
    """A gradient penalty, taken before the forward that the loss is made of."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        x = self.model.tokens(batch).detach().requires_grad_()
        y = x
        for block in self.model.blocks:
            y = block(y)
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return super().training_step(batch, index) + 0.1 * (gradient.norm(dim=-1) - 1).square().mean()


class Auxiliary(nn.Module):
    """Leaves a loss on itself, or on a child, after it has made its output."""

    def __init__(self, on_child: bool) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.router = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.on_child = on_child

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.body(x))
        losses = [self.router(torch.tanh(x)).square().mean(), (torch.tanh(x) * self.scale).square().mean()]
        if self.on_child:
            self.body.losses = {"router": [losses[0]], "scale": losses[1]}
        else:
            self.loss = losses[0] + losses[1]
        return y


class AuxiliaryLit(InPlaceLit):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model.blocks = nn.ModuleList(Auxiliary(on_child=i % 2 == 0) for i in range(3))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        first, second, third = self.model.blocks
        left = [block.body.losses for block in (first, third)]
        return loss + second.loss + sum(losses["router"][0] + losses["scale"] for losses in left)


@ranks(2)
@main_names
@pytest.mark.parametrize("module", [Penalized, AuxiliaryLit])
def test_backward_may_enter_a_unit_in_other_ways_than_by_its_output(
    pool: RankPool, name: str, module: type[Lit]
) -> None:
    assert_as_ddp(pool, name, module, Recipe(optimizer="momentum", options={"lr": 0.01}, steps=3))


class Tracked(torch.autograd.Function):
    """Notes which nodes of its kind are alive."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = Token()
        Tracked.alive.add(ctx.token)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Token:
    pass


class Leaks(InPlaceLit):
    """Half of the batches do not go backward through the blocks."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        x = self.model.tokens(batch)
        for block in self.model.blocks:
            x = Tracked.apply(block(x))
        return x.square().mean() if index % 2 else self.model.head.weight.square().sum()

    def on_train_batch_start(self, *_: Any) -> None:
        self.notes.append(len(Tracked.alive))


def fit_without_collector(name: str) -> list[int]:
    gc.collect()
    gc.disable()
    try:
        return fit(name, Recipe(optimizer="sgd", options={"lr": 1e-3}, steps=8), Leaks).notes
    finally:
        gc.enable()


@ranks(1)
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_graphs_are_freed_without_the_help_of_the_collector(pool: RankPool, name: str) -> None:
    assert pool.run(fit_without_collector, name)[0] == pool.run(fit_without_collector, "auto")[0]


class Position(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self) -> Tensor:
        return self.weight


class ReturnsParameter(InPlaceLit):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model.position = Position()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.notes.append(len(self.model.position.weight._backward_hooks or ()))
        return super().training_step(batch, index) + self.model.position().square().sum()


@ranks(2)
@main_names
def test_a_module_may_return_its_parameter(pool: RankPool, name: str) -> None:
    expected, actual = (pool.run(fit, each, MOMENTUM, ReturnsParameter)[0] for each in (DDP, name))
    assert_same(actual.weights, expected.weights)
    assert actual.notes == [0] * MOMENTUM.steps


# ------------------------------------------------------------------------------------------- steps and schedulers


class SharedClipped(Lit):
    """Two optimizers hold the same parameters; one of them clips."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        whole, part = self.optimizers()
        self.manual_backward(models.next_token_loss(self.model, batch))
        self.clip_gradients(whole, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        for optimizer in (whole, part):
            optimizer.step()
        whole.zero_grad()

    def configure_optimizers(self) -> list[Optimizer]:
        return [SGD(self.model.parameters(), lr=0.1), SGD(self.model.blocks[0].parameters(), lr=0.5)]


@ranks(2)
@main_names
def test_gradients_that_optimizers_share_are_clipped_for_all_of_them(pool: RankPool, name: str) -> None:
    expected, actual = pool.run(fit, DDP, MOMENTUM, SharedClipped), pool.run(fit, name, MOMENTUM, SharedClipped)
    torch.testing.assert_close(actual[0].weights, expected[0].weights, rtol=1e-5, atol=1e-7)


class LastIsNone(Lit):
    """The last micro-batch of every step has no loss."""

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        return None if index % 2 else super().training_step(batch, index)


@ranks(1)
@pytest.mark.filterwarnings("ignore:.*returned .None.*")
@pytest.mark.parametrize(("name", "precision"), [("zero1", "bf16-true"), ("zero3", "32-true")])
def test_a_step_without_a_last_loss_takes_the_gradients_of_the_others(
    pool: RankPool, name: str, precision: str
) -> None:
    recipe = Recipe(optimizer="sgd", micro=2)
    expected, actual = (pool.run(fit, n, recipe, LastIsNone, precision=precision)[0] for n in ("zero2", name))
    assert_same(actual.weights, expected.weights)
    start = recipe.make_model().state_dict()
    assert not torch.equal(actual.weights["head.weight"], start["head.weight"])


class ReadsNormEarly(Lit):
    """Asks for the norm after every micro-batch."""

    def on_after_backward(self) -> None:
        self.notes.append(self.trainer.strategy.grad_norm(self.optimizers()))


def norms_so_far(recipe: Recipe, world: int) -> list[float]:
    """Those of the first step's micro-batches, by plain backward passes in the recipe's dtype."""
    model, norms = recipe.make_model(), []
    for micro in recipe.batches(world)[0]:
        for batch in micro:
            (models.next_token_loss(model, batch) / recipe.micro / world).backward()
        norms.append(torch.stack([p.grad.double().square().sum() for p in model.parameters()]).sum().sqrt().item())
    return norms


@ranks(2)
@main_names
@pytest.mark.parametrize(("precision", "rel"), [("32-true", 1e-5), ("bf16-true", 0.02)])
def test_the_norm_so_far_is_that_of_all_micro_batches_so_far(
    pool: RankPool, name: str, precision: str, rel: float
) -> None:
    recipe = Recipe(optimizer="sgd", micro=3, steps=1)
    notes = pool.run(fit, name, recipe, ReadsNormEarly, precision=precision)[0].notes
    assert notes == pytest.approx(norms_so_far(recipe, 2), rel=rel)


class Counting:
    """A scheduler whose state has the name of its method."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self, *_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["step"]


class Counts(Lit):
    def configure_optimizers(self) -> Any:
        optimizer = self.recipe.make_optimizer(self.model)
        return [optimizer], [{"scheduler": Counting(optimizer), "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.trainer.save_checkpoint(self.path)


def fit_counting(path: str) -> tuple[Any, int]:
    lit, again = Counts(MOMENTUM), Counts(MOMENTUM)
    lit.path = again.path = path
    make_trainer("zero2").fit(lit)
    saved = torch.load(path, weights_only=True)["lr_schedulers"]
    resumed = make_trainer("zero2", max_epochs=2)
    resumed.fit(again, ckpt_path=path)
    return saved, resumed.lr_scheduler_configs[0].scheduler.count


@ranks(1)
def test_a_schedulers_own_state_is_saved_whole(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(fit_counting, str(tmp_path / "a.ckpt"))[0] == ([{"step": 4}], 8)


class ValueThenNorm(Lit):
    """Clips by value, and asks for the norm afterwards."""

    asks = False

    def configure_gradient_clipping(self, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="value")
        if self.asks:
            self.trainer.strategy.grad_norm(optimizer)

    def on_train_batch_end(self, *_: Any) -> None:
        self.notes.append(self.trainer.strategy.last_grad_norm(self.optimizers()))


class ValueThenNormAsks(ValueThenNorm):
    asks = True


@ranks(2)
@main_names
def test_the_last_norm_is_that_before_clipping(pool: RankPool, name: str) -> None:
    quiet, asking = pool.run(fit_each, name, MOMENTUM, [ValueThenNorm, ValueThenNormAsks])[0]
    assert asking.notes == quiet.notes
    assert all(norm > 0.1 for norm in quiet.notes)


# --------------------------------------------------------------------------------------------- penalties on weights


class WeightsPenalty(Lit):
    """A penalty on all weights, computed before the forward in every other step, and inside another context."""

    full_precision = False

    def penalty(self) -> Tensor:
        with gathered_parameters(self.model, full_precision=self.full_precision):
            return 0.1 * sum(p.square().sum() for p in self.model.parameters())

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if index % 2:
            return self.penalty() + models.next_token_loss(self.model, batch)
        loss = models.next_token_loss(self.model, batch)
        with gathered_parameters(self.model.blocks):
            penalty = self.penalty()
        return loss + penalty

    def on_train_batch_end(self, *_: Any) -> None:
        self.notes.append({isinstance(p, FreedParameter) for p in self.model.parameters()})


class MastersPenalty(WeightsPenalty):
    full_precision = True


class PenaltyByHand(WeightsPenalty):
    """Several backwards that read the penalty, after one that ends before; the first step's has none."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer, penalty = self.optimizers(), self.penalty()
        optimizer.zero_grad()
        self.manual_backward(models.next_token_loss(self.model, batch))
        if index:
            self.manual_backward(penalty, retain_graph=True)
            self.manual_backward(penalty)
        optimizer.step()


@ranks(2)
@pytest.mark.parametrize(("module", "like"), [(WeightsPenalty, DDP), (MastersPenalty, DDP), (PenaltyByHand, "zero2")])
def test_a_penalty_may_be_computed_in_a_context(pool: RankPool, module: type[WeightsPenalty], like: str) -> None:
    expected, actual = (pool.run(fit, name, MOMENTUM, module)[0] for name in (like, "zero3"))
    assert_same(actual.weights, expected.weights)
    assert actual.notes == [{True}] * MOMENTUM.steps


@ranks(2)
def test_a_penalty_on_masters_has_the_gradient_of_one_on_16_bits(pool: RankPool) -> None:
    """But it is another tensor, so that it arrives apart."""
    modules = (WeightsPenalty, MastersPenalty)
    expected, actual = (pool.run(fit, "zero3", MOMENTUM, module, precision="bf16-true")[0] for module in modules)
    torch.testing.assert_close(actual.weights, expected.weights, rtol=0, atol=0.01)  # it moves them by 0.4
    assert actual.notes == [{True}] * MOMENTUM.steps


class Unused(WeightsPenalty):
    """A penalty that no loss contains; a reader pays nothing."""

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        with torch.no_grad():
            self.penalty()
        self.notes.append({isinstance(p, FreedParameter) for p in self.model.blocks.parameters()})
        self.penalty()
        return models.next_token_loss(self.model, batch)


@ranks(2)
def test_what_a_context_has_shown_is_freed_after_the_step(pool: RankPool) -> None:
    assert pool.run(fit, "zero3", MOMENTUM, Unused)[0].notes == [{True}] * 2 * MOMENTUM.steps
