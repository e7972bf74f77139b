"""Modules that say themselves what a checkpoint holds: by their own `state_dict`, or as hyperparameters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.resuming import Resumable, SaveAfter
from helpers.ranks import RankPool, ranks
from lightning.pytorch.plugins.io import TorchCheckpointIO
from strategy.fits import Recipe, assert_same, main_names_and, make_trainer, state_of
from torch import Tensor, nn

from lightning_zero import full_param, load_from_checkpoint
from lightning_zero.callbacks import EMA
from lightning_zero.integration.launchers import GatheringLauncher
from lightning_zero.integration.names import STRATEGIES

RECIPE = Recipe(optimizer="momentum", steps=4)


class Filtered(Resumable):
    """Its checkpoints lack a frozen part, as Lightning proposes; other code than torch's own reads its values."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.encoder = nn.Linear(5, 5).requires_grad_(False)
        self.tied = self.model.norm
        self.register_buffer("count", torch.zeros(3))
        self.strict_loading = False

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.count += 1
        return super().training_step(batch, index) + self.encoder(torch.ones(5, dtype=self.encoder.weight.dtype)).sum()

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]  # as users write it
        state = {name: value for name, value in super().state_dict().items() if "encoder" not in name}
        weight = self.model.norm.weight
        return state | {"data": weight.data, "same": weight, "computed": weight * 2, "moved": weight.cpu()}


def save_and_load(name: str, precision: str, path: str) -> tuple[dict[str, Tensor], ...]:
    """What is right, what is saved at the end, what a resumed run has, what a file has, what is loaded from it."""
    flags: dict[str, Any] = {"max_steps": 4, "max_epochs": -1, "precision": precision}
    lit, trainer = Filtered(RECIPE), make_trainer(name, callbacks=[EMA(decay=0.5), SaveAfter(2, path)], **flags)
    trainer.fit(lit)
    right = {f"model.{name}": full_param(parameter).cpu() for name, parameter in lit.model.named_parameters()}
    saved = copy.deepcopy(trainer.strategy.lightning_module_state_dict())  # with the buffers in use
    launcher = GatheringLauncher(trainer.strategy, "spawn")
    if sent := launcher._collect_rank_zero_results(trainer, None):  # as at the end of a fit of spawned ranks
        assert_same(torch.load(sent.weights_path), saved)
    resumed = make_trainer(name, callbacks=[EMA(decay=0.5)], **flags)
    resumed.fit(Filtered(RECIPE), ckpt_path=path)
    trainer.test(lit, ckpt_path=path, verbose=False)
    loaded = trainer.strategy.lightning_module_state_dict()
    of_file = torch.load(path)["state_dict"]
    return right, saved, resumed.strategy.lightning_module_state_dict(), of_file, loaded


@ranks(2)
@main_names_and("precision", "bf16-mixed", "bf16-true", "32-true")
def test_a_modules_own_state_dict_is_what_is_saved(pool: RankPool, name: str, precision: str, tmp_path: Path) -> None:
    right, saved, resumed, of_file, loaded = pool.run(save_and_load, name, precision, str(tmp_path / "it.ckpt"))[0]
    assert_same({name: saved[name] for name in right}, right)
    assert {value.dtype for value in right.values()} == {torch.float32}
    weight = right["model.norm.weight"]
    assert_same(
        {name: saved[name] for name in ("data", "same", "moved")}, dict.fromkeys(("data", "same", "moved"), weight)
    )
    assert torch.equal(saved["computed"], 2 * weight)
    assert not any("encoder" in name for name in (*saved, *of_file))
    assert_same(resumed, saved)
    assert_same(loaded, of_file)


class Composed(Resumable):
    """Has a module among its hyperparameters, which Lightning pickles."""

    def __init__(self, recipe: Recipe, model: nn.Module) -> None:
        super().__init__(recipe)
        self.save_hyperparameters("model", logger=False)
        self.model = model  # type: ignore[assignment]


class OwnIO(TorchCheckpointIO):
    """A user's own."""


def save_composed(name: str, precision: str, folder: str) -> dict[str, Tensor]:
    """Saves one and the same run by each kind of writer."""
    for kind, plugins in (("full", []), ("sharded", []), ("own", [OwnIO()])):
        options = {"checkpoint_format": "full" if kind == "own" else kind}
        trainer = make_trainer(STRATEGIES[name] | options, precision=precision, plugins=plugins)
        model = RECIPE.make_model()
        model.norm.weight.tag = "mine"
        trainer.fit(Composed(RECIPE, model))
        trainer.save_checkpoint(f"{folder}/{kind}")
    return state_of(trainer)


@ranks(2)
@pytest.mark.filterwarnings("ignore:Attribute 'model' is an instance:UserWarning")
@main_names_and("precision", "bf16-mixed", "bf16-true")
def test_modules_among_hyperparameters_have_full_precision(
    pool: RankPool, name: str, precision: str, tmp_path: Path
) -> None:
    right = pool.run(save_composed, name, precision, str(tmp_path))[0]
    assert right["norm.weight"].dtype == torch.float32
    for kind in ("full", "sharded", "own"):
        lit = load_from_checkpoint(Composed, tmp_path / kind, recipe=RECIPE, weights_only=False)
        assert_same(dict(lit.model.named_parameters()), {n: right[n] for n, _ in lit.model.named_parameters()})
        if kind != "sharded":
            saved = torch.load(tmp_path / kind, weights_only=False)
            pickled, state = saved["hyper_parameters"]["model"], saved["state_dict"]
            assert {type(parameter) for parameter in pickled.parameters()} == {nn.Parameter}
            assert vars(pickled.norm.weight) == {"tag": "mine"}
            for name, parameter in pickled.named_parameters():
                assert torch.equal(parameter, right[name])
                assert parameter.data_ptr() == state[f"model.{name}"].data_ptr()  # saved once
