"""Runs the GPT-2 example in nanoGPT's CPU setting on tiny shakespeare (0.8 million parameters)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.examples import run_example

STEPS = 2000  # the experiment's own number, over which the learning rate falls
KEPT = ("val_loss", "train_loss", "steps", "tokens_per_second", "world_size", "peak_memory_bytes")


def only_last_loss(steps: int) -> list[str]:
    """Overrides that validate after the last step, and do nothing else beside the training."""
    off = [f"callbacks.{name}=null" for name in ("checkpoint", "learning_rate", "gradients", "model_summary")]
    return [*off, "trainer.num_sanity_val_steps=0", f"trainer.val_check_interval={steps}", "sample.length=0"]


def known_losses(out: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """The losses in a result file of the same setting, which an interrupted benchmark has left; else none."""
    if not out.exists():
        return {}
    earlier = json.loads(out.read_text())
    setting = [key for key in result if key not in ("environment", "val_loss")]
    return dict(earlier["val_loss"]) if all(earlier.get(key) == result[key] for key in setting) else {}


def train(
    overrides: Sequence[str],
    data: Path,
    steps: int = STEPS,
    environment: Mapping[str, str] | None = None,
    devices: int = 2,
) -> dict[str, Any]:
    """Train once in separate processes and return the summary.

    Args:
        overrides: overrides of the example's configuration.
        data: the text file.
        steps: number of steps after which to stop; the schedule is that of the whole run.
        environment: environment variables to set.
        devices: number of ranks.
    """
    setting = ["data=text", f"data.path={data.resolve()}", "experiment=shakespeare_cpu"]
    stop = [f"trainer.max_steps={steps}", f"scheduler.total_steps={STEPS}"]
    summary = run_example("gpt2", [*setting, *overrides, *stop], environment, devices).summary
    return {key: summary[key] for key in KEPT}
