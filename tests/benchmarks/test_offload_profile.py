"""The profile of an offloaded step: what it adds up, and that it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.benchmark import load, run_main
from helpers.ranks import RankPool


def event(category: str, name: str, start: float, duration: float) -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": start, "dur": duration}


def test_what_overlaps_counts_once_and_short_gaps_do_not() -> None:
    found = load("offload_profile").on_the_device(
        [
            event("kernel", "a", 0, 1000),
            event("kernel", "b", 500, 1000),
            event("kernel", "inside of b", 600, 100),
            event("kernel", "after a gap", 3500, 500),
            event("kernel", "after a short one", 4200, 800),
            event("gpu_memcpy", "there", 100, 400),
            event("gpu_memcpy", "back", 300, 400),
            event("cpu_op", "on the host", 0, 9000),
        ]
    )
    assert found["seconds"] == pytest.approx({"kernels": 2.8e-3 / 2, "there": 4e-4 / 2, "back": 4e-4 / 2})
    assert found["gaps"] == 1 / 2
    assert found["seconds_of_gaps"] == pytest.approx(2e-3 / 2)


@pytest.mark.slow
def test_a_small_run(new_ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    options = "--model tiny --tokens 8 --batch 1 --micro-batches 2 --device cpu --folder found".split()
    new_ranks(1).run(run_main, "offload_profile", str(tmp_path), *options)
    figures = json.loads((tmp_path / "found" / "figures.json").read_text())
    assert figures["seconds"] > 0
    assert figures["busy_seconds"]["HOST"] > 0
    assert {path.name for path in (tmp_path / "found").iterdir()} == {
        "figures.json",
        "rank0.json",
        "zero2_offload.json.gz",
    }
