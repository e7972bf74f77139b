"""Accuracy of bf16 moments: nanoGPT's CPU setting on tiny shakespeare, on two ranks, over several seeds.

    python -m benchmarks.bf16_moments --data path/to/tinyshakespeare.txt

The mean validation loss after 2,000 steps must be within 0.5% of that with fp32 moments. A second run, and a run with
another number of kernel threads, must end with exactly the same loss. "smallest" combines bf16 moments with split
masters: 6 bytes per parameter besides the bf16 parameter itself, where fp32 masters and moments take 12.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.environment import describe
from benchmarks.examples import ROOT
from benchmarks.gpt2 import STEPS, train

ADAMW = ["optimizer=cpu_adamw", "optimizer.betas=[0.9,0.99]", "optimizer.weight_decay=0.1"]  # as gpt2_adamw
LAYOUTS = {
    "fp32 moments": ["precision=fp32"],
    "bf16 moments": ["precision=fp32", "optimizer.state_dtype=bfloat16"],
    "bf16, fp32 moments": ["precision=bf16"],
    "bf16, smallest": ["precision=bf16", "optimizer.state_dtype=bfloat16", "optimizer.master_layout=split"],
}
PAIRS = {"bf16 moments": "fp32 moments", "bf16, smallest": "bf16, fp32 moments"}
REPEATED = "bf16 moments"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the text file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=STEPS, help="stop early, on the schedule of the whole run")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/bf16_moments.json")
    options = parser.parse_args()

    losses: dict[str, dict[str, float]] = {name: {} for name in LAYOUTS}
    result: dict[str, Any] = {"environment": describe(), "steps": options.steps, "val_loss": losses}

    def run(layout: str, seed: int, threads: int) -> float:
        # The order of the data and the initial weights follow `seed`, the rounding `optimizer.seed`.
        overrides = ["strategy=zero2_offload", *ADAMW, *LAYOUTS[layout], f"seed={seed}", f"optimizer.seed={seed}"]
        loss = train(overrides, options.data, options.steps, {"LIGHTNING_ZERO_NUM_THREADS": str(threads)})["val_loss"]
        print(f"{layout}, seed {seed}, {threads} threads: {loss!r}", flush=True)
        return float(loss)

    for seed in options.seeds:
        for layout in LAYOUTS:
            losses[layout][str(seed)] = run(layout, seed, threads=1)
            # Saved after every run, so that an interruption loses only one.
            options.out.write_text(json.dumps(result, indent=2) + "\n")
    means = {layout: statistics.mean(losses[layout].values()) for layout in LAYOUTS}
    first = options.seeds[0]
    repeated = {"again": run(REPEATED, first, threads=1), "3 threads": run(REPEATED, first, threads=3)}
    result |= {
        "mean": means,
        "mean_over_fp32": {layout: means[layout] / means[base] for layout, base in PAIRS.items()},
        "repeated": {name: {"val_loss": v, "same": v == losses[REPEATED][str(first)]} for name, v in repeated.items()},
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({key: result[key] for key in ("mean", "mean_over_fp32", "repeated")}, indent=2))


if __name__ == "__main__":
    main()
