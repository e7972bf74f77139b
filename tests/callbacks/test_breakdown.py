"""The wall-clock breakdown: every slow part is in its row, and rows add up."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from device.where import DevicePool
from helpers.ranks import RankPool, ranks
from lightning import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
from rich.console import Console
from strategy.fits import Lit, Recipe, fit, make_trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero.callbacks import Breakdown, Trace
from lightning_zero.callbacks.breakdown import LaneTime, table_of
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.sharding import Group
from lightning_zero.sharding.exchange import Exchange
from lightning_zero.storage import InlineExecutor, Lane, Phase
from lightning_zero.update.updaters import Updater

PAUSE = 0.015  # seconds by which each part is slowed down


class SlowLit(Lit):
    """Sleeps in forward, in backward and in the loader."""

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        time.sleep(PAUSE)
        loss = super().training_step(batch, index)
        assert loss is not None
        loss.register_hook(lambda grad: time.sleep(PAUSE))
        return loss

    def train_dataloader(self) -> Any:
        batches = super().train_dataloader()

        class Slow(torch.utils.data.IterableDataset[Tensor]):
            def __iter__(self) -> Iterator[Tensor]:
                for batch in batches:
                    time.sleep(PAUSE)
                    yield batch

        return DataLoader(Slow(), batch_size=None)


@contextlib.contextmanager
def slow(*methods: tuple[type, str]) -> Iterator[None]:
    """Let these methods sleep first."""

    def slowed(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            time.sleep(PAUSE)
            return method(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in methods:
            patch.setattr(owner, name, slowed(getattr(owner, name)))
        yield


@contextlib.contextmanager
def slow_works() -> Iterator[None]:
    finish = Exchange.finish

    def finishes(exchange: Exchange) -> None:
        time.sleep(PAUSE)
        finish(exchange)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "finish", finishes)
        yield


def fit_slowed(name: str) -> tuple[dict[Phase, float], int, str]:
    breakdown, out = Breakdown(), io.StringIO()
    updates = [(kind, "update") for kind in Updater.__subclasses__()]
    copy = (InlineExecutor, "fetch")  # of updated parameters; masters rest in host memory
    with (
        slow((Group, "reduce_scatter"), (Group, "begin_all_gather_"), copy, *updates),
        slow_works(),
        contextlib.redirect_stdout(out),
    ):
        fit(name, Recipe(micro=2, steps=3), SlowLit, callbacks=[breakdown])
    return breakdown.means, breakdown.steps, out.getvalue()


@ranks(2)
def test_each_slow_part_is_in_its_row(pool: RankPool) -> None:
    results = pool.run(fit_slowed, "zero2_offload")
    for means, steps, _ in results:
        assert steps == 2  # of three, the first is left out
        assert not [phase for phase in Phase if means[phase] < PAUSE and phase is not Phase.OTHER]
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            assert means[phase] >= 2 * PAUSE  # of two micro-batches
    assert all(phase in results[0][2] for phase in Phase)
    assert "mean of 2" in results[0][2]
    assert "mean of" not in results[1][2]


def fit_traced(strategy: Any, folder: Path, accelerator: str) -> tuple[dict[Lane, LaneTime], int, str]:
    breakdown, out = Breakdown(skip_steps=0), io.StringIO()
    callbacks = [Trace(folder, first_step=0, steps=100), breakdown]
    with contextlib.redirect_stdout(out):
        fit(strategy, Recipe(micro=2, steps=4), accelerator=accelerator, callbacks=callbacks)
    return breakdown.lane_means, breakdown.steps, out.getvalue()


def assert_traced(folder: Path, found: tuple[dict[Lane, LaneTime], int, str], lanes: set[Lane]) -> None:
    """Busy and exposed are what a trace of the same steps says."""
    means, steps, printed = found
    traced = json.loads((folder / "rank0.json").read_text())["otherData"]
    assert means.keys() == lanes
    for lane, times in means.items():
        assert times.busy * steps == pytest.approx(traced["busy_seconds"][lane.name], rel=1e-3)
        assert times.exposed * steps == pytest.approx(traced["exposed_seconds"].get(lane.name, 0.0), rel=1e-3)
        assert f"{1e3 * times.busy:.2f}" in printed
    assert f"Lanes beside a step, mean of {steps}" in printed


@pytest.mark.device("random1")
def test_lanes_of_a_device_are_those_of_a_trace(device_pool1: DevicePool, tmp_path: Path) -> None:
    (found,) = device_pool1.run(fit_traced, "zero2_offload", tmp_path, device_pool1.where.accelerator)
    assert_traced(tmp_path, found, {Lane.H2D, Lane.D2H, Lane.HOST})


def test_on_cpu_ranks_only_a_disk_works_beside_the_training(pool1: RankPool, tmp_path: Path) -> None:
    disk = STRATEGIES["zero2_nvme"] | {"nvme_path": str(tmp_path)}
    (found,) = pool1.run(fit_traced, disk, tmp_path, "cpu")
    assert_traced(tmp_path, found, {Lane.READ, Lane.CHECK, Lane.WRITE})
    (means, _, printed) = pool1.run(fit_traced, "zero2_offload", tmp_path, "cpu")[0]
    assert not means
    assert "Lanes" not in printed


class Ticking:
    """A clock that goes on when it is read, and where it is told to; not by what else the machine does."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-4
        return self.now


CLOCK = Ticking()


class Validating(Lit):
    def validation_step(self, batch: Tensor, index: int) -> None:
        CLOCK.now += 0.05
        super().validation_step(batch, index)


class Stopwatch(Callback):
    """The clock's times of steps and validations, from outside."""

    def __init__(self) -> None:
        self.steps: list[float] = []  # when they ended, validations left out
        self.validated = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append(time.perf_counter() - self.validated)

    def on_validation_start(self, *_: Any) -> None:
        self.validated -= time.perf_counter()

    def on_validation_end(self, *_: Any) -> None:
        self.validated += time.perf_counter()


def fit_and_watch(name: str, folder: str) -> tuple[dict[Phase, float], int, float]:
    breakdown, watch = Breakdown(table=False, skip_steps=0), Stopwatch()
    flags: dict[str, Any] = {"limit_val_batches": 2, "val_check_interval": 2, "log_every_n_steps": 1}
    logger = CSVLogger(folder, name="", version="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", CLOCK)
        fit(name, Recipe(steps=4), Validating, callbacks=[breakdown, watch], logger=logger, **flags)
    return breakdown.means, breakdown.steps, watch.steps[-1] - watch.steps[0]


@ranks(2)
def test_phases_add_up_to_the_time_of_steps(pool: RankPool, tmp_path: Path) -> None:
    means, steps, wall = pool.run(fit_and_watch, "zero3", str(tmp_path))[0]
    rows = [
        row for row in csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()) if row["time_ms/forward"]
    ]
    logged = [{phase: float(row[f"time_ms/{phase.replace(' ', '_')}"]) / 1e3 for phase in Phase} for row in rows]
    assert len(logged) == steps == 4
    assert sum(sum(step.values()) for step in logged[1:]) == pytest.approx(wall, abs=0.03)  # a validation takes 0.1
    for phase in Phase:
        assert means[phase] == pytest.approx(sum(step[phase] for step in logged) / steps, rel=1e-3, abs=1e-6)
        if phase is not Phase.HOST_COPY:
            assert all(step[phase] > 0 for step in logged)


class Failing(Lit):
    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        raise ArithmeticError("a test's")


def fit_again_after_a_failure() -> None:
    breakdown, profiler = Breakdown(table=False), SimpleProfiler()
    trainer = make_trainer("zero1", callbacks=[breakdown], profiler=profiler)
    with pytest.raises(ArithmeticError):
        trainer.fit(Failing(Recipe()))
    assert trainer.profiler is profiler
    trainer.fit(Lit(Recipe()))
    assert trainer.profiler is profiler
    assert breakdown.steps == 2
    assert "run_training_batch" in profiler.recorded_durations  # the user's profiler has seen all


def test_a_failed_fit_leaves_no_trace(pool1: RankPool) -> None:
    pool1.run(fit_again_after_a_failure)


def fit_profiled(folder: str) -> str:
    profiler = AdvancedProfiler(folder, "profile")
    trainer = make_trainer("zero1", callbacks=[Breakdown()], profiler=profiler)
    trainer.fit(Lit(Recipe(steps=1)))
    assert trainer.profiler is profiler
    return Path(folder, "fit-profile.txt").read_text()


def test_the_trainers_profiler_still_writes_all(pool1: RankPool, tmp_path: Path) -> None:
    (text,) = pool1.run(fit_profiled, str(tmp_path))
    for action in ("run_training_batch", "training_step", "teardown"):
        assert re.search(rf"^Profile stats for: .*{action}", text, re.MULTILINE), action


def fit_and_expect_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"Breakdown shows nothing: .* after 2 steps, .* got skip_steps=2"):
        fit("zero1", Recipe(steps=2), callbacks=[Breakdown(skip_steps=2)])


def test_a_training_of_no_more_than_the_first_steps_says_why_there_is_no_table(pool1: RankPool) -> None:
    pool1.run(fit_and_expect_a_warning)


def fit_under_ddp() -> int:
    breakdown = Breakdown()
    with pytest.warns(UserWarning, match="Breakdown measures nothing under DDPStrategy"):
        fit("ddp", callbacks=[breakdown])
    return breakdown.steps


def test_another_strategy_is_not_measured(pool1: RankPool) -> None:
    assert pool1.run(fit_under_ddp) == [0]


def test_the_table_shows_what_ranks_differ_by() -> None:
    first = dict.fromkeys(Phase, 0.0) | {Phase.FORWARD: 0.010, Phase.WAIT: 0.030}
    second = dict.fromkeys(Phase, 0.0) | {Phase.FORWARD: 0.040}
    console = Console(file=io.StringIO(), width=100)
    console.print(table_of([first, second], 7))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    cells = {
        line.split("│")[1].strip(): line.replace("│", " ").split()[1:] for line in text.splitlines() if "│" in line
    }
    assert cells["forward"] == ["25.00", "62.5%", "10.00", "40.00", "1"]
    assert cells["wait"] == ["15.00", "37.5%", "0.00", "30.00", "0"]
    assert cells["step"] == ["40.00", "100.0%", "40.00", "40.00", "0"]


def test_a_negative_number_of_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="skip_steps=-1"):
        Breakdown(skip_steps=-1)
