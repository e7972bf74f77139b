"""The trace of lanes: a file of each rank in which each piece of work is once."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from device import sim
from device.test_peak import make_late
from device.where import DevicePool
from helpers.ranks import RankPool
from lightning import Callback
from strategy.fits import Fitted, Lit, Recipe, fit

from lightning_zero import ZeroStrategy
from lightning_zero.callbacks import Breakdown, Trace
from lightning_zero.callbacks.trace import chrome_trace
from lightning_zero.integration import strategy as integration
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.storage import WORK_LOG, Lane, Phase, Span, ThreadExecutor, executor, streams

RECIPE = Recipe(steps=6, micro=2)


@contextlib.contextmanager
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """The work of all lanes while the log is on, by lane and what it is."""
    done: Counter[tuple[str, str]] = Counter()
    own = executor.noting_work

    def counting(lane: Lane, what: str) -> Any:
        done[lane.name, what] += WORK_LOG.on
        return own(lane, what)

    with pytest.MonkeyPatch.context() as patch:
        for module in (executor, streams):
            patch.setattr(module, "noting_work", counting)
        yield done


def fit_traced(name: str, folder: Path, accelerator: str = "cpu") -> tuple[Fitted, Fitted, Counter[tuple[str, str]]]:
    """A fit with a trace, one without, and the work that the first has done while it was traced."""
    options: dict[str, Any] = {"activation_offload": True, "activation_offload_mb": 0.0, "bucket_size_mb": 0.0003}
    options |= STRATEGIES[name]
    callbacks: list[Callback] = [Trace(folder, first_step=2, steps=3), Breakdown(table=False, lanes=False)]
    with counted() as done:
        traced = fit(ZeroStrategy(**options), RECIPE, accelerator=accelerator, callbacks=callbacks, logger=False)
    assert not WORK_LOG.on
    return traced, fit(ZeroStrategy(**options), RECIPE, accelerator=accelerator), done


def read(path: Path) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """The slices of a file by track, and what it says besides."""
    made = json.loads(path.read_text())
    tracks = {e["tid"]: e["args"]["name"] for e in made["traceEvents"] if e["name"] == "thread_name"}
    slices: dict[str, list[dict[str, Any]]] = {name: [] for name in tracks.values()}
    for event in made["traceEvents"]:
        assert event["pid"] == int(path.stem.removeprefix("rank"))
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[tracks[event["tid"]]].append(event)
    return slices, made["otherData"]


def assert_complete(path: Path, results: tuple[Fitted, Fitted, Counter[tuple[str, str]]]) -> dict[str, Any]:
    """Each piece of work is there once, phases follow each other, and nothing has changed."""
    traced, plain, done = results
    assert all(torch.equal(traced.weights[name], plain.weights[name]) for name in plain.weights)
    slices, other = read(path)
    phases, exposed = slices.pop("training"), slices.pop("exposed", [])
    assert Counter((lane, each["name"]) for lane, found in slices.items() for each in found) == +done
    for lane, found in slices.items():
        assert other["busy_seconds"][lane] == pytest.approx(sum(each["dur"] for each in found) / 1e6)
    assert {each["name"] for each in phases} >= {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER}
    for before, after in itertools.pairwise(phases):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=1e-3)
    for each in exposed:
        assert (each["cat"], each["name"]) in done or each["cat"] in Lane.__members__
    return {lane: {each["name"] for each in found} for lane, found in slices.items()}


def test_each_piece_of_work_is_there_once(pool2: RankPool, tmp_path: Path) -> None:
    results = pool2.run(fit_traced, "zero3_offload", tmp_path)
    for rank, result in enumerate(results):
        names = assert_complete(tmp_path / f"rank{rank}.json", result)
        assert any(name.startswith("the update of ") for name in names["HOST"])


def test_a_lane_that_waits_for_another_is_no_wait_of_the_training() -> None:
    executor = ThreadExecutor()
    recording = WORK_LOG.start(torch.device("cpu"), Phase.OTHER)
    read = executor.submit(partial(time.sleep, 0.05), Lane.READ, "a tile")
    written = executor.submit(lambda: None, Lane.WRITE, "a tile", after=[read])
    while not written.done():
        time.sleep(0.01)
    assert {span.track for span in recording.stop()} == {"training", "READ", "WRITE"}


def test_work_of_a_disk_at_the_same_time_is_in_two_tracks() -> None:
    read = partial(Span, "READ")
    spans = [read("a", 1.0, 3.0), read("b", 2.0, 5.0), Span("CHECK", "a", 3.0, 4.0), read("c", 3.0, 4.0)]
    spans.append(read("d", 6.0, 7.0))
    made = chrome_trace(spans, 0, 1)
    tracks = {e["tid"]: e["args"]["name"] for e in made["traceEvents"] if e["name"] == "thread_name"}
    shown = [(tracks[e["tid"]], e["name"]) for e in made["traceEvents"] if e["ph"] == "X"]
    assert shown == [("READ", "a"), ("READ 2", "b"), ("CHECK", "a"), ("READ", "c"), ("READ", "d")]
    assert [*tracks.values()] == ["READ", "READ 2", "CHECK"]
    assert made["otherData"]["busy_seconds"] == {"READ": 5.0, "CHECK": 1.0}


@pytest.mark.device("random1")
def test_lanes_of_a_device_are_there_and_keep_their_order(device_pool1: DevicePool, tmp_path: Path) -> None:
    where = device_pool1.where
    (result,) = device_pool1.run(
        fit_timed if where.simulated else fit_traced, "zero2_offload", tmp_path, where.accelerator
    )
    names = assert_complete(tmp_path / "rank0.json", result)
    assert "activations" in names["D2H"]  # few as they are, they need not come back
    slices, other = read(tmp_path / "rank0.json")
    updates = Counter(each["name"] for each in slices["HOST"] if each["name"].startswith("the update of "))
    assert updates
    if where.simulated:  # that of the step before the three begins in the trace, too
        assert set(updates.values()) == {1 + 3}
    for lane in ("H2D", "D2H"):
        for before, after in itertools.pairwise(slices[lane]):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
        assert other["busy_seconds"][lane] > 0
    assert any(each["name"].startswith("the update of ") for each in slices["exposed"])


def fit_timed(name: str, folder: Path, accelerator: str) -> Any:
    """As `fit_traced`, with updates that begin when somebody waits for them."""
    costs = sim.install().costs()
    costs.launch, costs.to_device, costs.to_host, costs.memory = 1e-6, 1e9, 1e9, 1e10
    with mock.patch.object(integration, "make_executor", make_late):
        return fit_traced(name, folder, accelerator)


class Failing(Lit):
    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        if index == 7:
            raise ValueError("of the user's")
        return super().training_step(batch, index)


def fit_others(folder: Path) -> list[str]:
    """Fits whose traces cannot be complete; the messages of their warnings."""
    with pytest.raises(ValueError, match="of the user's"):
        fit("zero1", RECIPE, Failing, callbacks=[Trace(folder)])
    assert not WORK_LOG.on
    with pytest.warns(UserWarning, match="Trace shows nothing") as short:
        fit("zero1", RECIPE, callbacks=[Trace(folder, first_step=50)])
    with pytest.warns(UserWarning, match="Trace shows nothing") as other:
        fit("ddp", RECIPE, callbacks=[Trace(folder)])
    assert not folder.exists()
    fit("zero1", RECIPE, callbacks=[Trace(folder, first_step=4, steps=50)])  # as long as it trains
    return [str(warning.message) for warnings in (short, other) for warning in warnings]


def test_a_training_that_ends_early(pool1: RankPool, tmp_path: Path) -> None:
    (messages,) = pool1.run(fit_others, tmp_path / "trace")
    assert any("ended after 6 steps, before the first traced one; got first_step=50" in message for message in messages)
    assert any("under DDPStrategy" in message for message in messages)
    slices, _ = read(tmp_path / "trace" / "rank0.json")
    assert sum(each["name"] == Phase.FORWARD for each in slices["training"]) == 2 * RECIPE.micro


def profiled() -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        fit("zero3_offload", Recipe(steps=2))
    return {event.key for event in profiler.key_averages()}


def test_torchs_profiler_has_ranges_by_bucket(pool2: RankPool) -> None:
    for names in pool2.run(profiled):
        assert any(name.startswith("HOST: the update of model.blocks.") for name in names)
        assert any("gather" in name and "blocks." in name for name in names)
        assert any("reduce" in name and "blocks." in name for name in names)


@pytest.mark.parametrize("wrong", [{"first_step": -1}, {"steps": 0}])
def test_numbers_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*must be"):
        Trace(**wrong)  # type: ignore[arg-type]
