"""Compares Muon with AdamW in nanoGPT's CPU setting on tiny shakespeare (0.8 million parameters), at several rates.

    python -m benchmarks.muon --data path/to/tinyshakespeare.txt

The goal: Muon's lowest validation loss after 2,000 steps is below AdamW's. Both use the same data, initial weights,
schedule (100 steps of warm-up, then a cosine to a tenth), weight decay and clipping, but different learning rates.
Muon's rate is also used for the AdamW that updates embeddings and vectors.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.environment import describe
from benchmarks.examples import ROOT
from benchmarks.gpt2 import STEPS, known_losses, only_last_loss, train

# Both use the betas of the experiment and the same weight decay.
OPTIMIZERS = {
    "adamw": ["optimizer=adamw", "optimizer.betas=[0.9,0.99]", "optimizer.weight_decay=0.1"],
    "muon": ["optimizer=muon", "optimizer.betas=[0.9,0.99]", "optimizer.weight_decay=0.1"],
}
RATES = {"adamw": (1e-3, 2e-3, 4e-3), "muon": (2e-3, 4e-3, 8e-3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the text file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="of initial weights and data")
    parser.add_argument("--strategy", default="zero2")
    parser.add_argument("--devices", type=int, default=2, help="ranks")
    parser.add_argument("--overrides", nargs="+", default=[], help="of the example's configuration: another model")
    parser.add_argument("--steps", type=int, default=STEPS, help="stop early, on the schedule of the whole run")
    for name, rates in RATES.items():
        parser.add_argument(f"--{name}", type=float, nargs="+", default=rates, help="learning rates")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/muon.json")
    options = parser.parse_args()

    rates = {name: getattr(options, name) for name in OPTIMIZERS}
    losses: dict[str, dict[str, dict[str, float]]] = {
        name: {f"{rate:g}": {} for rate in found} for name, found in rates.items()
    }
    result: dict[str, Any] = {
        "environment": describe(),
        "steps": options.steps,
        "strategy": options.strategy,
        "ranks": options.devices,
        "overrides": options.overrides,
        "val_loss": losses,
    }
    for name, known in known_losses(options.out, result).items():
        losses[name] |= known
    for seed in options.seeds:
        for name, by_rate in losses.items():
            for rate, found in by_rate.items():
                if str(seed) in found:
                    continue
                overrides = [f"strategy={options.strategy}", *OPTIMIZERS[name], f"optimizer.lr={rate}", f"seed={seed}"]
                overrides += [*only_last_loss(options.steps), *options.overrides]
                found[str(seed)] = float(
                    train(overrides, options.data, options.steps, devices=options.devices)["val_loss"]
                )
                print(f"{name}, {rate}, seed {seed}: {found[str(seed)]!r}", flush=True)
                result["best"] = {each: best(by) for each, by in losses.items() if any(by.values())}
                # Saved after every run, so that an interruption loses only one.
                options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["best"], indent=2))


def best(by_rate: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The rate with the lowest mean loss over its seeds, and this mean."""
    means = {rate: sum(found.values()) / len(found) for rate, found in by_rate.items() if found}
    rate = min(means, key=means.__getitem__)
    return {"lr": float(rate), "val_loss": means[rate]}


if __name__ == "__main__":
    main()
