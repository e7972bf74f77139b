"""The benchmark of offload, on the simulated device: what it records, and that who runs out of memory ends nothing."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device.where import DevicePool
from helpers.benchmark import forking, load
from helpers.ranks import RankPool, server_environment

# GiB of the device: all parameters of the tiny model do not fit beside its activations, those of one layer do.
TIGHT = 0.0037
SMALL = "--models tiny --batch 4 --micro-batches 2 --tokens 128 --warmup 1 --steps 2 --learning-rate 1e-3".split()
MEASURED = {"rounds", "median", "min", "tokens_per_second", "forward_backward_seconds", "exposed_seconds", "ratios"}
MEMORY = {"peak_gib", "peak_of_steps_gib", "host_gib", "pinned_peak_gib", "device_peak_gib", "device_reserved_gib"}


@pytest.fixture
def benchmark() -> Any:
    return load("offload")


@pytest.fixture
def run(benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def run(*options: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["benchmark", "--out", str(tmp_path / "out.json"), *SMALL, *options])
        benchmark.main()
        result: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
        return result

    return run


def attempt(job: dict[str, Any]) -> dict[str, Any]:
    """What the process of a contestant does, in a rank that has the device."""
    rank = load("offload_rank")
    found: dict[str, Any] = rank.attempt(rank.Job(**job), rank.PLACES[job["device"]]())
    return found


@pytest.mark.simulated
@pytest.mark.slow
@pytest.mark.device
def test_a_contestant_that_runs_out_of_memory_ends_nothing(
    device_pool1: DevicePool, benchmark: Any, run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    results: dict[str, list[dict[str, Any]]] = {}

    def run_ranks(contestant: Any, script: Path, job: dict[str, Any], *_: Any) -> list[dict[str, Any]]:
        started.append(contestant.name)
        if contestant.name not in results:
            results[contestant.name] = device_pool1.run(attempt, job)
        return copy.deepcopy(results[contestant.name])

    monkeypatch.setattr(benchmark, "run_ranks", run_ranks)
    options = ("--device", "sim", "--device-memory-gib", str(TIGHT))
    names = ("zero2_offload", "zero3_offload")
    result = run(*options, "--rounds", "1", "--only", *names, "fsdp2", "deepspeed3_super")

    assert result["environment"]["torch"] == torch.__version__
    assert result["environment"]["command"].startswith("python -m ")
    assert result["left_out"].keys() == {"fsdp2", "deepspeed3_super"}
    assert result["setting"]["device_memory_gib"] == TIGHT
    (cell,) = result["cells"].values()
    outcome = cell["summary"]["zero2_offload"]
    assert outcome.keys() == {"out_of_memory"}
    assert "OutOfMemoryError" in outcome["out_of_memory"]
    assert "were asked for" in outcome["out_of_memory"]
    summary, measured = cell["summary"]["zero3_offload"], cell["rounds"][0]["zero3_offload"]
    assert summary.keys() == MEASURED | MEMORY
    assert summary["rounds"] == 1
    assert measured["tokens_per_second"] == pytest.approx(4 * 128 / measured["seconds"])
    assert measured["seconds"] == pytest.approx(sum(measured["of_each_step"]) / 2)
    assert measured["exposed_seconds"] == measured["seconds"] - measured["forward_backward_seconds"]
    assert 0 < measured["device_peak_gib"] <= TIGHT
    assert measured["pinned_peak_gib"] > 0
    assert measured["losses"][-1] < measured["losses"][0] == pytest.approx(math.log(1024), rel=0.02)

    more = run(*options, "--rounds", "2", "--resume", "--only", *names)
    (cell,) = more["cells"].values()
    assert [list(one) for one in cell["rounds"]] == [list(names)] * 2
    assert sorted(started[:2]) == sorted(names)
    assert started[2:] == ["zero3_offload"]  # who has run out of memory would again
    with pytest.raises(
        SystemExit, match=r"was measured with tokens=128; expected tokens=8: name another file with --out"
    ):
        run(*options, "--resume", "--tokens", "8")


@pytest.mark.slow
def test_processes_of_their_own_on_the_simulated_device_and_the_host(
    new_ranks: Callable[[int], RankPool],
    benchmark: Any,
    run: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    ours, peer = "zero2_offload_in_backward_sums", "fsdp2_sums"
    for name, value in server_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(benchmark, "threads", lambda device: 1)
    monkeypatch.setattr(benchmark, "run_ranks", forking(new_ranks, benchmark.run_ranks, peer))
    for device, names in (("sim", ["zero2_offload_part"]), ("cpu", [ours, peer])):
        (cell,) = run("--device", device, "--tokens", "16", "--rounds", "1", "--overwrite", "--only", *names)[
            "cells"
        ].values()
        (found,) = cell["rounds"]
        assert list(found) == names
    assert cell["summary"][ours]["ratios"][peer]["min"] == found[ours]["seconds"] / found[peer]["seconds"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_the_least_part_that_fits_is_offloaded(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 50 million parameters in four buckets, of which the last is the largest."""
    monkeypatch.setitem(benchmark.MODELS, "wide", {"layers": 4, "width": 1024, "heads": 8, "vocabulary": 1024})
    cell = benchmark.Cell("wide", 2, 1)
    found = [benchmark.planned_fraction("zero2_offload_part", cell, 16, gib) for gib in (0.2, 0.5, 2.0)]
    assert found == [None, 0.5, 0.25]


def test_who_trains_something_else_is_found(benchmark: Any) -> None:
    cell = benchmark.Cell("10b", 4, 4)
    right = {
        "fsdp2": {"losses": [5.0, 4.0]},
        "torchao": {"out_of_memory": "no"},
        "zero2_offload": {"losses": [5, 4.01]},
    }
    benchmark.check(right, cell, 0.02)
    for losses in ([5.0, 4.2], [5.0, float("nan")]):
        with pytest.raises(
            RuntimeError, match=r"x has loss .* in step 2 of 10b x4, fsdp2 4; expected the same within 2%"
        ):
            benchmark.check(right | {"x": {"losses": losses}}, cell, 0.02)
    with pytest.raises(RuntimeError, match=r"x begins with loss 5 and ends with 5 in 10b x4: it has not trained"):
        benchmark.check({"x": {"losses": [5.0, 5.0]}}, cell, 0.02)


def test_errors_of_memory_are_told_from_others(benchmark: Any) -> None:
    found = load("offload_rank").out_of_memory
    caused = ValueError("a rank failed")
    caused.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert found(caused) == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    pinned = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"
    assert found(RuntimeError(pinned)).startswith("RuntimeError: CUDA error: out of memory")
    assert found(RuntimeError("CUDA error: an illegal memory access was encountered")) == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_the_refusal_names_what_to_do(run: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(SystemExit, match=r"no CUDA device; expected one for --device cuda: .* or try .* --device sim"):
        run()
    with pytest.raises(SystemExit, match=r"none of torchao can run on cpu: name others with --only"):
        run("--device", "cpu", "--only", "torchao")
