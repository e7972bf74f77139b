"""Trainer's entry points in every order, several Trainers on one module, and modules made late."""

from __future__ import annotations

import gc
import logging
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import models, place
from helpers.ranks import RankError, RankPool, ranks
from helpers.reference import Trained, train_reference
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.model_summary import summarize
from strategy.fits import (
    FEW,
    NAMES,
    Fitted,
    Lit,
    Recipe,
    StrategyArgument,
    assert_same,
    fit,
    full_batch_loss,
    main_names,
    make_trainer,
    observe,
    reduces_each,
    reference,
    state_of,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroPrecision, ZeroStrategy, gathered_parameters
from lightning_zero.integration.launchers import GatheringLauncher
from lightning_zero.sharding.compiled import plain_names

MOMENTUM = Recipe(optimizer="momentum")


def continued(strategies: Sequence[StrategyArgument], recipe: Recipe, world: int) -> Trained:
    """Training again and again with a new optimizer, as every call of `fit` makes one."""
    model = recipe.make_model()
    for strategy in strategies:
        trained = reference(strategy, recipe, world, model=model)
        model.load_state_dict(trained.weights)
    return trained


def loss_at(weights: dict[str, Tensor], recipe: Recipe, world: int) -> float:
    return full_batch_loss(weights, recipe, recipe.batches(world))


def evaluate_around_fit(name: str, recipe: Recipe) -> tuple[list[float], list[bool], Fitted]:
    """Validate, test and predict before, in and after `fit`: losses, and whether predictions are the model's own."""
    lit = Lit(recipe)
    trainer = make_trainer(name, limit_val_batches=None, val_check_interval=1, num_sanity_val_steps=1)
    losses, same = [], []

    def evaluate() -> None:
        losses.append(trainer.validate(lit, verbose=False)[0]["val_loss"])
        losses.append(trainer.test(lit, verbose=False)[0]["test_loss"])
        predictions = trainer.predict(lit)
        with gathered_parameters(lit), torch.no_grad():
            expected = [lit.model(batch[:, :-1]).cpu() for batch in lit.loader()]
        same.append(all(map(torch.equal, predictions, expected)))

    evaluate()
    trainer.fit(lit)
    losses.append(float(trainer.callback_metrics["val_loss"]))
    evaluate()
    return losses, same, observe(trainer, lit)


@ranks(2)
@main_names
def test_evaluation_works_before_and_after_fit(pool: RankPool, name: str) -> None:
    world = pool.world_size
    results = pool.run(evaluate_around_fit, name, MOMENTUM)
    expected = reference(name, MOMENTUM, world).weights
    before = loss_at(MOMENTUM.make_model().state_dict(), MOMENTUM, world)
    after = loss_at(expected, MOMENTUM, world)
    for losses, same, _ in results:
        assert losses == pytest.approx([before, before, after, after, after], rel=1e-5)
        assert same == [True, True]
    assert_same(results[0][2].weights, expected)


def fit_repeatedly(name: str, recipe: Recipe) -> Fitted:
    """Fit twice with one Trainer, with another entry point in between."""
    lit = Lit(recipe)
    trainer = make_trainer(name, accumulate_grad_batches=recipe.micro)
    trainer.fit(lit)
    trainer.test(lit, verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(lit)
    return observe(trainer, lit)


@ranks(2)
@main_names
def test_fit_runs_again(pool: RankPool, name: str) -> None:
    recipe = Recipe(optimizer="momentum", micro=2)
    results = pool.run(fit_repeatedly, name, recipe)
    assert_same(results[0].weights, continued([name, name], recipe, pool.world_size).weights)
    assert results[0].steps == 2 * recipe.steps


def fit_with_each(strategies: Sequence[StrategyArgument], recipe: Recipe) -> Fitted:
    """One module, a new Trainer per strategy."""
    lit = Lit(recipe)
    for strategy in strategies:
        trainer = make_trainer(strategy)
        trainer.fit(lit)
    return observe(trainer, lit)


@ranks(2)
def test_another_trainer_takes_the_module_over(pool: RankPool) -> None:
    names = ("zero2_offload", "zero3_offload")
    results = pool.run(fit_with_each, names, MOMENTUM)
    assert_same(results[0].weights, continued(names, MOMENTUM, pool.world_size).weights)


def two_trainers_by_turns(first: str, second: str, recipe: Recipe) -> Fitted:
    lit = Lit(recipe)
    trainers = [make_trainer(first), make_trainer(second)]
    for epochs in (1, 2):
        for trainer in trainers:
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(lit)
    return observe(trainers[1], lit)


@ranks(2)
def test_two_trainers_may_take_turns(pool: RankPool) -> None:
    names = ("zero3", "zero1")
    results = pool.run(two_trainers_by_turns, *names, MOMENTUM)
    assert_same(results[0].weights, continued(names * 2, MOMENTUM, pool.world_size).weights)


def fit_by_turns(shared: bool) -> dict[str, Tensor]:
    """Two Trainers, with one precision plugin or two, fit a module each, and the first one goes on."""
    plugins = [ZeroPrecision()] * 2 if shared else [ZeroPrecision(), ZeroPrecision()]
    trainers = [make_trainer("zero2", plugins=[plugin], gradient_clip_val=0.1) for plugin in plugins]
    modules = [Lit(MOMENTUM), Lit(MOMENTUM)]
    for trainer, lit in zip(trainers, modules, strict=True):
        trainer.fit(lit)
    trainers[0].fit_loop.max_epochs = 2
    trainers[0].fit(modules[0])
    return state_of(trainers[0])


@ranks(1)
def test_two_trainers_may_share_a_precision_plugin(pool: RankPool) -> None:
    (shared,), (apart,) = pool.run(fit_by_turns, True), pool.run(fit_by_turns, False)
    assert_same(shared, apart)


def one_trainer_two_modules(name: str, recipe: Recipe) -> list[Fitted]:
    trainer = make_trainer(name)
    fitted = []
    for epochs in (1, 2):
        lit = Lit(recipe)
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(lit)
        fitted.append(observe(trainer, lit))
    return fitted


@ranks(2)
def test_a_trainer_may_fit_another_module(pool: RankPool) -> None:
    expected = reference("zero3", MOMENTUM, 2)
    for fitted in pool.run(one_trainer_two_modules, "zero3", MOMENTUM)[0]:
        assert_same(fitted.weights, expected.weights)


def train_head_then_all(name: str, recipe: Recipe) -> Fitted:
    lit = Lit(recipe)
    chosen: list[nn.Module] = [lit.model.norm, lit.model]
    lit.configure_optimizers = lambda: recipe.make_optimizer(chosen.pop(0))  # type: ignore[method-assign]
    trainer = make_trainer(name)
    trainer.fit(lit)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(lit)
    return observe(trainer, lit)


@ranks(2)
@pytest.mark.parametrize("name", FEW)
def test_a_second_fit_may_optimize_other_parameters(pool: RankPool, name: str) -> None:
    recipe, world = MOMENTUM, pool.world_size
    options: dict[str, Any] = {"loss_fn": models.next_token_loss, "reduce_each": reduces_each(name)}
    model, batches = recipe.make_model(), recipe.batches(world)
    first = train_reference(model, lambda m: recipe.make_optimizer(m.norm), batches, **options)
    model.load_state_dict(first.weights)
    second = train_reference(model, recipe.make_optimizer, batches, **options)
    assert_same(pool.run(train_head_then_all, name, recipe)[0].weights, second.weights)


def fit_under_ddp_unreleased(name: str) -> tuple[str, dict[str, Tensor]]:
    """What the other strategy says, and the weights of a fit after the release."""
    lit, trainer = Lit(MOMENTUM), make_trainer(name)
    trainer.fit(lit)
    with pytest.raises(RuntimeError) as caught:
        make_trainer("ddp").fit(lit)
    trainer.strategy.release()
    later = make_trainer("ddp")
    later.fit(lit)
    return str(caught.value), state_of(later)


@ranks(2)
def test_ddp_needs_a_released_module(pool: RankPool) -> None:
    expected = continued(["zero1", "zero1"], MOMENTUM, pool.world_size).weights
    for message, weights in pool.run(fit_under_ddp_unreleased, "zero1"):
        assert "trainer.strategy.release()" in message
        assert_same(weights, expected)


def forward_outside(name: str, recipe: Recipe) -> tuple[Tensor, str]:
    """A part of the module, called by the user between two fits, and a freed parameter, read directly."""
    lit = Lit(recipe)
    make_trainer(name).fit(lit)
    with torch.no_grad():
        logits = lit.model(torch.arange(1, 4).unsqueeze(0))
    with pytest.raises(RuntimeError) as caught:
        lit.model.blocks[1].up.weight.sum()
    return logits, str(caught.value)


@ranks(2)
def test_at_stage_3_parts_compute_and_freed_parameters_raise_by_name(pool: RankPool) -> None:
    model = MOMENTUM.make_model()
    model.load_state_dict(reference("zero3", MOMENTUM, 2).weights)
    for logits, message in pool.run(forward_outside, "zero3", MOMENTUM):
        assert torch.equal(logits, model(torch.arange(1, 4).unsqueeze(0)))
        assert "model.blocks.1.up.weight" in message
        assert "gathered_parameters" in message


class Summarized(Lit):
    def on_train_start(self) -> None:
        summary = summarize(self, max_depth=-1)
        self.notes.append((summary.total_parameters, summary.trainable_parameters, summary.model_size))


@ranks(2)
def test_a_summary_counts_full_parameters(pool: RankPool) -> None:
    recipe = Recipe(model="frozen")
    plain = summarize(Lit(recipe), max_depth=-1)
    expected = (plain.total_parameters, plain.trainable_parameters, plain.model_size)
    for result in pool.run(fit, "zero3", recipe, Summarized, enable_model_summary=True):
        assert result.notes == [expected]


class Sleeps(Lit):
    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if dist.get_rank() == 1:
            time.sleep(280)
        return super().training_step(batch, index)


@pytest.mark.slow
def test_a_collective_that_a_rank_never_joins_times_out(pool2: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool2.run(fit, {"stage": 2, "timeout": 5.0}, Recipe(), Sleeps)
    assert caught.value.rank == 0
    assert caught.value.failures[0].kind != "timeout"  # an error on that rank, not the pool's own limit


class Ended(LightningEnvironment):
    """Counts how often it is torn down."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def teardown(self) -> None:
        super().teardown()
        self.times += 1


def fit_in_an_environment() -> int:
    environment, lit = Ended(), Lit(MOMENTUM)
    trainer = make_trainer("zero2", plugins=[environment])
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(lit)
    return environment.times


@ranks(2)
def test_each_fit_tears_its_environment_down(pool: RankPool) -> None:
    assert pool.run(fit_in_an_environment) == [2, 2]


class Sampled(Lit):
    """Leaves the distribution of samples to Lightning."""

    def loader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.arange(8))  # type: ignore[arg-type]

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self.loader()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.notes.append(batch.item())
        self.log("mean", batch.float().mean(), on_step=False, on_epoch=True, sync_dist=True)
        return self.model.tokens.weight.sum()

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return batch

    predict_dataloader = loader


@ranks(2)
def test_lightning_distributes_samples_and_reduces_what_is_logged(pool: RankPool) -> None:
    results = pool.run(fit, "zero3", MOMENTUM, Sampled, use_distributed_sampler=True)
    assert [len(result.notes) for result in results] == [4, 4]
    assert sorted(results[0].notes + results[1].notes) == list(range(8))
    assert [result.metrics["mean"] for result in results] == [3.5, 3.5]


class Predicting(Lit):
    """Two loaders whose samples do not divide by two ranks, which Lightning distributes without a repetition."""

    def predict_dataloader(self) -> list[DataLoader[Tensor]]:
        tokens = torch.arange(8 * 4).view(8, 4) % 5
        return [DataLoader(tokens[:3]), DataLoader(tokens[3:])]  # type: ignore[arg-type]

    def predict_step(self, batch: Tensor, index: int, dataloader_idx: int = 0) -> Tensor:
        # The loaders take the blocks in different orders.
        self.notes.append((dataloader_idx, index))
        hidden = self.model.blocks[1](self.model.tokens(batch)) if dataloader_idx else self.model.tokens(batch)
        return self.model.blocks[0](hidden).sum()


class EvaluatingUnevenly(Lit):
    """Rank 1 has two batches less than the other in validation and test, and as many in the fit around them."""

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(list(super().loader())[2 * dist.get_rank() :], batch_size=None)  # type: ignore[arg-type]

    test_dataloader = val_dataloader  # type: ignore[assignment]

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val_loss", models.next_token_loss(self.model, batch))

    def test_step(self, batch: Tensor, index: int) -> None:
        self.log("test_loss", models.next_token_loss(self.model, batch))


def predict_unevenly(strategy: Any) -> tuple[list[list[Tensor]], list[Any]]:
    lit = Predicting(MOMENTUM)
    predictions: Any = make_trainer(strategy, use_distributed_sampler=True).predict(lit)
    return predictions, lit.notes


@ranks(2)
@pytest.mark.parametrize("options", [{}, {"prefetch_mb": 100.0}])
def test_ranks_may_have_different_numbers_of_batches_to_predict(pool: RankPool, options: dict[str, Any]) -> None:
    seen = [pool.run(predict_unevenly, {"stage": stage, "timeout": 20.0} | options) for stage in (2, 3)]
    assert [notes for _, notes in seen[1]] == [[(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)], [(0, 0), (1, 0), (1, 1)]]
    for (at_2, _), (at_3, _) in zip(*seen, strict=True):
        for own, other in zip(at_2, at_3, strict=True):
            assert torch.equal(torch.stack(own), torch.stack(other))


def evaluate_unevenly(strategy: Any) -> tuple[Fitted, list[Any]]:
    trainer = make_trainer(strategy, limit_val_batches=1.0, num_sanity_val_steps=3, max_epochs=2)
    lit = EvaluatingUnevenly(MOMENTUM)
    trainer.fit(lit)
    fitted = observe(trainer, lit)
    return fitted, [*trainer.validate(lit, verbose=False), *trainer.test(lit, verbose=False)]


@ranks(2)
def test_ranks_may_have_different_numbers_of_batches_to_evaluate(pool: RankPool) -> None:
    seen = [pool.run(evaluate_unevenly, {"stage": stage, "timeout": 20.0}) for stage in (2, 3)]
    assert_same(seen[1][0][0].weights, seen[0][0][0].weights)  # whole on rank 0 alone
    assert [metrics for _, metrics in seen[0]] == [metrics for _, metrics in seen[1]]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_makes_a_trainer(name: str) -> None:
    trainer = Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    strategy = trainer.strategy
    assert isinstance(strategy, ZeroStrategy)
    assert strategy.stage == int(name[4])
    assert strategy.options.offload_optimizer == ("cpu" if "offload" in name else "none")
    assert strategy.options.offload_params == ("cpu" if name == "zero3_offload" else "none")
    assert trainer._accelerator_connector.is_distributed  # what Lightning's samplers and metrics go by


def test_an_instance_makes_a_trainer() -> None:
    strategy = ZeroStrategy(3, offload_params="cpu", bucket_size_mb=1, timeout=60)
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    assert trainer.strategy is strategy
    assert trainer.world_size == 2
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 0}


def fit_on_two_nodes(strategy: StrategyArgument, recipe: Recipe) -> tuple[Fitted, tuple[int, int], list[str]]:
    """Each half of the ranks is a node; also the sizes of shard and replica group, and what was logged."""
    rank, devices = dist.get_rank(), dist.get_world_size() // 2
    os.environ.update(NODE_RANK=str(rank // devices), LOCAL_RANK=str(rank % devices))
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    try:
        lit = Lit(recipe)
        trainer = make_trainer(strategy, devices=devices, num_nodes=2, accumulate_grad_batches=recipe.micro)
        trainer.fit(lit)
    finally:
        logger.removeHandler(handler)
    mesh = trainer.strategy.engine.placement.mesh
    return observe(trainer, lit), (mesh.shard.size, mesh.replica.size), messages


@ranks(4)
@pytest.mark.parametrize(("stage", "size"), [(0, None), (1, None), (3, 4)])
def test_each_node_shards_by_itself(pool: RankPool, stage: int, size: int | None) -> None:
    """Unless `shard_size` says otherwise; stage 0 shards nothing anyway."""
    recipe = Recipe(optimizer="momentum", micro=2)
    strategy: dict[str, Any] = {"stage": stage, "shard_size": size}
    results = pool.run(fit_on_two_nodes, strategy, recipe)
    expected = 1 if stage == 0 else size or 2
    assert {sizes for _, sizes, _ in results} == {(expected, 4 // expected)}
    told = any("shard_size=2, the ranks of a node" in message for message in results[0][2])
    assert told == (stage > 0 and size is None)
    assert_same(results[0][0].weights, reference(strategy, recipe, 4, shard_size=expected).weights)


@ranks(2)
def test_nodes_of_one_rank_shard_over_all_of_them(pool: RankPool) -> None:
    results = pool.run(fit_on_two_nodes, {"stage": 1}, Recipe())
    assert {sizes for _, sizes, _ in results} == {(2, 1)}
    assert any("shard_size=2, the number of nodes" in message for message in results[0][2])


@ranks(2)
@pytest.mark.parametrize(
    "options",
    [{"units": ["*.blocks.1", nn.Linear], "bucket_size_mb": 1e-4}, {"units": []}],
    ids=str,
)
def test_units_and_bucket_size_change_no_number(pool: RankPool, options: dict[str, Any]) -> None:
    strategy = {"stage": 3, **options}
    results = pool.run(fit, strategy, MOMENTUM)
    assert_same(results[0].weights, reference(strategy, MOMENTUM, pool.world_size).weights)


def fit_twice_then_test_with_the_first() -> tuple[list[torch.dtype], bool]:
    torch.manual_seed(0)
    module = BoringModel()
    first, second = (
        Trainer(
            accelerator=place.accelerator(),
            devices=dist.get_world_size(),
            strategy="zero3",
            precision="bf16-true",
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        for _ in range(2)
    )
    first.fit(module)
    second.fit(module)
    first.test(module, verbose=False)
    engine = first.strategy.engine
    return [p.dtype for p in module.parameters()], engine.holds(module.parameters())


@ranks(2)
def test_a_trainer_whose_engine_another_released_shards_again(pool: RankPool) -> None:
    for dtypes, holds in pool.run(fit_twice_then_test_with_the_first):
        assert set(dtypes) == {torch.bfloat16}
        assert holds


def end_in_vain(fails: bool) -> tuple[str, list[str], bool]:
    """A fit whose device cannot be left in order: the error and its notes, and whether the rest was still torn down."""
    trainer = make_trainer("zero2", max_steps=1, callbacks=[Failing()] if fails else [])
    assert trainer.strategy.accelerator is not None
    with (
        mock.patch.object(trainer.strategy.accelerator, "teardown", side_effect=RuntimeError("the device is lost")),
        mock.patch.object(trainer.strategy.checkpoint_io, "teardown") as rest,
        pytest.raises((ZeroDivisionError, RuntimeError)) as raised,
    ):
        trainer.fit(Lit(MOMENTUM))
    return repr(raised.value), getattr(raised.value, "__notes__", []), rest.called


class Failing(Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise ZeroDivisionError("the first error")


def test_an_error_of_the_teardown_hides_none_from_before(pool1: RankPool) -> None:
    ((error, notes, _),) = pool1.run(end_in_vain, True)
    assert error == "ZeroDivisionError('the first error')"
    assert notes == ["The teardown after it failed too: RuntimeError('the device is lost')"]
    ((error, _, torn_down),) = pool1.run(end_in_vain, False)
    assert (error, torn_down) == ("RuntimeError('the device is lost')", True)


class Look(Callback):
    """Notes whether an object is still there when the fit has its shards."""

    def __init__(self, earlier: weakref.ref[Any]) -> None:
        self.earlier = earlier

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.gone = self.earlier() is None


def fit_fold_after_fold() -> bool:
    """Whether the engine of a Trainer is gone when the next one has its own, although Python collects nothing."""
    gc.disable()
    try:
        trainer = make_trainer("zero2")
        trainer.fit(Lit(MOMENTUM))
        assert isinstance(trainer.strategy, ZeroStrategy)
        look = Look(weakref.ref(trainer.strategy.engine))
        trainer = make_trainer("zero2", callbacks=[look])
        trainer.fit(Lit(MOMENTUM))
    finally:
        gc.enable()
    return look.gone


def test_a_fold_takes_no_memory_in_the_next(pool1: RankPool) -> None:
    assert pool1.run(fit_fold_after_fold) == [True]


class MadeInHooks(Lit):
    """Makes its model in `configure_model`, partly compiled, and a buffer in `setup`."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        del self.model

    def setup(self, stage: str) -> None:
        self.register_buffer("seen", torch.ones(2))

    def configure_model(self) -> None:
        if self.trainer.world_size and not hasattr(self, "model"):
            self.model = self.recipe.make_model()
            self.model.norm = torch.compile(self.model.norm)  # type: ignore[assignment]


def send_results(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], str] | None:
    """What the main process's module has after a fit in 16 bits, what is right, and what it is warned of."""
    lit, trainer = MadeInHooks(MOMENTUM), make_trainer(name, precision="bf16-true")
    launcher = GatheringLauncher(trainer.strategy, "spawn")
    with torch.compiler.set_stance("force_eager"):
        trainer.fit(lit)
        fitted, right = launcher._collect_rank_zero_results(trainer, None), state_of(trainer)
        trainer.test(lit, verbose=False)
    tested = launcher._collect_rank_zero_results(trainer, None)
    if fitted is None:
        return None
    assert tested.weights_path is None
    main, trainer = MadeInHooks(MOMENTUM), make_trainer(name, precision="bf16-true")
    trainer.strategy.connect(main)
    drawn = torch.get_rng_state()
    with pytest.warns(UserWarning, match="are lost") as warned:
        GatheringLauncher(trainer.strategy, "spawn")._recover_results_in_main_process(fitted, trainer)
    assert torch.equal(torch.get_rng_state(), drawn)
    (warning,) = [text for each in warned if "are lost" in (text := str(each.message))]
    return plain_names(main.state_dict()), {f"model.{name}": value for name, value in right.items()}, warning


@ranks(2)
@main_names
def test_the_main_process_gets_weights_at_full_precision(pool: RankPool, name: str) -> None:
    """And those of layers that `configure_model` makes; others are named."""
    (sent, right, warned), others = pool.run(send_results, name)
    assert others is None
    assert warned.startswith("1 of the tensors")
    assert " seen. " in warned
    del right["model.seen"]
    assert_same(sent, right)
    assert {value.dtype for value in sent.values()} == {torch.float32}
