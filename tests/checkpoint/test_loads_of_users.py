"""What modules and callbacks do when a checkpoint is loaded: when they are asked, and with what, is as under ddp."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint.resuming import Resumable, SaveAfter
from helpers import models
from helpers.ranks import RankPool, ranks
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, StochasticWeightAveraging, Timer
from strategy.fits import (
    DDP,
    Fitted,
    Recipe,
    assert_same,
    assert_same_states,
    main_names,
    make_trainer,
    observe,
    state_of,
)
from torch import Tensor, nn
from torch.optim import Optimizer

RECIPE = Recipe(optimizer="momentum", steps=3)


class Scale(nn.Module):
    """Has another layout since version 2, reads what it has loaded, and keeps it bounded by hand."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))
        self.seen: list[Any] = []
        self.register_load_state_dict_post_hook(type(self).bound)

    def forward(self, loss: Tensor) -> Tensor:
        return loss * self.scale.mean()

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any) -> None:
        self.seen.append((metadata.get("version"), sorted(state), float(self.scale.sum())))
        state[f"{prefix}scale"] = state[f"{prefix}scale"] + 0.5
        super()._load_from_state_dict(state, prefix, metadata, *args)

    def bound(self, incompatible: Any) -> None:
        self.seen.append(self.scale.tolist())
        self.scale.data.clamp_(max=1.25)


class Thing:
    """What the safe loader refuses."""


class Own(Resumable):
    """Notes what happens while it is restored, in order."""

    def __init__(self, recipe: Recipe, late: bool = False) -> None:
        super().__init__(recipe)
        self.late = late
        if late:
            del self.model
        else:
            self.build()

    def configure_model(self) -> None:
        if self.late and not hasattr(self, "model"):
            self.build()

    def build(self) -> None:
        self.model = self.recipe.make_model()
        self.scale = Scale()
        self.scale.seen = self.notes

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.scale(super().training_step(batch, index))

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.notes.append(float(self.scale(models.next_token_loss(self.model, batch))))

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        self.notes.append(("load", len(state), strict))
        renamed = {name.replace("moved.", "model."): value for name, value in state.items()}
        if hasattr(state, "_metadata"):
            renamed = type(state)(renamed)
            renamed._metadata = state._metadata
        return super().load_state_dict(renamed, strict, assign)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["thing"] = Thing()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert isinstance(checkpoint["thing"], Thing)
        self.notes.append(("module", len(checkpoint["state_dict"])))
        state = checkpoint["state_dict"]
        state["moved.norm.weight"] = state.pop("model.norm.weight")

    def on_fit_start(self) -> None:
        self.notes.append("fit starts")


class Noting(Callback):
    def __init__(self, notes: list[Any]) -> None:
        self.notes = notes

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.notes.append("callback's hook")

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.notes.append(("callback", state_dict))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.notes.append("callback's fit starts")


def restore(strategy: str, path: str, late: bool) -> Fitted:
    """A fit saves; others resume from it, go back to it, and load it into another module of the same Trainer."""
    flags: dict[str, Any] = {"max_epochs": -1, "limit_val_batches": 1, "check_val_every_n_epoch": None}
    flags["val_check_interval"] = 100
    first = make_trainer(strategy, max_steps=2, callbacks=[Noting([]), SaveAfter(2, path)], **flags)
    first.fit(Own(RECIPE, late))
    lit = Own(Recipe(optimizer="momentum", steps=3, seed=7), late)
    lit.strict_loading = True
    trainer = make_trainer(strategy, max_steps=4, callbacks=[Noting(lit.notes)], **flags)
    trainer.fit(lit, ckpt_path=path, weights_only=False)
    lit.notes.append("validation")
    trainer.validate(lit, ckpt_path=path, weights_only=False, verbose=False)
    weights = state_of(trainer)
    lit.notes.append([value.tolist() for name, value in weights.items() if trainer.is_global_zero])
    other = Own(Recipe(optimizer="momentum", steps=3, seed=8), late)
    trainer.validate(other, ckpt_path=path, weights_only=False, verbose=False)
    lit.notes += other.notes
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(other, ckpt_path=path, weights_only=False)
    return observe(trainer, lit)


@ranks(2)
@pytest.mark.parametrize(
    ("name", "late"),
    [("zero3", False), ("zero3", True), pytest.param("zero2_offload", False, marks=pytest.mark.slow)],
)
def test_own_methods_and_hooks_are_called_as_under_ddp(pool: RankPool, name: str, late: bool, tmp_path: Path) -> None:
    """Late: the model is made in `configure_model`, in shards."""
    expected = pool.run(restore, DDP, str(tmp_path / "ddp.ckpt"), late)
    actual = pool.run(restore, name, str(tmp_path / "zero.ckpt"), late)
    assert actual[0].notes == expected[0].notes
    assert_same(actual[0].weights, expected[0].weights)


class Finetuning(BackboneFinetuning):
    def __init__(self) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, verbose=False)


class Unfreezing(BaseFinetuning):
    """Resumes what it has unfrozen; Lightning's class restores the groups alone, and leaves it frozen."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        if len(trainer.optimizers[0].param_groups) > 1:
            self.make_trainable(pl_module.backbone)


class WithBackbone(Resumable):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.backbone = nn.Linear(5, 5, dtype=recipe.dtype)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return super().training_step(batch, index) + self.backbone(torch.ones(5)).square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def resume_with(
    strategy: str, path: str, make_callback: Any, dtype: torch.dtype, rounded: bool = False, **flags: Any
) -> list[Fitted]:
    """A whole run, which saves in the last epoch but one, in which the callback has begun its work, and the rest.

    Rounded: the rest begins with 16-bit weights, as other strategies save them.
    """
    fits: list[Fitted] = []
    for resume in (None, path):
        if resume and rounded:
            if dist.get_rank() == 0:
                saved = torch.load(path, weights_only=False)
                saved["state_dict"] = {name: value.to(dtype) for name, value in saved["state_dict"].items()}
                torch.save(saved, path)
            dist.barrier()
        callbacks = [make_callback(), *([] if resume else [SaveAfter(8, path)])]
        trainer = make_trainer(strategy, max_epochs=4, callbacks=callbacks, **flags)
        lit = WithBackbone(Recipe(optimizer="momentum", steps=3, seed=7 if resume else 0, dtype=dtype))
        trainer.fit(lit, ckpt_path=resume)
        assert trainer.global_step == 3 * 4
        fits.append(observe(trainer, lit))
    return fits


@ranks(2)
@main_names
@pytest.mark.parametrize(
    "make_callback",
    [Finetuning, functools.partial(StochasticWeightAveraging, 0.01, swa_epoch_start=1)],
    ids=["finetuning", "swa"],
)
def test_callbacks_resume_in_the_middle_of_their_work(
    pool: RankPool, name: str, make_callback: Any, tmp_path: Path
) -> None:
    _, expected = pool.run(resume_with, DDP, str(tmp_path / "ddp.ckpt"), make_callback, torch.float32)[0]
    _, actual = pool.run(resume_with, name, str(tmp_path / "zero.ckpt"), make_callback, torch.float32)[0]
    assert_same(actual.weights, expected.weights)


@ranks(2)
@main_names
def test_16_bit_weights_that_were_unfrozen_keep_their_masters(pool: RankPool, name: str, tmp_path: Path) -> None:
    """A resumed run knows only after it has loaded the weights that an optimizer has them."""
    options = Unfreezing, torch.bfloat16
    whole, resumed = pool.run(resume_with, name, str(tmp_path / "it.ckpt"), *options, precision="bf16-mixed")[0]
    assert resumed.weights["backbone.weight"].dtype == torch.float32
    assert_same(resumed.weights, whole.weights)
    assert_same_states(resumed.optimizer_states[0], whole.optimizer_states[0])
    _, other = pool.run(resume_with, name, str(tmp_path / "it.ckpt"), *options, True, precision="bf16-mixed")[0]
    states = other.optimizer_states[0].values()
    assert {value.dtype for state in states for value in state.values()} == {torch.float32}


def time_out(strategy: str, path: str) -> int:
    timer = Timer(duration={"seconds": 3600})
    trainer = make_trainer(strategy, max_epochs=-1, max_steps=2, callbacks=[timer, SaveAfter(2, path)])
    trainer.fit(Resumable(RECIPE))
    saved = torch.load(path, weights_only=False)
    (key,) = [key for key in saved["callbacks"] if "Timer" in key]
    saved["callbacks"][key]["time_elapsed"] = {"train": 7200.0, "sanity_check": 0, "validate": 0, "test": 0}
    trainer.strategy.barrier()
    if trainer.global_rank == 0:
        torch.save(saved, path)
    trainer.strategy.barrier()
    trainer = make_trainer(strategy, max_epochs=-1, max_steps=9, callbacks=[Timer(duration={"seconds": 3600})])
    trainer.fit(Resumable(RECIPE), ckpt_path=path)
    return trainer.global_step


@ranks(2)
@main_names
def test_time_that_has_run_out_before_is_out(pool: RankPool, name: str, tmp_path: Path) -> None:
    expected = pool.run(time_out, DDP, str(tmp_path / "ddp.ckpt"))
    assert pool.run(time_out, name, str(tmp_path / "zero.ckpt")) == expected
