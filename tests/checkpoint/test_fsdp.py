"""FSDP's full checkpoints: one file whose optimizer state is numbered in the order of the module's parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint.resuming import Resumable, run
from helpers.ranks import RankPool, ranks
from strategy.fits import Lit, Recipe, assert_same, assert_same_states
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType
from torch.optim import Optimizer

RECIPE = Recipe(model="frozen", steps=4, options={"lr": 0.05})


class Reversed(Resumable):
    """Groups in another order than the module's. A transformer has parameters of equal shape: only names tell them."""

    def configure_optimizers(self) -> Optimizer:
        first, *rest = reversed(list(self.parameters()))
        return torch.optim.AdamW([{"params": rest}, {"params": [first], "weight_decay": 0.0}], lr=0.05)


class OneGroup(Resumable):
    """All parameters, in another order than the module's, which in the file looks like torch's own numbers."""

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(list(reversed(list(self.parameters()))), lr=0.05)


def as_fsdp_saves(path: Path, module: Lit) -> None:
    """By torch's own function, which gets parameter names, as ours are, and is the last thing that FSDP runs."""
    checkpoint = torch.load(path, weights_only=True)
    numbered = [
        FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, module)
        for state in checkpoint["optimizer_states"]
    ]
    del checkpoint["lightning_zero"]
    torch.save(checkpoint | {"optimizer_states": numbered}, path)


@ranks(2)
@pytest.mark.parametrize(
    ("name", "module"), [("zero3", Reversed), pytest.param("zero2_offload", OneGroup, marks=pytest.mark.slow)]
)
def test_a_full_checkpoint_of_fsdp_resumes(pool: RankPool, name: str, module: type[Lit], tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    whole = pool.run(run, name, RECIPE, module, steps=4, save=(2, str(path)))[0]
    as_fsdp_saves(path, module(RECIPE))
    resumed = pool.run(run, name, replace(RECIPE, seed=7), module, steps=4, resume=str(path))[0]
    assert_same(resumed.weights, whole.weights)
    assert_same_states(resumed.optimizer_states[0], whole.optimizer_states[0])
