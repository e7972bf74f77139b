"""Coverage of the tests: how files become a table, and that ranks are measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.benchmark import load
from helpers.pages import ROOT


@pytest.fixture
def covered() -> Any:
    return load("covered")


def report(**covered_lines: int) -> dict[str, Any]:
    """A report of files of ten statements and four branches."""
    files = {
        f"/any/lightning_zero/{path.replace('_in_', '/')}.py": {
            "summary": {"num_statements": 10, "covered_lines": lines, "num_branches": 4, "covered_branches": 1}
        }
        for path, lines in covered_lines.items()
    }
    return {"files": files}


def test_folders_are_compared(covered: Any) -> None:
    lines = covered.table(report(engine_in_a=5, engine_in_b=10, version=10), report(engine_in_a=10))
    assert [line.split() for line in lines[1:]] == [
        [".", "100.00", "25.00", "0.00", "0.00", "+100.00", "+25.00"],
        ["engine", "75.00", "25.00", "100.00", "25.00", "-25.00", "+0.00"],
        ["all", "83.33", "25.00", "100.00", "25.00", "-16.67", "+0.00"],
    ]


@pytest.mark.slow
def test_what_ranks_cover_counts(tmp_path: Path) -> None:
    pytest.importorskip("coverage")
    out = tmp_path / "covered.json"
    tests = ["-q", "-n", "0", "tests/engine/test_parity.py", "-k", "test_16_bit_sums_are_rounded_once"]
    command = [sys.executable, "benchmarks/covered.py", "--out", str(out), "--", *tests]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    files = json.loads(out.read_text())["files"]
    (collectives,) = (found for path, found in files.items() if path.endswith("sharding/collectives.py"))
    assert any("reduce_scatter" in name and each["executed_lines"] for name, each in collectives["functions"].items())
