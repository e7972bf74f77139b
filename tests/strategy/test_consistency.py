"""Ranks that go different ways under the Trainer get an error that names where, soon and everywhere."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist
from helpers.ranks import RankError, RankPool, ranks
from strategy.fits import Lit, Recipe, fit
from torch import Tensor, nn
from torch.utils.data import DataLoader

STEPS = 12


class Astray(Lit):
    """From a step on, rank 1 leaves out the first block."""

    step = 0

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if dist.get_rank() == 1 and self.global_step == self.step:
            blocks: Any = self.model.blocks
            self.model.blocks = nn.ModuleList([blocks[1]])
        return super().training_step(batch, index)


class AstrayLate(Astray):
    step = STEPS - 1


@ranks(4)
@pytest.mark.parametrize(
    ("module", "timeout"),
    [
        pytest.param(Astray, 1800.0, id="first"),
        pytest.param(AstrayLate, 5.0, id="late", marks=pytest.mark.slow),
    ],
)
def test_another_branch_on_one_rank_is_an_error_on_all(pool: RankPool, module: type[Lit], timeout: float) -> None:
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run_within(30, fit, {"stage": 3, "timeout": timeout}, Recipe(steps=STEPS), module)
    assert time.monotonic() - began < 20
    failures = caught.value.failures
    assert {failure.kind for failure in failures.values()} == {"CollectiveError"}
    assert all(
        "model.blocks.0" in failure.message or "model.blocks.1" in failure.message for failure in failures.values()
    )
    assert set(failures) == set(range(4))


class Failing(Lit):
    """Rank 1 fails in its second step."""

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if dist.get_rank() == 1 and index == 1:
            raise LookupError("no such token")
        return super().training_step(batch, index)


class Uneven(Lit):
    """Rank 1 has a batch less than the other."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(list(super().loader())[dist.get_rank() :], batch_size=None)  # type: ignore[arg-type]


@ranks(2)
@pytest.mark.parametrize(
    ("module", "cause", "end"),
    [
        (Failing, "because rank 1 failed: LookupError: no such token", "no such token"),
        (Uneven, "a loader ran out of batches: on rank 1 after batch 2 of epoch 0; not yet on rank 0", "the shortest"),
    ],
)
def test_the_rank_that_waits_in_vain_names_the_cause(pool: RankPool, module: type[Lit], cause: str, end: str) -> None:
    with pytest.raises(RankError) as caught:
        pool.run_within(60, fit, {"stage": 2, "timeout": 1.0}, Recipe(steps=3), module)
    failure = caught.value.failures[0]
    assert failure.kind == "CollectiveError"
    assert cause in failure.message
    assert failure.message.splitlines()[-1].endswith(end)


@ranks(2)
def test_small_parameters_stay_readable_by_default(pool: RankPool) -> None:
    """What every Trainer does; the other tests of this folder shard all parameters."""
    for result in pool.run(fit, {"stage": 3, "persistence_numel": 10_000}, Recipe(), ReadsNorms):
        assert len(result.notes) > 0


class ReadsNorms(Lit):
    def on_train_batch_end(self, *_: Any) -> None:
        self.notes += [float(p.sum()) for p in self.model.norm.parameters()]
