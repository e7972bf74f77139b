"""The benchmark of checkpoints runs, and finds who does not load."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.benchmark import load
from helpers.ranks import RankPool

FORMATS = [f"zero3 {container}, {kind}" for container in ("full", "sharded") for kind in ("checksums", "no checksums")]


def work(*arguments: Any) -> None:
    """What a process of the benchmark does, in a new rank."""
    load("checkpoint").work(int(os.environ["RANK"]), *arguments)


@pytest.mark.slow
def test_a_small_run(new_ranks: Callable[[int], RankPool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    benchmark, out = load("checkpoint"), tmp_path / "result.json"

    def start_processes(function: Any, arguments: tuple[Any, ...], nprocs: int, start_method: str) -> None:
        assert (function, start_method) == (benchmark.work, "spawn")
        new_ranks(nprocs).run(work, *arguments)

    monkeypatch.setattr(benchmark.mp, "start_processes", start_processes)
    options = f"--parameters 1e4 --layers 1 --rounds 1 --strategies zero3 --folder {tmp_path} --out {out}".split()
    monkeypatch.setattr(sys, "argv", ["benchmark", *options])
    benchmark.main()
    result = json.loads(out.read_text())
    assert result["environment"]["file_system"]
    assert list(tmp_path.iterdir()) == [out]
    summary, seconds = result["summary"], result["seconds"]
    assert list(summary) == ["save", "load, warm", "load, cold", "until training goes on"]
    for what in ("save", "load, warm", "load, cold"):
        assert {"raw", "ddp", "fsdp2", *FORMATS} <= summary[what].keys()
        peers = [name for name in ("ddp", "fsdp2", "deepspeed") if name in summary[what]]
        assert min(summary[what][name]["to_best_peer"] for name in peers) == 1
    assert set(summary["until training goes on"]) == {"zero3 full, async", "zero3 sharded, async"}
    assert all(len(times) == 1 for of in seconds.values() for times in of.values())
    assert len(result["criterion"]) == 6


def measure_idle(folder: str) -> str:
    """What :func:`measure` says of one that saves and does not load."""
    benchmark = load("checkpoint")
    contestant = benchmark.Raw(1000)
    contestant.load = lambda folder: None
    try:
        benchmark.measure(contestant, Path(folder))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_contestant_that_does_not_load_is_found(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(measure_idle, os.fspath(tmp_path)) == ["raw has not loaded what it saved"] * 2
