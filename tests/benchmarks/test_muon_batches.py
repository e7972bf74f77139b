"""The measurement of Muon's batches, on small matrices."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.benchmark import load


@pytest.fixture
def benchmark() -> Any:
    return load("muon_batches")


def test_every_case_has_both_times(benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "result.json"
    monkeypatch.setattr(benchmark, "CASES", (((24, 20), 3), ((20, 24), 2)))
    monkeypatch.setattr(sys, "argv", ["muon_batches", "--work", "1", "--out", str(out)])
    benchmark.main()
    rows = json.loads(out.read_text())["rows"]
    assert [(row["shape"], row["matrices"], row["rounds"]) for row in rows] == [([24, 20], 3, 3), ([20, 24], 2, 3)]
    assert all(row["torch_ms"] >= row["torch_ms_min"] > 0 < row["batched_ms_min"] <= row["batched_ms"] for row in rows)
