"""Accuracy of 8-bit moments: nanoGPT's CPU setting on tiny shakespeare (0.8 million parameters), over several seeds.

    python -m benchmarks.int8_moments --data path/to/tinyshakespeare.txt

It trains on two ranks, or on one with `--devices 1`; the moments have the same bits on any number of ranks. `--layouts`
selects some of the layouts.

The goal: the mean validation loss after 2,000 steps is within 0.005 of that with fp32 moments. "smallest" combines
8-bit moments with split masters of bf16 parameters: 4.008 bytes per parameter besides the bf16 parameter itself, where
fp32 masters and moments take 12.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.bf16_moments import ADAMW
from benchmarks.environment import describe
from benchmarks.examples import ROOT
from benchmarks.gpt2 import STEPS, known_losses, only_last_loss, train

LAYOUTS = {
    "fp32 moments": ["precision=fp32"],
    "8-bit moments": ["precision=fp32", "optimizer.state_dtype=int8"],
    "bf16, fp32 moments": ["precision=bf16"],
    "bf16, smallest": ["precision=bf16", "optimizer.state_dtype=int8", "optimizer.master_layout=split"],
}
PAIRS = {"8-bit moments": "fp32 moments", "bf16, smallest": "bf16, fp32 moments"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the text file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=STEPS, help="stop early, on the schedule of the whole run")
    parser.add_argument("--devices", type=int, default=2, help="ranks")
    parser.add_argument("--overrides", nargs="+", default=[], help="of the example's configuration: another model")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="which to train")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/int8_moments.json")
    options = parser.parse_args()

    losses: dict[str, dict[str, float]] = {name: {} for name in options.layouts}
    result: dict[str, Any] = {
        "environment": describe(),
        "steps": options.steps,
        "ranks": options.devices,
        "overrides": options.overrides,
        "val_loss": losses,
    }
    losses |= known_losses(options.out, result)
    for seed in options.seeds:
        for name, found in losses.items():
            if str(seed) in found:
                continue
            # The order of the data and the initial weights follow `seed`, the rounding `optimizer.seed`.
            overrides = ["strategy=zero2_offload", *ADAMW, *LAYOUTS[name], f"seed={seed}", f"optimizer.seed={seed}"]
            overrides += [*only_last_loss(options.steps), *options.overrides]
            loss = float(train(overrides, options.data, options.steps, devices=options.devices)["val_loss"])
            found[str(seed)] = loss
            print(f"{name}, seed {seed}: {loss!r}", flush=True)
            result["mean"] = {each: statistics.mean(ends.values()) for each, ends in losses.items() if ends}
            # Only of the seeds that both have, since results are saved after every run.
            result["mean_above_fp32"] = {
                each: statistics.mean(losses[each][s] - losses[base][s] for s in losses[each])
                for each, base in PAIRS.items()
                if losses.get(each) and losses.get(base)
            }
            options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({key: result[key] for key in ("mean", "mean_above_fp32")}, indent=2))


if __name__ == "__main__":
    main()
