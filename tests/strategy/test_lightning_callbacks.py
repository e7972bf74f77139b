"""Lightning's callbacks that average, swap, freeze, prune: as without a strategy, at every stage."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import models
from helpers.ranks import RankPool, ranks
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from strategy.fits import (
    DDP,
    MOMENTUM,
    Fitted,
    Lit,
    Recipe,
    assert_close,
    assert_same,
    fit,
    main_names,
    main_names_and,
    make_trainer,
    observe,
    state_of,
)
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from lightning_zero import full_param

Weights = dict[str, Tensor]
MOMENTUM_16 = dataclasses.replace(MOMENTUM, dtype=torch.bfloat16)


# --------------------------------------------------------------------------------------------------- averaging


class Recorder(Callback):
    """Keeps the full-precision weights after every step; rank 0 has them whole."""

    def __init__(self) -> None:
        self.weights: list[Weights] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.weights.append(state_of(trainer))


def fit_and_record(name: str, recipe: Recipe, **flags: Any) -> list[Weights]:
    recorder = Recorder()
    fit(name, recipe, callbacks=[recorder], **flags)
    return recorder.weights


def moving_average(weights: Sequence[Weights], decay: float) -> Weights:
    """Lightning's average begins with the weights after the first step."""
    mean = {name: value.clone() for name, value in weights[0].items()}
    for current in weights[1:]:
        for name, value in current.items():
            mean[name] = decay * mean[name] + (1 - decay) * value
    return mean


def make_averaging() -> WeightAveraging:
    return EMAWeightAveraging(decay=0.75)


def fit_averaged(name: str, module: type[Lit] = Lit, recipe: Recipe = MOMENTUM, **flags: Any) -> Fitted:
    return fit(name, recipe, module, callbacks=[make_averaging()], limit_val_batches=1, val_check_interval=1, **flags)


class Reading(Lit):
    """Below stage 3 a hook before validation reads the average."""

    def on_validation_epoch_start(self) -> None:
        if not any(bucket.shards_params for bucket in self.trainer.strategy.engine.buckets):  # type: ignore[attr-defined]
            for parameter in self.parameters():
                seen = parameter.detach().clone()
                assert torch.equal(seen, full_param(parameter).to(seen.dtype))


@ranks(2)
@pytest.mark.parametrize(
    ("name", "precision", "recipe"),
    [
        ("zero2_offload", "bf16-true", MOMENTUM),
        ("zero2_offload", "bf16-mixed", MOMENTUM_16),
        pytest.param("zero2_offload", "32-true", MOMENTUM, marks=pytest.mark.slow),
        pytest.param("zero3", "bf16-mixed", MOMENTUM, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:.*keeps a full copy")
def test_weight_averaging(pool: RankPool, name: str, precision: str, recipe: Recipe) -> None:
    """Validation after every step swaps the average in and out again; training must not notice, nor the average.

    That of 16-bit parameters is one of their masters, also where the module had them before.
    """
    results = pool.run(fit_averaged, name, Reading, recipe, precision=precision)
    recorded = pool.run(fit_and_record, name, recipe, precision=precision)[0]
    assert_same(results[0].weights, moving_average(recorded, 0.75))
    assert not torch.equal(results[0].weights["head.weight"], recorded[-1]["head.weight"])


class Normalized(Lit):
    """Its statistics are another average on each rank."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model.head = nn.Sequential(self.model.head, nn.Flatten(0, 1), nn.BatchNorm1d(models.VOCAB))
        self.model.head.append(nn.Unflatten(0, (-1, models.LENGTH)))


def logged_and_validated(name: str, folder: str) -> list[float]:
    """The loss by which a checkpoint was chosen, and that of the checkpoint."""
    checkpoints = ModelCheckpoint(folder, monitor="val_loss")
    flags = {"callbacks": [make_averaging(), checkpoints], "enable_checkpointing": True, "limit_val_batches": 2}
    make_trainer(name, **flags).fit(Normalized(MOMENTUM))
    later = make_trainer(name, limit_val_batches=2)
    validated = later.validate(Normalized(MOMENTUM), ckpt_path=checkpoints.best_model_path, verbose=False)
    return [float(checkpoints.best_model_score), validated[0]["val_loss"]]


@ranks(2)
@pytest.mark.parametrize("name", ["zero2_offload", "zero3"])
@pytest.mark.filterwarnings("ignore:.*keeps a full copy")
def test_the_loss_in_validation_is_that_of_the_checkpoint(pool: RankPool, name: str, tmp_path: Path) -> None:
    """Of the average, with the buffers that are saved: those of rank 0."""
    for logged, validated in pool.run(logged_and_validated, name, str(tmp_path)):
        assert logged == validated


class ValidationLosses(Lit):
    def validation_step(self, batch: Tensor, index: int) -> None:
        self.notes.append(models.next_token_loss(self.model, batch).item())


@ranks(2)
@main_names
@pytest.mark.filterwarnings("ignore:.*keeps a full copy")
def test_validation_sees_the_average(pool: RankPool, name: str) -> None:
    results, expected = (pool.run(fit_averaged, each, ValidationLosses) for each in (name, DDP))
    assert [result.notes for result in results] == [result.notes for result in expected]
    assert len(set(results[0].notes)) == MOMENTUM.steps


def fit_in_two_halves(name: str, recipe: Recipe, folder: str, precision: str) -> Weights:
    """Averages, saves after the first epoch, and goes on from the checkpoint with everything new."""
    flags: dict[str, Any] = {"precision": precision, "limit_val_batches": 1}
    path = f"{folder}/half.ckpt"
    first = make_trainer(name, callbacks=[make_averaging(), SavesAfterTheFirstEpoch(path)], max_epochs=2, **flags)
    lit = Lit(recipe)
    first.fit(lit)
    whole = observe(first, lit).weights
    second = make_trainer(name, callbacks=[make_averaging()], max_epochs=2, **flags)
    again = Lit(recipe)
    second.fit(again, ckpt_path=path)
    resumed = observe(second, again).weights
    if whole:
        assert_same(resumed, whole)
    return whole


class SavesAfterTheFirstEpoch(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


@ranks(2)
@main_names_and("precision", "bf16-mixed", "32-true")
@pytest.mark.parametrize("recipe", [MOMENTUM, MOMENTUM_16], ids=["32", "16"])
@pytest.mark.filterwarnings("ignore:.*keeps a full copy")
def test_averaging_resumes(pool: RankPool, name: str, precision: str, recipe: Recipe, tmp_path: Path) -> None:
    assert pool.run(fit_in_two_halves, name, recipe, str(tmp_path), precision)[0]


def fit_averaged_twice(name: str) -> Weights:
    """A second fit copies a module that is sharded by then."""
    lit = Lit(MOMENTUM)
    trainer = make_trainer(name, callbacks=[make_averaging(), StochasticWeightAveraging(0.1, 1)])
    trainer.fit(lit)
    trainer.test(lit, verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(lit)
    return state_of(trainer)


@ranks(2)
@main_names
@pytest.mark.filterwarnings("ignore:.*keeps a full copy")
def test_averaging_runs_again(pool: RankPool, name: str) -> None:
    assert_same(pool.run(fit_averaged_twice, name)[0], pool.run(fit_averaged_twice, DDP)[0])


def fit_swa(name: str, module: type[Lit], recipe: Recipe = MOMENTUM, **flags: Any) -> Fitted:
    swa = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=2)
    return fit(name, recipe, module, callbacks=[swa], max_epochs=4, **flags)


class Normed(Lit):
    """With a BatchNorm, whose statistics the callback gathers anew in an epoch more, without backward."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.norm = nn.BatchNorm1d(models.VOCAB)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        logits = self.norm(self.model(batch[:, :-1]).flatten(0, 1))
        return nn.functional.cross_entropy(logits, batch[:, 1:].flatten())

    def configure_optimizers(self) -> Optimizer:
        return self.recipe.make_optimizer(self)


@ranks(2)
@main_names_and("module", Normed, Lit)
@pytest.mark.filterwarnings("ignore:.*keeps a full copy")
def test_stochastic_weight_averaging(pool: RankPool, name: str, module: type[Lit]) -> None:
    assert_same(pool.run(fit_swa, name, module)[0].weights, pool.run(fit_swa, DDP, module)[0].weights)


class Rounded(Lit):
    """Has fp32 weights, with the values of bf16 ones."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model.to(torch.bfloat16).float()


@ranks(2)
@main_names
@pytest.mark.filterwarnings("ignore:.*keeps a full copy")
def test_stochastic_averages_of_16_bit_weights_are_those_of_their_masters(pool: RankPool, name: str) -> None:
    """Whether the module had 16 bits before or not."""
    of = ((Lit, MOMENTUM_16), (Rounded, MOMENTUM))
    actual, expected = (pool.run(fit_swa, name, *each, precision="bf16-true")[0].weights for each in of)
    assert_same(actual, expected)


@ranks(2)
def test_what_averaging_costs_at_stage_3_is_said(pool: RankPool) -> None:
    assert pool.run(fit_and_catch_warnings, "zero3") == [True, False]
    assert pool.run(fit_and_catch_warnings, "zero2") == [False, False]


def fit_and_catch_warnings(name: str) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(name, Recipe(steps=1), callbacks=[make_averaging()])
    return any("EMAWeightAveraging keeps a full copy of Lit" in str(w.message) for w in caught)


# -------------------------------------------------------------------------------------------------- finetuning


class Backbone(Lit):
    """A backbone and a head; only the head is in the optimizer when training starts."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.backbone = self.model
        torch.manual_seed(1)
        self.norm = nn.BatchNorm1d(models.VOCAB)
        self.head = nn.Linear(models.VOCAB, models.VOCAB)
        self.backbone.head = nn.Linear(6, models.VOCAB, bias=False)  # not tied: it would be in a group twice
        self.backbone.bn = nn.BatchNorm1d(models.VOCAB)
        self.to(recipe.dtype)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        features = self.backbone.bn(self.backbone(batch[:, :-1]).flatten(0, 1))
        return nn.functional.cross_entropy(self.head(self.norm(features)), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Optimizer:
        return SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class ByBlocks(BaseFinetuning):
    """Unfreezes one block with each epoch, and freezes the first again."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        if 1 <= epoch <= 2:
            self.unfreeze_and_add_param_group(pl_module.backbone.blocks[epoch - 1], optimizer, initial_denom_lr=2)
        if epoch == 3:
            self.freeze(pl_module.backbone.blocks[0])


def fit_finetuning(name: str, kind: str, module: type[Lit] = Backbone) -> Fitted:
    if kind == "backbone":
        callback: Callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=double, verbose=True)
    else:
        callback = ByBlocks()
    return fit(name, DOUBLE, module, callbacks=[callback], max_epochs=4)


def double(epoch: int) -> float:
    return 2.0


class OfTwoRanks(Backbone):
    """Trains in one process on what two ranks have. (ddp does not average what was frozen when it began.)"""

    def train_dataloader(self) -> Any:
        batches = [torch.stack(micro) for step in self.recipe.batches(2) for micro in step]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        first, second = (super(OfTwoRanks, self).training_step(one, index) for one in batch)
        return (first + second) / 2


DOUBLE = Recipe(optimizer="momentum", steps=4, dtype=torch.float64)


@main_names_and("kind", "blocks", "backbone")
@pytest.mark.filterwarnings("ignore:.*duplicate parameters", "ignore:.*already exist within another group")
def test_finetuning(pool1: RankPool, pool2: RankPool, name: str, kind: str) -> None:
    expected = pool1.run(fit_finetuning, "auto", kind, OfTwoRanks)[0].weights
    actual = pool2.run(fit_finetuning, name, kind)[0].weights
    statistics = {key for key in expected if "running" in key or "tracked" in key}  # each rank has its own
    assert_close(*({k: v for k, v in weights.items() if k not in statistics} for weights in (actual, expected)))
    assert not torch.equal(actual["blocks.0.up.weight"], DOUBLE.make_model().blocks[0].up.weight)


# ----------------------------------------------------------------------------------------------------- pruning


def fit_pruned(name: str, permanent: bool, path: str, **flags: Any) -> Fitted:
    lit = Lit(MOMENTUM)
    chosen = [(lit.model.blocks[0].up, "weight"), (lit.model.blocks[1].project, "weight"), (lit.model.norm, "bias")]
    pruning = ModelPruning(
        "l1_unstructured",
        parameters_to_prune=chosen,
        amount=0.3,
        make_pruning_permanent=permanent,
        use_lottery_ticket_hypothesis=False,
    )
    trainer = make_trainer(name, callbacks=[pruning, SavesAfterTheFirstEpoch(path)], max_epochs=3, **flags)
    trainer.fit(lit)
    return observe(trainer, lit)


@ranks(2)
@main_names_and("permanent", True, False)
def test_pruning(pool: RankPool, name: str, permanent: bool, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{n}.ckpt") for n in ("ddp", "zero")]
    expected = pool.run(fit_pruned, DDP, permanent, paths[0])[0]
    actual = pool.run(fit_pruned, name, permanent, paths[1])[0]
    assert_same(actual.weights, expected.weights)
    if not permanent:
        assert "blocks.0.up.weight_orig" in actual.weights
    saved = [torch.load(path, weights_only=True)["state_dict"] for path in paths]
    assert_same(saved[1], saved[0])
