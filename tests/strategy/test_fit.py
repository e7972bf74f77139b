"""Training with a Trainer equals one plain process, for every registered name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import models
from helpers.ranks import RankError, RankPool, ranks
from strategy.fits import (
    FEW,
    NAMES,
    SOME,
    Fitted,
    Lit,
    Recipe,
    StrategyArgument,
    assert_close,
    assert_same,
    assert_same_states,
    fit,
    halving,
    is_native,
    main_names,
    more_names,
    more_names_and_sizes,
    reference,
    slow_unless,
)
from torch import Tensor, nn
from torch.optim import Optimizer


def check(strategy: StrategyArgument, recipe: Recipe, results: list[Fitted], **options: Any) -> None:
    """Weights and optimizer state of rank 0 equal the reference's."""
    expected = reference(strategy, recipe, len(results), **options)
    native = is_native(strategy, recipe)
    assert_same(results[0].weights, expected.weights, native=native)
    assert_same_states(results[0].optimizer_states[0], expected.optimizer_state, native=native)


@ranks(2, slow=(1,))
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("name", NAMES)
def test_every_name_trains_as_one_process_would(pool: RankPool, name: str, optimizer: str) -> None:
    recipe = Recipe(optimizer=optimizer)
    results = pool.run(fit, name, recipe)
    check(name, recipe, results)
    assert [result.steps for result in results] == [recipe.steps] * pool.world_size


@ranks(2, slow=(1,))
@pytest.mark.parametrize("name", NAMES)
def test_everything_at_once(pool: RankPool, name: str) -> None:
    """Accumulation with a short last step, clipping and a scheduler; the other tests take them one by one."""
    recipe = Recipe(micro=2, tail=1, scheduled=True)
    results = pool.run(fit, name, recipe, gradient_clip_val=0.3)
    check(name, recipe, results, clip_norm=0.3)


@ranks(2)
@pytest.mark.parametrize("name", slow_unless(FEW, NAMES))
def test_whole_ranks_hold_the_same_weights(pool: RankPool, name: str) -> None:
    """What a rank shows of its own: everything at stages 0 to 2, nothing at stage 3."""
    first, second = (result.weights for result in pool.run(fit, name))
    if "3" in name:
        assert not second
    else:
        assert_same(second, first)


@more_names_and_sizes
@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ({"gradient_clip_val": 0.3}, {"clip_norm": 0.3}),
        ({"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}, {"clip_value": 0.02}),
    ],
    ids=["norm", "value"],
)
def test_trainer_clips_gradients(pool: RankPool, name: str, flags: dict[str, Any], options: dict[str, Any]) -> None:
    recipe = Recipe(optimizer="momentum", micro=2)
    check(name, recipe, pool.run(fit, name, recipe, **flags), **options)
    clipped, free = reference(name, recipe, 1, **options), reference(name, recipe, 1)
    assert not torch.equal(clipped.weights["head.weight"], free.weights["head.weight"])


@more_names_and_sizes
def test_gradients_accumulate_and_the_last_step_may_be_short(pool: RankPool, name: str) -> None:
    recipe = Recipe(micro=3, steps=2, tail=1)
    results = pool.run(fit, name, recipe)
    check(name, recipe, results)
    assert results[0].steps == 3


@more_names_and_sizes
def test_the_learning_rate_used_is_the_schedulers(pool: RankPool, name: str) -> None:
    recipe = Recipe(scheduled=True, steps=4)
    check(name, recipe, pool.run(fit, name, recipe))


@pytest.mark.parametrize("model", ["mlp", "frozen", "optional"])
@more_names_and_sizes
def test_other_models_train_as_one_process_would(pool: RankPool, name: str, model: str) -> None:
    recipe = Recipe(model=model, optimizer="momentum", flagged=models.not_on_rank_0)
    check(name, recipe, pool.run(fit, name, recipe))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "model", "optimizer", "name"),
    [
        (*((2, "frozen"), (1, "transformer"), (4, "optional"))[(i + j) % 3], optimizer, name)
        for (i, optimizer), (j, name) in itertools.product(enumerate(sorted(models.OPTIMIZERS)), enumerate(SOME))
    ],
    indirect=["pool"],
)
def test_every_optimizer_and_model(pool: RankPool, name: str, optimizer: str, model: str) -> None:
    """Every two settings meet."""
    recipe = Recipe(model=model, optimizer=optimizer, micro=2, steps=3, tail=1, flagged=models.by_turns, scheduled=True)
    check(name, recipe, pool.run(fit, name, recipe, gradient_clip_val=0.3), clip_norm=0.3)


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
@more_names
def test_a_micro_batch_may_have_no_loss(pool: RankPool, name: str) -> None:
    recipe = Recipe(flagged=only_first_of_step_1, micro=2)
    check(name, recipe, pool.run(fit, name, recipe, SkipsFlagged), loss_fn=loss_or_nothing)


def step_1(step: int, micro: int, rank: int) -> bool:
    return step == 1


@ranks(1)
@more_names
def test_a_step_without_a_loss_changes_nothing(pool: RankPool, name: str) -> None:
    recipe = Recipe(flagged=step_1, optimizer="momentum")
    results = pool.run(fit, name, recipe, SkipsFlagged)
    batches = recipe.batches(pool.world_size)
    del batches[1]
    expected = reference(name, recipe, pool.world_size, batches=batches)
    assert_same(results[0].weights, expected.weights)


def rank_1_in_step_1(step: int, micro: int, rank: int) -> bool:
    return (step, rank) == (1, 1)


WHOLE = [name for name in NAMES if "3" not in name]


@ranks(2, slow=(4,))
@pytest.mark.parametrize("name", slow_unless(["zero1", "zero2_offload"], ["zero1", "zero2", "zero2_offload"]))
@pytest.mark.parametrize("flagged", [rank_1_in_step_1, models.by_turns, step_1])
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


@more_names_and_sizes
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
@more_names
def test_ranks_start_from_the_weights_of_rank_0(pool: RankPool, name: str) -> None:
    recipe = Recipe(optimizer="momentum")
    results = pool.run(fit, name, recipe, SeededByRank)
    for result in results[: 1 if "3" in name else 2]:
        weights = dict(result.weights)
        assert torch.equal(weights.pop("offset"), torch.zeros(3))
        assert_same(weights, reference(name, recipe, 2).weights)


class ClipsItself(Lit):
    """Clips in Lightning's hook for it: only in odd steps, and by the strategy's own function."""

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.notes.append(float(self.trainer.strategy.clip_grad_norm_(optimizer, 0.3)))


class ClipsByTrainer(Lit):
    """Calls what Lightning's documentation says to call from the hook."""

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")


@ranks(2)
@main_names
@pytest.mark.parametrize("module", [ClipsItself, ClipsByTrainer])
def test_the_clipping_hook_may_be_overridden(pool: RankPool, name: str, module: type[Lit]) -> None:
    recipe = Recipe(optimizer="momentum")
    results = pool.run(fit, name, recipe, module)
    check(name, recipe, results, clip_norm=0.3)
    if module is ClipsItself:
        norms = reference(name, recipe, pool.world_size, clip_norm=0.3).norms
        for result in results:
            assert result.notes == pytest.approx(norms, rel=1e-6)


class ReadsNorm(Lit):
    """Asks for the gradient norm in the hook that may look at reduced gradients."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.notes.append(self.trainer.strategy.grad_norm(optimizer))


@more_names_and_sizes
def test_the_gradient_norm_is_the_global_one(pool: RankPool, name: str) -> None:
    recipe = Recipe(optimizer="momentum", micro=2)
    results = pool.run(fit, name, recipe, ReadsNorm)
    norms = reference(name, recipe, pool.world_size).norms
    assert [result.notes for result in results] == [pytest.approx(norms, rel=1e-6)] * pool.world_size
    check(name, recipe, results)


class NotFinite(Lit):
    """The second batch has an infinite loss on the last rank."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        last = dist.get_rank() == dist.get_world_size() - 1
        return super().training_step(batch, index) * (torch.inf if index == 1 and last else 1.0)


@more_names_and_sizes
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped(pool: RankPool, name: str) -> None:
    recipe = Recipe(optimizer="momentum")
    results = pool.run(fit, name, recipe, NotFinite, gradient_clip_val=0.3)
    batches = recipe.batches(pool.world_size)
    del batches[1]
    expected = reference(name, recipe, pool.world_size, batches=batches, clip_norm=0.3)
    assert_same(results[0].weights, expected.weights)


class Interval(Lit):
    """A scheduler that steps with every epoch, or on a validation metric."""

    def configure_optimizers(self) -> Any:
        optimizer = self.recipe.make_optimizer(self.model)
        return [optimizer], [{"scheduler": halving(optimizer), "interval": "epoch"}]

    def on_train_epoch_start(self) -> None:
        self.notes.append(self.optimizers().param_groups[0]["lr"])


@ranks(2)
@pytest.mark.parametrize("name", slow_unless(["zero3"], ["zero2_offload", "zero3"]))
def test_schedulers_may_step_with_epochs(pool: RankPool, name: str) -> None:
    results = pool.run(fit, name, Recipe(options={"lr": 0.5}, optimizer="sgd"), Interval, max_epochs=3)
    assert results[0].notes == [0.5, 0.25, 0.125]


class NoOptimizer(Lit):
    def configure_optimizers(self) -> None:
        return None


@more_names_and_sizes
@pytest.mark.filterwarnings("ignore:.*configure_optimizers.*")
def test_a_module_without_an_optimizer_runs(pool: RankPool, name: str) -> None:
    recipe = Recipe()
    results = pool.run(fit, name, recipe, NoOptimizer)
    assert results[0].steps == recipe.steps
    assert_same(results[0].weights, recipe.make_model().state_dict())
