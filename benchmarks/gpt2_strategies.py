"""Accuracy of every strategy: nanoGPT's CPU setting on tiny shakespeare, on two ranks.

    python -m benchmarks.gpt2_strategies --data path/to/tinyshakespeare.txt
    python -m benchmarks.gpt2_strategies --data path/to/tinyshakespeare.txt --precisions fp32 fp16 --steps 400

All strategies must end with the same validation loss: within 0.002 of each other in fp32, and within 0.01 of fp32 in 16
bits at the same step. (fp16 is run for fewer steps, because a CPU multiplies fp16 matrices ten times slower.) A run is
added to the results file, or replaces the one of the same strategy, precision and number of steps. The speeds are those
of single runs on a machine that may do other work, and must not be compared.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.environment import describe
from benchmarks.examples import ROOT, STRATEGIES
from benchmarks.gpt2 import STEPS, train

PRECISIONS = ("fp32", "bf16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the text file")
    parser.add_argument("--strategies", nargs="+", default=[*STRATEGIES, "ddp"])
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS)
    parser.add_argument("--steps", type=int, default=STEPS, help="stop early, on the schedule of the whole run")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpt2_strategies.json")
    options = parser.parse_args()

    runs: dict[str, dict[str, Any]] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for precision in options.precisions:
        for strategy in options.strategies:
            result = train([f"strategy={strategy}", f"precision={precision}"], options.data, options.steps)
            column = precision if options.steps == STEPS else f"{precision}, {options.steps} steps"
            runs[f"{strategy} {column}"] = {**result, "environment": describe()}
            print(json.dumps({"strategy": strategy, "precision": precision, **result}), flush=True)
            # Saved after every run, so that an interruption loses only one.
            options.out.write_text(json.dumps(runs, indent=2) + "\n")
    print(table(runs))


def table(runs: dict[str, dict[str, Any]]) -> str:
    """The validation losses as a Markdown table, a row per strategy."""
    columns = list(dict.fromkeys(key.split(maxsplit=1)[1] for key in runs))
    rows = []
    for strategy in dict.fromkeys(key.split()[0] for key in runs):
        found = [runs.get(f"{strategy} {column}") for column in columns]
        rows.append(" | ".join([f"| `{strategy}`", *(f"{r['val_loss']:.5f}" if r else "" for r in found)]) + " |")
    header = f"| strategy | {' | '.join(columns)} |"
    return "\n".join([header, "|-" * (1 + len(columns)) + "|", *rows])


if __name__ == "__main__":
    main()
