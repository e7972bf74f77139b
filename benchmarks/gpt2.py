"""The GPT-2 example as a measured run: nanoGPT's CPU setting on tiny shakespeare, on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STEPS = 2000  # the experiment's own number, over which the learning rate falls
KEPT = ("val_loss", "train_loss", "steps", "tokens_per_second", "world_size", "peak_memory_bytes")


def train(
    overrides: Sequence[str], data: Path, steps: int = STEPS, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """One training run in processes of its own; what its summary says.

    Args:
        overrides: of the example's configuration.
        data: the text file.
        steps: stop after so many, on the schedule of the whole run.
        environment: variables to set.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "examples/gpt2/train.py", "trainer.devices=2", "data=text"]
        command += [f"data.path={data.resolve()}", "experiment=shakespeare_cpu", *overrides]
        command += [f"trainer.max_steps={steps}", f"scheduler.total_steps={STEPS}"]
        command += [f"hydra.run.dir={folder}", "callbacks.progress_bar=null"]
        result = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout}\n{result.stderr}")
        summary = json.loads((Path(folder) / "summary.json").read_text())
    return {key: summary[key] for key in KEPT}
