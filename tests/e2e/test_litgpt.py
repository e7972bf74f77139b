"""LitGPT's pretraining, of which one line is changed: the one that chooses a strategy."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.started import HERE, environment

pytest.importorskip("litgpt", reason="needs litgpt")

LIMIT = 300.0  # seconds; 25 on idle cores


def metrics_of(strategy: str, folder: Path) -> list[dict[str, float]]:
    """The losses that LitGPT logs, on two ranks."""
    given = json.dumps({"strategy": strategy, "out": str(folder)})
    folder.mkdir()
    command = [sys.executable, str(HERE / "train_litgpt.py")]
    subprocess.run(command, cwd=folder, env=environment() | {"TRAIN_LITGPT": given}, check=True, timeout=LIMIT)
    with (folder / "logs/csv/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{name: float(row[name]) for name in ("loss", "val_loss") if row.get(name)} for row in rows]


@pytest.mark.slow
@pytest.mark.launch
def test_litgpt_pretrains_as_under_ddp(tmp_path: Path) -> None:
    """With accumulation, clipping, a compiled model, validation and checkpoints."""
    expected = metrics_of("ddp", tmp_path / "ddp")
    found = metrics_of("zero3_offload", tmp_path / "zero3_offload")
    assert sum("val_loss" in row for row in expected) >= 2
    assert found == [pytest.approx(row, rel=1e-5) for row in expected]
    assert (tmp_path / "zero3_offload/final/lit_model.pth").is_file()
