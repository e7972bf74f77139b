"""Runs the examples in separate processes, by default on two ranks, and returns their results."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
STRATEGIES = "zero0 zero1 zero2 zero3 zero1_offload zero2_offload zero3_offload".split()


class Run(NamedTuple):
    """The results of a run: its summary, and the logged training losses."""

    summary: dict[str, Any]
    losses: list[float]


def run_example(
    name: str, overrides: Sequence[str], environment: Mapping[str, str] | None = None, devices: int = 2
) -> Run:
    """Train an example.

    Args:
        name: folder of the example.
        overrides: overrides of its configuration.
        environment: environment variables to set.
        devices: number of ranks.

    Raises:
        RuntimeError: the run failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, f"examples/{name}/train.py", f"trainer.devices={devices}", *overrides]
        command += [f"hydra.run.dir={folder}", "callbacks.progress_bar=null"]
        result = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
        )
        if result.returncode or not (Path(folder) / "summary.json").exists():  # a terminated run exits with 0
            raise RuntimeError(f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}")
        summary = json.loads((Path(folder) / "summary.json").read_text())
        with (Path(folder) / "csv" / "metrics.csv").open() as file:
            losses = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    return Run(summary, losses)
