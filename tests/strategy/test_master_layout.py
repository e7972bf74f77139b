"""Split masters as an option of the strategy: torch's optimizers run as the CPU optimizers do with theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import RankPool
from strategy.fits import Fitted, Lit, Recipe, assert_same, assert_same_states, fit

from lightning_zero import CPUSGD, CPUAdamW, ZeroStrategy
from lightning_zero.planning.memory import held_by, planned_parts

FLAGS: dict[str, Any] = {"precision": "bf16-true", "gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
TORCHS = {"adamw": CPUAdamW, "momentum": CPUSGD}
REMEDY = "strategy.master_layout=split"


class Held(Lit):
    """Notes bytes of masters in host memory, those planned, elements, and whether to split masters is advised."""

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, ZeroStrategy)
        assert strategy.memory is not None
        parts = held_by(strategy.engine), planned_parts(strategy.memory.plan)
        numel = sum(bucket.shard.numel for bucket in strategy.engine.buckets)
        self.notes.append((*(part["masters"].host for part in parts), numel, REMEDY in strategy.memory.changes))


class OnCPU(Held):
    """With the CPU optimizer that computes what the recipe's does, and an argument of its own for the layout."""

    def configure_optimizers(self) -> Any:
        of_torch: torch.optim.Optimizer = super().configure_optimizers()
        names = {"lr", "betas", "momentum"} & of_torch.defaults.keys()
        options = {name: of_torch.defaults[name] for name in names}
        return TORCHS[self.recipe.optimizer](of_torch.param_groups, master_layout="split", **options)


def train(options: dict[str, Any], recipe: Recipe, module: type[Lit]) -> Fitted:
    return fit({"offload_optimizer": "cpu", "bucket_size_mb": 0.0003} | options, recipe, module, **FLAGS)


@pytest.mark.parametrize(
    "options", [{"stage": 2}, pytest.param({"stage": 3, "offload_params": "cpu"}, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("optimizer", TORCHS)
def test_torchs_optimizers_have_split_masters(pool2: RankPool, options: dict[str, Any], optimizer: str) -> None:
    recipe = Recipe(optimizer=optimizer, micro=2)
    expected = pool2.run(train, options, recipe, OnCPU)
    split = pool2.run(train, options | {"master_layout": "split"}, recipe, Held)
    whole = pool2.run(train, options, recipe, Held)
    for rank in range(2):
        (held, planned, numel, advised), (four, _, _, advised_before) = split[rank].notes[0], whole[rank].notes[0]
        assert held == planned == 2 * numel
        assert four == 4 * numel
        assert advised_before
        assert not advised
    assert_same(split[0].weights, expected[0].weights)
    assert_same_states(split[0].optimizer_states[0], expected[0].optimizer_states[0])


def fail(options: dict[str, Any], optimizer: str) -> str:
    with pytest.raises(ValueError, match="to be split") as failed:
        fit({"stage": 2, "master_layout": "split"} | options, Recipe(optimizer=optimizer), **FLAGS)
    return str(failed.value)


@pytest.mark.parametrize(
    ("options", "optimizer", "reason"),
    [
        ({"offload_optimizer": "cpu"}, "rmsprop", "no kernel has its rule"),
        ({"offload_optimizer": "cpu", "native_optimizer": "off"}, "adamw", "native kernels are off"),
        ({}, "adamw", "its state rests where parameters are computed with"),
    ],
)
def test_what_no_kernel_runs_is_refused(pool2: RankPool, options: dict[str, Any], optimizer: str, reason: str) -> None:
    (message, *_) = pool2.run(fail, options, optimizer)
    assert "would be updated by torch's operations" in message
    assert reason in message
    assert "use master_layout='fp32' with others" in message
