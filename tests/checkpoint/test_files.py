"""What a checkpoint file holds, and who can read it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.resuming import Resumable, save_at_end
from helpers import models
from helpers.ranks import RankPool, ranks
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from strategy.fits import (
    Fitted,
    Lit,
    Recipe,
    assert_same,
    full_batch_loss,
    main_names,
    make_trainer,
    observe,
    state_of,
)
from torch import Tensor, nn

from lightning_zero import gathered_parameters

RECIPE = Recipe(optimizer="adamw", scheduled=True, options={"lr": 0.05})


def load(path: str) -> dict[str, Any]:
    """As a careful user reads a file from elsewhere."""
    return torch.load(path, weights_only=True, map_location="cpu")


def weights_in(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): value for name, value in checkpoint["state_dict"].items()}


@dataclasses.dataclass
class Saved:
    """A file at the end of a fit on two ranks, and the weights of then."""

    name: str
    path: str
    weights: dict[str, Tensor]


@pytest.fixture(
    scope="module",
    params=[
        ("zero3", "bf16-mixed"),
        pytest.param(("zero2_offload", "32-true"), marks=pytest.mark.slow),
        pytest.param(("zero1", "bf16-true"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def saved(request: pytest.FixtureRequest, pool2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    name, precision = request.param
    path = str(tmp_path_factory.mktemp("files") / "a.ckpt")
    return Saved(name, path, pool2.run(save_at_end, name, RECIPE, path, precision=precision)[0].weights)


def test_a_file_holds_unsharded_named_full_precision_state(saved: Saved) -> None:
    checkpoint = load(saved.path)
    plain = Lit(RECIPE)
    assert list(checkpoint["state_dict"]) == list(plain.state_dict())
    for key, value in plain.state_dict().items():
        assert checkpoint["state_dict"][key].shape == value.shape
        assert checkpoint["state_dict"][key].dtype == torch.float32
    assert_same(weights_in(checkpoint), saved.weights)
    (optimizer,) = checkpoint["optimizer_states"]
    parameters = dict(plain.named_parameters())
    assert optimizer["state"].keys() == parameters.keys()
    for key, state in optimizer["state"].items():
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == parameters[key].shape
        assert state["exp_avg"].dtype == torch.float32
        assert int(state["step"]) == RECIPE.steps
    assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.1, 0.0]
    assert [group["lr"] for group in optimizer["param_groups"]] == [0.05 / 8] * 2
    named = [key for group in optimizer["param_groups"] for key in group["params"]]
    assert sorted(named) == sorted(parameters)
    assert checkpoint["global_step"] == RECIPE.steps
    # Tied parameters are stored once.
    weights = weights_in(checkpoint)
    assert weights["head.weight"].data_ptr() == weights["tokens.weight"].data_ptr()
    assert "model.head.weight" not in optimizer["state"]


def test_plain_pytorch_goes_on_from_a_file(saved: Saved) -> None:
    """The weights, and the state in torch's own format, in a loop without this package."""
    checkpoint = load(saved.path)
    module = Lit(RECIPE)
    module.load_state_dict(checkpoint["state_dict"])
    optimizer = RECIPE.make_optimizer(module.model)
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    state = {key.removeprefix("model."): value for key, value in checkpoint["optimizer_states"][0]["state"].items()}
    for key, parameter in module.model.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], state[key]["exp_avg"])
    models.next_token_loss(module.model, RECIPE.batches(1)[0][0][0]).backward()
    optimizer.step()


def test_load_from_checkpoint(saved: Saved) -> None:
    loaded = Lit.load_from_checkpoint(saved.path, recipe=dataclasses.replace(RECIPE, seed=7))
    assert_same(loaded.model.state_dict(), saved.weights)


def evaluate(name: str, path: str, recipe: Recipe) -> tuple[float, dict[str, Tensor]]:
    """No `fit` before: the module is sharded for evaluation, and saved from there."""
    lit = Lit(dataclasses.replace(recipe, seed=7))
    trainer = make_trainer(name)
    loss = trainer.test(lit, ckpt_path=path, verbose=False)[0]["test_loss"]
    return loss, state_of(trainer)


def test_a_file_is_tested_without_a_fit(pool2: RankPool, saved: Saved) -> None:
    expected = full_batch_loss(saved.weights, RECIPE, RECIPE.batches(2))
    results = pool2.run(evaluate, saved.name, saved.path, RECIPE)
    assert [loss for loss, _ in results] == [pytest.approx(expected, rel=1e-5)] * 2
    assert_same(results[0][1], saved.weights)


@ranks(2)
def test_frozen_parameters_and_buffers_are_stored(pool: RankPool, tmp_path: Path) -> None:
    path, recipe = str(tmp_path / "a.ckpt"), dataclasses.replace(RECIPE, model="frozen")
    pool.run(save_at_end, "zero3", recipe, path, module=WithBuffers)
    checkpoint = load(path)
    plain = WithBuffers(recipe)
    assert list(checkpoint["state_dict"]) == list(plain.state_dict())
    frozen = {key for key, parameter in plain.named_parameters() if not parameter.requires_grad}
    for key in frozen:
        assert torch.equal(checkpoint["state_dict"][key], plain.state_dict()[key])
    assert not frozen & checkpoint["optimizer_states"][0]["state"].keys()
    assert int(checkpoint["state_dict"]["batches"]) == recipe.steps
    assert "unsaved" not in checkpoint["state_dict"]
    assert checkpoint["state_dict"]["extra._extra_state"] == {"any": "thing"}


class ExtraState(nn.Module):
    def get_extra_state(self) -> dict[str, str]:
        return {"any": "thing"}

    def set_extra_state(self, state: dict[str, str]) -> None:
        assert state == {"any": "thing"}


class WithBuffers(Resumable):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("unsaved", torch.zeros(3), persistent=False)
        self.extra = ExtraState()

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        self.batches += 1
        return super().training_step(batch, index)


@ranks(2)
def test_a_parameter_that_was_never_used_has_no_state(pool: RankPool, tmp_path: Path) -> None:
    path, recipe = str(tmp_path / "a.ckpt"), dataclasses.replace(RECIPE, model="optional")
    pool.run(save_at_end, "zero3", recipe, path)
    saved = load(path)["optimizer_states"][0]
    assert not [key for key in saved["state"] if "adapter" in key]
    assert [key for group in saved["param_groups"] for key in group["params"] if "adapter" in key]


def fit_and_keep(
    name: str, folder: str, mode: str, recipe: Recipe
) -> tuple[str, float, float, float, dict[str, Tensor]]:
    """The best file and its score, test losses of the best and the last file by Trainer, and the final weights."""
    keeper = ModelCheckpoint(folder, filename="{step}", monitor="val_loss", mode=mode, save_top_k=2, save_last=True)
    lit = Lit(recipe)
    trainer = make_trainer(name, max_epochs=4, limit_val_batches=None, callbacks=[keeper], enable_checkpointing=True)
    trainer.fit(lit)
    final = state_of(trainer)
    # Before anything is loaded: a checkpoint brings the callback back to when it was written.
    paths = keeper.best_model_path, keeper.last_model_path
    score = float(keeper.best_model_score)
    best = trainer.test(lit, ckpt_path="best", verbose=False)[0]["test_loss"]
    last = trainer.test(lit, ckpt_path=paths[1], verbose=False)[0]["test_loss"]
    return Path(paths[0]).name, score, best, last, final


@ranks(2)
@pytest.mark.parametrize(
    ("name", "mode", "kept"),
    [("zero3", "min", {9, 12}), pytest.param("zero2_offload", "max", {3, 6}, marks=pytest.mark.slow)],
)
def test_model_checkpoint_keeps_the_best_and_the_last(
    pool: RankPool, name: str, mode: str, kept: set[int], tmp_path: Path
) -> None:
    """The loss falls: the best by `max` are the first two, and Lightning copies the last kept one to `last.ckpt`."""
    recipe = Recipe(optimizer="sgd")
    results = pool.run(fit_and_keep, name, str(tmp_path), mode, recipe)
    best_file = f"step={max(kept) if mode == 'min' else min(kept)}.ckpt"
    assert {file.name for file in tmp_path.iterdir()} == {f"step={step}.ckpt" for step in kept} | {"last.ckpt"}

    def loss_in(file: str) -> float:
        return full_batch_loss(weights_in(load(str(tmp_path / file))), recipe, recipe.batches(2))

    for file, score, best, last, _ in results:
        assert file == best_file
        assert score == best == pytest.approx(loss_in(best_file), rel=1e-5)
        assert last == pytest.approx(loss_in("last.ckpt"), rel=1e-5)
    if mode == "min":
        assert_same(weights_in(load(str(tmp_path / "last.ckpt"))), results[0][4])


class Predicting(Lit):
    """Notes the losses of its validation."""

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.notes.append(models.next_token_loss(self.model, batch).item())


def go_on_from_the_last(name: str, folder: str, recipe: Recipe) -> tuple[int, list[float], list[Tensor], Fitted]:
    """Steps after a second fit from "last", what `validate` and `predict` from there give, and the first run."""

    def new(seed: int, **flags: Any) -> tuple[Trainer, Predicting]:
        keeper = ModelCheckpoint(folder, filename="{step}", save_last="link", save_top_k=1)
        trainer = make_trainer(name, callbacks=[keeper], enable_checkpointing=True, **flags)
        return trainer, Predicting(dataclasses.replace(recipe, seed=seed))

    trainer, lit = new(0, max_epochs=2)
    trainer.fit(lit)
    first = observe(trainer, lit)
    trainer, lit = new(1, limit_val_batches=None)
    trainer.validate(lit, ckpt_path="last", verbose=False)
    losses = lit.notes
    trainer, lit = new(2)
    predictions: Any = trainer.predict(lit, ckpt_path="last")
    trainer, lit = new(3, max_epochs=3)
    trainer.fit(lit, ckpt_path="last")
    return trainer.global_step, losses, predictions, first


@ranks(2)
def test_the_last_file_is_a_link(pool: RankPool, tmp_path: Path) -> None:
    """It follows the newest file, of which only one is kept, and every function of the Trainer goes on from it."""
    recipe = Recipe(optimizer="sgd")
    results = pool.run(go_on_from_the_last, "zero3", str(tmp_path), recipe)
    assert {file.name for file in tmp_path.iterdir()} == {"step=9.ckpt", "last.ckpt"}
    assert (tmp_path / "last.ckpt").is_symlink()
    assert (tmp_path / "last.ckpt").resolve() == tmp_path / "step=9.ckpt"
    model = recipe.make_model()
    model.load_state_dict(results[0][3].weights)
    for rank, (steps, losses, predictions, _) in enumerate(results):
        batches = models.rank_batches(recipe.batches(2), rank)
        assert steps == 9
        assert losses == pytest.approx([models.next_token_loss(model, batch).item() for batch in batches], rel=1e-6)
        torch.testing.assert_close(predictions, [model(batch[:, :-1]) for batch in batches])


def keep_weights_only(name: str, folder: str) -> tuple[dict[str, Tensor], str]:
    keeper = ModelCheckpoint(folder, filename="weights", save_weights_only=True)
    trainer = make_trainer(name, callbacks=[keeper], enable_checkpointing=True, precision="bf16-mixed")
    trainer.fit(Lit(RECIPE))
    weights = state_of(trainer)
    with pytest.raises(KeyError) as caught:
        make_trainer(name, max_epochs=2).fit(Lit(RECIPE), ckpt_path=f"{folder}/weights.ckpt")
    return weights, str(caught.value)


@ranks(2)
def test_a_callback_may_keep_weights_alone(pool: RankPool, tmp_path: Path) -> None:
    """At full precision, to be tested and loaded; a fit that would resume from them is refused."""
    (weights, error), _ = pool.run(keep_weights_only, "zero3", str(tmp_path))
    path = str(tmp_path / "weights.ckpt")
    assert "checkpoint contains only the model" in error
    assert "optimizer_states" not in load(path)
    assert_same(weights_in(load(path)), weights)
    assert all(value.dtype == torch.float32 for value in weights.values())
    assert_same(Lit.load_from_checkpoint(path, recipe=RECIPE).model.state_dict(), weights)


class Hooked(Resumable):
    """Adds to the checkpoint and reads it back; on every rank, as Lightning calls the hooks."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = self.trainer.global_step
        self.attributes = {*vars(self.trainer.strategy)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.notes.append((checkpoint["mine"], sorted(checkpoint["state_dict"])))


def save_and_test(name: str, path: str, recipe: Recipe) -> list[Any]:
    lit = Hooked(recipe)
    trainer = make_trainer(name)
    trainer.fit(lit)
    before = {*vars(trainer.strategy)}
    trainer.save_checkpoint(path)
    assert lit.attributes == before  # none is replaced for the time of a save
    trainer.save_checkpoint(path.replace("a.", "weights."), weights_only=True)
    trainer.test(lit, ckpt_path=path, verbose=False)
    return lit.notes


@ranks(2)
def test_the_checkpoint_hooks_of_the_module_run(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    keys = sorted(Hooked(RECIPE).state_dict())
    assert pool.run(save_and_test, "zero3", path, RECIPE) == [[(RECIPE.steps, keys)]] * 2
    assert "optimizer_states" not in load(str(tmp_path / "weights.ckpt"))


def loaded_by_a_user(name: str, path: str, recipe: Recipe) -> dict[str, Tensor]:
    """Weights set by `load_state_dict` between two fits, outside any Trainer."""
    lit = Lit(recipe)
    trainer = make_trainer(name)
    trainer.fit(lit)
    with gathered_parameters(lit):
        lit.load_state_dict(load(path)["state_dict"])
    return state_of(trainer)


@ranks(2)
@main_names
def test_weights_loaded_by_hand_reach_the_masters(pool: RankPool, name: str, tmp_path: Path) -> None:
    path, recipe = str(tmp_path / "a.ckpt"), Recipe(optimizer="momentum")
    saved = pool.run(save_at_end, name, recipe, path)
    loaded = pool.run(loaded_by_a_user, name, path, Recipe(seed=7))
    assert_same(loaded[0], saved[0].weights)
