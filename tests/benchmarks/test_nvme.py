"""The benchmark of state on a disk, in short form."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.benchmark import load
from helpers.ranks import RankPool


def run(arguments: list[str]) -> None:
    benchmark: Any = load("nvme")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "WIDTH", 64)
        patch.setattr(sys, "argv", ["benchmark", *arguments])
        benchmark.main()


@pytest.mark.slow
def test_rates_and_updates_are_measured(pool1: RankPool, tmp_path: Path) -> None:
    out, disk = tmp_path / "result.json", tmp_path / "disk"
    disk.mkdir()
    short = ["--rounds", "1", "--seconds", "0.05", "--size-gb", "0.05", "--params", "8192", "--steps", "1"]
    pool1.run_within(100, run, ["--path", str(disk), "--out", str(out), *short])
    result = json.loads(out.read_text())
    rates = result["throughput"]["median"]
    assert all(rate > 0 for backend in result["throughput"]["ways"] for rate in rates[backend].values())
    update = result["update"]
    assert update["resting_bytes"] == 12 * update["params"] == 12 * 8192
    assert min(update["median"].values()) > 0
    assert not [*disk.iterdir()]
