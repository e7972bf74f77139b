"""The benchmark of what `estimate` says of memory, in short form."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.benchmark import load


@pytest.fixture
def benchmark() -> Any:
    return load("estimates")


@pytest.mark.slow
def test_the_plan_is_what_a_fit_takes(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "result.json"
    arguments = f"--models lstm --names zero0 zero3_offload zero3_nvme --precisions fp32 --ranks 1 --out {out}"
    monkeypatch.setattr(sys, "argv", f"benchmark {arguments}".split())
    benchmark.main()
    result = json.loads(out.read_text())
    assert (result["cases"], result["held_within_goal"], result["growth_within_goal"]) == (3, 3, 3)
    # Of zero3_nvme the disk holds everything, gradients, too.
    assert (result["host_within_goal"], result["passing_within_goal"], result["disk_within_goal"]) == (1, 1, 1)
    for row in result["rows"]:
        assert row["growth_planned"] > 10_000_000  # more than the noise of resident memory
