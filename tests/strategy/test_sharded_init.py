"""Models that are made under a Trainer: `configure_model` and `trainer.init_module`, at stage 3 in shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning
import pytest
import torch
from helpers.ranks import RankError, RankPool
from lightning import LightningModule, Trainer, seed_everything
from strategy.fits import (
    Fitted,
    Lit,
    Recipe,
    assert_same,
    assert_same_states,
    fit,
    make_trainer,
    observe,
)
from torch import nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, gathered_parameters
from lightning_zero.checkpoint import state
from lightning_zero.sharding import ShardedParameter
from lightning_zero.sharding.sharded_init import load_shard


class Configured(Lit):
    """Makes its model in `configure_model`; notes whether it comes out of it in shards."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        del self.model

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = self.recipe.make_model()

    def configure_optimizers(self) -> Any:
        self.notes.append(in_shards(self))
        return super().configure_optimizers()


def in_shards(module: nn.Module) -> bool:
    return all(isinstance(parameter, ShardedParameter) for parameter in module.parameters())


def fit_configured(strategy: Any, recipe: Recipe, **flags: Any) -> Fitted:
    return fit(strategy, recipe, Configured, **flags)


def fit_made_under_the_trainer(strategy: Any, recipe: Recipe, ckpt_path: str | None = None, **flags: Any) -> Fitted:
    trainer = make_trainer(strategy, **flags)
    with trainer.init_module():
        lit = Lit(recipe)
    lit.notes.append(in_shards(lit))
    trainer.fit(lit, ckpt_path=ckpt_path)
    return observe(trainer, lit)


def assert_fitted(actual: Fitted, expected: Fitted) -> None:
    assert_same(actual.weights, expected.weights)
    assert_same_states(actual.optimizer_states[0], expected.optimizer_states[0])


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("zero3", "bf16-mixed"),
        pytest.param({"stage": 3, "offload_optimizer": "cpu"}, "32-true", marks=pytest.mark.slow),
        pytest.param("zero3_offload", "bf16-mixed", marks=pytest.mark.slow),
    ],
)
def test_training_is_that_of_a_model_made_before(strategy: Any, precision: Any, pool2: RankPool) -> None:
    recipe = Recipe()
    expected, *_ = pool2.run(fit, strategy, recipe, precision=precision)
    for made in (fit_configured, fit_made_under_the_trainer):
        actual, other = pool2.run(made, strategy, recipe, precision=precision)
        assert_fitted(actual, expected)
        assert actual.notes == other.notes == [True]


@pytest.mark.parametrize("pool", [1], indirect=True)
def test_one_rank_has_nothing_to_shard(pool: RankPool) -> None:
    (expected,) = pool.run(fit, "zero3")
    for made in (fit_configured, fit_made_under_the_trainer):
        (actual,) = pool.run(made, "zero3", Recipe())
        assert_fitted(actual, expected)
        assert actual.notes == [False]


@pytest.mark.parametrize(
    "strategy",
    [pytest.param("zero2", marks=pytest.mark.slow), {"stage": 3, "shard_size": 1}],
    ids=["zero2", "replicas"],
)
def test_where_nothing_is_sharded_nothing_changes(strategy: Any, pool2: RankPool) -> None:
    expected, *_ = pool2.run(fit, strategy)
    for made in (fit_configured, fit_made_under_the_trainer):
        actual, *_ = pool2.run(made, strategy, Recipe())
        assert_fitted(actual, expected)
        assert actual.notes == [False]


def save(path: str) -> None:
    trainer = make_trainer("zero1")
    trainer.fit(Lit(Recipe()))
    trainer.save_checkpoint(path)


@pytest.mark.slow
def test_a_checkpoint_is_resumed(pool2: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    pool2.run(save, path)
    expected, *_ = pool2.run(fit, "zero3", ckpt_path=path, max_epochs=2)
    for made in (fit_configured, fit_made_under_the_trainer):
        actual, *_ = pool2.run(made, "zero3", Recipe(seed=1), ckpt_path=path, max_epochs=2)
        assert actual.steps == expected.steps == 6
        assert_fitted(actual, expected)


def load_inside(path: str) -> dict[str, Any]:
    """Weights loaded into a model right where it is made, and again later, in the same way."""
    trainer = make_trainer("zero3")
    state = torch.load(path, mmap=True, weights_only=True)["state_dict"]
    with trainer.init_module(empty_init=True):
        lit = Lit(Recipe(seed=1, steps=0))
        lit.load_state_dict(state)
    with trainer.init_module():
        lit.model.head.weight.data.mul_(2)
    trainer.validate(lit, verbose=False)
    return observe(trainer, lit).weights


def test_weights_are_loaded_where_the_model_is_made(pool2: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    pool2.run(save, path)
    expected, *_ = pool2.run(fit, "zero1")
    expected.weights["tokens.weight"] *= 2
    expected.weights["head.weight"] = expected.weights["tokens.weight"]
    actual, *_ = pool2.run(load_inside, path)
    assert_same(actual, expected.weights)


def keeps_random_numbers() -> bool:
    """Starting the ranks in `init_module` seeds nothing again."""
    seed_everything(3)
    torch.rand(5)
    before = torch.get_rng_state()
    with make_trainer("zero3").init_module():
        return torch.equal(before, torch.get_rng_state())


def test_random_numbers_go_on(pool2: RankPool) -> None:
    assert all(pool2.run(keeps_random_numbers))


def fit_with_another(release: bool) -> dict[str, torch.Tensor]:
    first = make_trainer("zero3")
    with first.init_module():
        lit = Lit(Recipe())
    if release:
        first.strategy.release(lit)
    second = make_trainer("ddp")
    second.fit(lit)
    return observe_plain(lit)


def observe_plain(lit: Lit) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in lit.model.state_dict().items()}


def test_another_strategy_needs_a_released_module(pool2: RankPool) -> None:
    with pytest.raises(RankError, match=r"ShardedParameter\('\w+.weight'.*release\(module\)"):
        pool2.run(fit_with_another, release=False)
    first, second = pool2.run(fit_with_another, release=True)
    assert_same(first, second)
    assert not torch.equal(first["tokens.weight"], Recipe().make_model().tokens.weight)


def fit_with_another_stage() -> Fitted:
    with make_trainer("zero3").init_module():
        lit = Lit(Recipe())
    trainer = make_trainer("zero1")
    trainer.fit(lit)
    return observe(trainer, lit)


def test_another_trainer_of_any_stage_takes_the_module(pool2: RankPool) -> None:
    expected, *_ = pool2.run(fit, "zero1")
    actual, *_ = pool2.run(fit_with_another_stage)
    assert_fitted(actual, expected)


def made_before_a_spawn() -> bool:
    """What `spawn` will start inside `fit` cannot hold shards before it."""
    with Trainer(strategy=ZeroStrategy(stage=3, start_method="spawn"), accelerator="cpu", devices=2).init_module():
        lit = Lit(Recipe())
    return in_shards(lit)


def test_before_a_spawn_the_module_is_unsharded(pool2: RankPool) -> None:
    assert pool2.run(made_before_a_spawn) == [False, False]


class Wide(LightningModule):
    """64 MB of weights."""

    def configure_model(self) -> None:
        self.layers = nn.Sequential(*(nn.Linear(2048, 1024) for _ in range(8)))

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        """Nothing: only loading is of interest."""


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def memory_of_loading(path: str) -> tuple[int, bool]:
    """The most anonymous memory that loading weights took at any parameter, and whether they are right."""
    trainer, wide, taken, begin = make_trainer("zero3"), Wide(), [], 0
    load_all = ZeroStrategy.load_model_state_dict

    def measured_load(parameter: ShardedParameter, values: torch.Tensor) -> None:
        load_shard(parameter, values)
        taken.append(anonymous_bytes() - begin)

    def measured_load_all(*args: Any, **kwargs: Any) -> None:
        nonlocal begin
        begin = anonymous_bytes()
        load_all(*args, **kwargs)

    with (
        patch.object(state, "load_shard", measured_load),
        patch.object(ZeroStrategy, "load_model_state_dict", measured_load_all),
    ):
        trainer.validate(wide, DataLoader(range(2)), ckpt_path=path, verbose=False)  # type: ignore[arg-type]
    saved = torch.load(path, mmap=True, weights_only=True)["state_dict"]
    assert len(taken) == len(saved) == 16
    with gathered_parameters(wide):
        return max(taken), all(torch.equal(value.cpu(), saved[name]) for name, value in wide.state_dict().items())


def test_loading_a_checkpoint_streams(pool2: RankPool, tmp_path: Path) -> None:
    """No rank reads the whole of it into memory: the shards are there, and nothing else is taken."""
    path = str(tmp_path / "saved.ckpt")
    wide = Wide()
    wide.configure_model()
    version = {"pytorch-lightning_version": lightning.__version__}
    torch.save({"state_dict": wide.state_dict(), "epoch": 0, "global_step": 0, **version}, path)
    full = sum(p.nbytes for p in wide.parameters())
    for taken, right in pool2.run(memory_of_loading, path):
        assert right
        assert taken < 0.2 * full
