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


def write(path: Path, **covered_lines: range) -> Path:
    """A report of files of ten statements and four branches, of which the first was taken."""
    files = {
        f"/any/lightning_zero/{name.replace('_in_', '/')}.py": {
            "executed_lines": [*lines],
            "missing_lines": sorted({*range(10)} - {*lines}),
            "executed_branches": [[1, 2]],
            "missing_branches": [[1, 3], [4, 5], [4, -1]],
        }
        for name, lines in covered_lines.items()
    }
    path.write_text(json.dumps({"files": files}))
    return path


def test_folders_are_compared(covered: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What either of two runs covers counts, and once."""
    fast = write(tmp_path / "fast.json", engine_in_a=range(4), engine_in_b=range(10), version=range(10))
    slow = write(tmp_path / "slow.json", engine_in_a=range(2, 5))
    before = write(tmp_path / "before.json", engine_in_a=range(10))
    results = tmp_path / "results.json"
    covered.main(["--read", str(fast), str(slow), "--against", str(before), "--results", str(results)])
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(results.read_text())["table"] == lines
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
