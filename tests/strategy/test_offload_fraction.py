"""A part of the state is offloaded: the same fit, the same checkpoint, and a run that resumes with another part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import RankPool
from strategy.fits import Lit, Recipe, assert_same, assert_same_states, fit, make_trainer, observe

from lightning_zero import ZeroStrategy
from lightning_zero.planning.memory import held_by, planned_parts

RECIPE = Recipe(steps=3, micro=2)
FLAGS: dict[str, Any] = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
PARTS = ("masters", "optimizer_state", "param_shards", "sharded_gradient")


class Held(Lit):
    """Notes what is held after the last step, by place, and what was planned."""

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, ZeroStrategy)
        assert strategy.memory is not None
        held, planned = held_by(strategy.engine), planned_parts(strategy.memory.plan)
        self.notes += [(name, held[name], planned[name]) for name in PARTS]


def offloading(stage: int, fraction: float) -> dict[str, Any]:
    options = {"stage": stage, "offload_optimizer": "cpu", "offload_fraction": fraction, "bucket_size_mb": 0.0003}
    return options | ({"offload_params": "cpu"} if stage == 3 else {})


def fit_and_resume(stage: int, folder: str) -> None:
    """On CPU ranks, where device and host are the same memory and different stores."""
    flags = FLAGS | {"precision": "bf16-true"}
    whole = fit(offloading(stage, 1.0), RECIPE, Held, max_epochs=2, **flags)
    saved = {}
    for fraction in (1.0, 0.5):
        path = str(Path(folder, f"{fraction}.ckpt"))
        trainer, lit = make_trainer(offloading(stage, fraction), **flags), Held(RECIPE)
        trainer.fit(lit)
        trainer.save_checkpoint(path)
        observe(trainer, lit)
        assert all(held == planned for _, held, planned in lit.notes)
        assert any(held.device for _, held, _ in lit.notes) == (fraction < 1)
        assert all(held.host for name, held, _ in lit.notes if stage == 3 or name != "param_shards")
        saved[fraction] = torch.load(path, weights_only=True)
    part, everything = saved[0.5], saved[1.0]
    assert_same(part["state_dict"], everything["state_dict"])
    assert_same_states(*(each["optimizer_states"][0]["state"] for each in (part, everything)))
    for before, after in ((0.5, 1.0), (1.0, 0.5)):
        path = str(Path(folder, f"{before}.ckpt"))
        resumed = fit(offloading(stage, after), RECIPE, Held, ckpt_path=path, max_epochs=2, **flags)
        assert resumed.steps == whole.steps == 6
        assert_same(resumed.weights, whole.weights)
        assert_same_states(resumed.optimizer_states[0], whole.optimizer_states[0])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fits_and_checkpoints_are_the_same_for_every_fraction(pool2: RankPool, stage: int, tmp_path: Path) -> None:
    pool2.run(fit_and_resume, stage, str(tmp_path))
