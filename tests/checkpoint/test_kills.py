"""Saves that are killed: a complete checkpoint is always there, and no partial one is ever loaded."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.resuming import Resumable, SaveAfter, save_at_end
from checkpoint.test_full import ALONE, files_in
from helpers.ranks import RankError, RankPool, ranks
from lightning import Callback, LightningModule, Trainer
from strategy.fits import Recipe, make_trainer

from lightning_zero.checkpoint import commit, load
from lightning_zero.checkpoint.archive import archive_of_tensor
from lightning_zero.integration.names import STRATEGIES

RECIPE = Recipe(model="mlp", optimizer="momentum", steps=3)
CONTAINERS = {
    "full": {},
    "sharded": {"checkpoint_format": "sharded"},
    "async": {"async_save": True},
    "async sharded": {"checkpoint_format": "sharded", "async_save": True},
}


def strategy(container: str) -> dict[str, Any]:
    return {**STRATEGIES["zero3"], **CONTAINERS[container]}


def fit_and_die(container: str, path: str, victims: tuple[int, ...], event: int) -> int:
    """Save over an older checkpoint; victims kill themselves just before the so-many-th write, flush or rename.

    Returns how many there were.
    """
    seen = 0
    archive_of_tensor.cache_clear()  # as in a new process, such as the one that takes the place of a killed one

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == event and trainer.global_rank in victims:
                os.kill(os.getpid(), signal.SIGKILL)
            return act(*args, **kwargs)

        return counting

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "save"),
            (os, "pwrite"),
            (os, "fsync"),
            (Path, "replace"),
            (Path, "rename"),
            (Path, "unlink"),
            (Path, "write_bytes"),
            (commit, "_exchange"),
            (commit.shutil, "rmtree"),
        ):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        trainer = make_trainer(strategy(container), callbacks=[SaveAfter(2, path)])
        trainer.fit(Resumable(RECIPE))
    return seen


def check_kills(pool: RankPool, folder: Path, container: str, victims: tuple[int, ...], events: list[int]) -> None:
    """After each kill the older checkpoint or the new one is there, whole; the next save removes what was left."""
    path = folder / "a.ckpt"
    for event in events:
        with pytest.raises(RankError) as caught:
            pool.run_within(30, fit_and_die, container, str(path), victims, event)
        # The others got an error; nobody waited for the dead.
        assert "timeout" not in {failure.kind for failure in caught.value.failures.values()}
        assert load(path, ALONE)["global_step"] in (2, RECIPE.steps)  # with all its checksums
        assert all(file == "a.ckpt" or file.endswith(".incomplete") for file in files_in(folder))
        assert len(files_in(folder)) <= 2
    pool.run(save_at_end, strategy(container), RECIPE, str(path))
    assert files_in(folder) == {"a.ckpt"}


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize(
    ("container", "victims"), [("full", (0,)), ("sharded", (1,)), ("async", (1,)), ("async sharded", (0, 1))]
)
def test_a_save_killed_anywhere_leaves_a_complete_checkpoint(
    pool: RankPool, container: str, victims: tuple[int, ...], tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    pool.run(save_at_end, strategy(container), RECIPE, str(path))
    total = min(pool.run(fit_and_die, container, str(path), (), 0)[rank] for rank in victims)
    events = {1, 2, 3, total // 2, *range(max(1, total - 8), total + 1)}  # tensors, in the middle, are all alike
    check_kills(pool, tmp_path, container, victims, sorted(events))


@pytest.mark.slow
@ranks(2)
def test_random_kills(pool: RankPool, tmp_path: Path) -> None:
    """Five, of any container over any other, by a clock that knows nothing of what is written."""
    dice = random.Random(6)
    path = tmp_path / "a.ckpt"
    pool.run(save_at_end, strategy("full"), RECIPE, str(path))
    for _ in range(5):
        container = dice.choice(list(CONTAINERS))
        victims = dice.choice([(0,), (1,), (0, 1)])
        with pytest.raises(RankError) as caught:
            pool.run_within(30, save_until_killed, container, str(path), victims, dice.uniform(0.001, 0.2))
        assert "timeout" not in {failure.kind for failure in caught.value.failures.values()}
        assert load(path, ALONE)["global_step"] >= 1


class SaveUntilKilled(Callback):
    """Saves after every batch; on the victims, for some seconds."""

    def __init__(self, path: str, victims: tuple[int, ...], seconds: float) -> None:
        self.path, self.victims, self.seconds = path, victims, seconds

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not before: who waits for a rank that never comes to a new process group waits for torch's timeout.
        if trainer.global_rank in self.victims:
            signal.setitimer(signal.ITIMER_REAL, self.seconds)  # by default its signal ends the process at once

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def save_until_killed(container: str, *args: Any) -> None:
    trainer = make_trainer(strategy(container), callbacks=[SaveUntilKilled(*args)], max_epochs=-1)
    trainer.fit(Resumable(RECIPE))
