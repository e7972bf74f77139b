"""The benchmark of checkpoints runs, and finds who does not load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.benchmark import START, load
from helpers.ranks import RankPool, server_environment

FORMATS = [f"zero3 {container}, {kind}" for container in ("full", "sharded") for kind in ("checksums", "no checksums")]


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    options = f"--parameters 1e5 --rounds 1 --strategies zero3 --folder {tmp_path} --out {out}".split()
    subprocess.run(
        [sys.executable, "-c", START.format("checkpoint"), *options], cwd=tmp_path, env=server_environment(), check=True
    )
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
