"""Training with a Trainer equals one plain process, for every registered name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import models
from helpers.ranks import RankError, RankPool, ranks
from lightning import Callback, LightningModule, Trainer
from strategy.fits import (
    NAMES,
    Fitted,
    Lit,
    Recipe,
    StrategyArgument,
    assert_close,
    assert_same,
    assert_same_states,
    fit,
    full_batch_loss,
    halving,
    is_native,
    main_names,
    make_trainer,
    observe,
    reference,
)
from torch import Tensor, nn
from torch.optim import Optimizer


def check(strategy: StrategyArgument, recipe: Recipe, results: list[Fitted], **options: Any) -> None:
    """Weights and optimizer state of rank 0 equal the reference's."""
    expected = reference(strategy, recipe, len(results), **options)
    native = is_native(strategy, recipe)
    assert_same(results[0].weights, expected.weights, native=native)
    assert_same_states(results[0].optimizer_states[0], expected.optimizer_state, native=native)


@ranks(2)
@pytest.mark.parametrize("name", NAMES)
def test_every_name_trains_as_one_process_would(pool: RankPool, name: str) -> None:
    """At stages 0 to 2 every rank shows the weights; at stage 3 rank 0 alone gathers them."""
    recipe = Recipe(optimizer="momentum")
    results = pool.run(fit, name, recipe)
    check(name, recipe, results)
    assert [result.steps for result in results] == [recipe.steps] * pool.world_size
    if "3" in name:
        assert not results[1].weights
    else:
        assert_same(results[1].weights, results[0].weights)


@ranks(2)
@pytest.mark.parametrize("name", NAMES)
def test_everything_at_once(pool: RankPool, name: str) -> None:
    """Accumulation with a short last step, clipping and a scheduler."""
    recipe = Recipe(micro=2, tail=1, scheduled=True)
    results = pool.run(fit, name, recipe, gradient_clip_val=0.3)
    check(name, recipe, results, clip_norm=0.3)
    assert [result.steps for result in results] == [recipe.steps + 1] * pool.world_size


class SavesAfterTheFirstEpoch(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def live(name: str, recipe: Recipe, path: str) -> tuple[Fitted, Fitted, float, Fitted]:
    """Two epochs; the second once more from a checkpoint; a test; and a fit with a new optimizer."""
    flags: dict[str, Any] = {"gradient_clip_val": 0.3, "accumulate_grad_batches": recipe.micro, "max_epochs": 2}
    lit = Lit(recipe)
    trainer = make_trainer(name, callbacks=[SavesAfterTheFirstEpoch(path)], **flags)
    trainer.fit(lit)
    whole = observe(trainer, lit)
    resumed = fit(name, dataclasses.replace(recipe, seed=7), ckpt_path=path, **flags)
    loss = trainer.test(lit, verbose=False)[0]["test_loss"]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(lit)
    return whole, resumed, loss, observe(trainer, lit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "name"),
    [((1, 2, 4)[(i + i // 3) % 3], name) for i, name in enumerate(NAMES)],  # a stage on two numbers of ranks
    indirect=["pool"],
)
def test_a_whole_life(pool: RankPool, name: str, tmp_path: Path) -> None:
    """Every name on one rank, on two or on four, with all that its fits are combined with elsewhere."""
    recipe = Recipe(optimizer="momentum", micro=2, tail=1, scheduled=True)
    world = pool.world_size
    batches = recipe.batches(world)
    results = pool.run(live, name, recipe, str(tmp_path / "saved.ckpt"))
    whole, resumed, _, again = results[0]
    expected = reference(name, recipe, world, batches=batches * 2, clip_norm=0.3)
    for fitted in (whole, resumed):
        assert_same(fitted.weights, expected.weights)
        assert_same_states(fitted.optimizer_states[0], expected.optimizer_state)
        assert fitted.steps == 2 * (recipe.steps + 1)
    loss = full_batch_loss(expected.weights, recipe, batches)
    assert [tested for _, _, tested, _ in results] == [pytest.approx(loss, rel=1e-5)] * world
    model = recipe.make_model()
    model.load_state_dict(expected.weights)
    assert_same(again.weights, reference(name, recipe, world, model=model, clip_norm=0.3).weights)


@ranks(2)
def test_a_parameter_may_be_used_on_some_ranks_only(pool: RankPool) -> None:
    recipe = Recipe(model="optional", optimizer="momentum", flagged=models.not_on_rank_0)
    check("zero3", recipe, pool.run(fit, "zero3", recipe))


class SkipsFlagged(Lit):
    """Returns no loss for a flagged batch."""

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        return None if models.is_flagged(batch) else super().training_step(batch, index)


def loss_or_nothing(model: nn.Module, batch: Tensor) -> Tensor:
    """What a rank that returns None contributes: zeros."""
    return models.next_token_loss(model, batch) * (not models.is_flagged(batch))


def only_first_of_step_1(step: int, micro: int, rank: int) -> bool:
    return (step, micro) == (1, 0)


@ranks(1)
@main_names
def test_a_micro_batch_may_have_no_loss(pool: RankPool, name: str) -> None:
    recipe = Recipe(flagged=only_first_of_step_1, micro=2)
    check(name, recipe, pool.run(fit, name, recipe, SkipsFlagged), loss_fn=loss_or_nothing)


def step_1(step: int, micro: int, rank: int) -> bool:
    return step == 1


@ranks(1)
@main_names
def test_a_step_without_a_loss_changes_nothing(pool: RankPool, name: str) -> None:
    recipe = Recipe(flagged=step_1, optimizer="momentum")
    results = pool.run(fit, name, recipe, SkipsFlagged)
    batches = recipe.batches(pool.world_size)
    del batches[1]
    expected = reference(name, recipe, pool.world_size, batches=batches)
    assert_same(results[0].weights, expected.weights)


def rank_1_in_step_1(step: int, micro: int, rank: int) -> bool:
    return (step, rank) == (1, 1)


@pytest.mark.parametrize(
    ("pool", "name", "flagged"),
    [
        (2, "zero1", models.by_turns),
        (2, "zero2_offload", rank_1_in_step_1),
        (2, "zero1", step_1),
        pytest.param(4, "zero2", models.by_turns, marks=pytest.mark.slow),
    ],
    indirect=["pool"],
)
def test_a_rank_without_a_loss_adds_no_gradient(
    pool: RankPool, name: str, flagged: Callable[[int, int, int], bool]
) -> None:
    recipe = Recipe(flagged=flagged, micro=2, optimizer="momentum", dtype=torch.float64)
    results = pool.run(fit, name, recipe, SkipsFlagged)
    batches = recipe.batches(pool.world_size)
    if flagged is step_1:  # on all ranks: as if no step had been
        del batches[1]
    expected = reference(name, recipe, pool.world_size, batches=batches, loss_fn=loss_or_nothing)
    assert_close(results[0].weights, expected.weights)


@pytest.mark.slow
def test_a_rank_without_a_loss_at_stage_3_is_lightnings_error(pool2: RankPool) -> None:
    """Other ranks gather parameters in their backward; it must not become a hang."""
    recipe = Recipe(flagged=rank_1_in_step_1)
    with pytest.raises(RankError, match="returning None in distributed training is not supported"):
        pool2.run_within(10, fit, "zero3", recipe, SkipsFlagged)


class OwnParameters(Lit):
    """Uses parameters and a layer of the LightningModule itself, outside any submodule of the model."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.temperature = nn.Parameter(torch.full((models.VOCAB,), 0.7))
        self.bias = nn.Linear(1, models.VOCAB)
        nn.init.constant_(self.bias.weight, 0.25)
        nn.init.constant_(self.bias.bias, -0.5)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        logits = self.model(batch[:, :-1]) * self.temperature + self.bias.weight.squeeze(1) + self.bias.bias
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Optimizer:
        return self.recipe.make_optimizer(self)


def own_parameters_loss(module: nn.Module, batch: Tensor) -> Tensor:
    return OwnParameters.training_step(module, batch, 0)  # type: ignore[arg-type]


@ranks(2)
@main_names
def test_the_modules_own_parameters_may_be_used_directly(pool: RankPool, name: str) -> None:
    recipe = Recipe(optimizer="momentum")
    results = pool.run(fit, name, recipe, OwnParameters)
    expected = reference(
        name, recipe, pool.world_size, model=OwnParameters(recipe), loss_fn=own_parameters_loss
    ).weights
    assert_same(results[0].weights, {key.removeprefix("model."): value for key, value in expected.items()})


class SeededByRank(Lit):
    """Other initial weights and another buffer on every rank."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model = models.make_model(recipe.model, seed=dist.get_rank())
        self.model.register_buffer("offset", torch.full((3,), float(dist.get_rank())))


@ranks(2)
@main_names
def test_ranks_start_from_the_weights_of_rank_0(pool: RankPool, name: str) -> None:
    recipe = Recipe(optimizer="momentum")
    results = pool.run(fit, name, recipe, SeededByRank)
    for result in results[: 1 if "3" in name else 2]:
        weights = dict(result.weights)
        assert torch.equal(weights.pop("offset"), torch.zeros(3))
        assert_same(weights, reference(name, recipe, 2).weights)


class Interval(Lit):
    """A scheduler that steps with every epoch, or on a validation metric."""

    def configure_optimizers(self) -> Any:
        optimizer = self.recipe.make_optimizer(self.model)
        return [optimizer], [{"scheduler": halving(optimizer), "interval": "epoch"}]

    def on_train_epoch_start(self) -> None:
        self.notes.append(self.optimizers().param_groups[0]["lr"])


@ranks(2)
def test_schedulers_may_step_with_epochs(pool: RankPool) -> None:
    results = pool.run(fit, "zero3", Recipe(options={"lr": 0.5}, optimizer="sgd"), Interval, max_epochs=3)
    assert results[0].notes == [0.5, 0.25, 0.125]


class NoOptimizer(Lit):
    def configure_optimizers(self) -> None:
        return None


@ranks(2)
@main_names
@pytest.mark.filterwarnings("ignore:.*configure_optimizers.*")
def test_a_module_without_an_optimizer_runs(pool: RankPool, name: str) -> None:
    recipe = Recipe()
    results = pool.run(fit, name, recipe, NoOptimizer)
    assert results[0].steps == recipe.steps
    assert_same(results[0].weights, recipe.make_model().state_dict())
