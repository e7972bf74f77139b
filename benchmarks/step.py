"""Compares time and memory of an optimizer step on two CPU ranks by this package, DDP, FSDP2 and DeepSpeed.

    DS_BUILD_OPS=0 ../peers/bin/pip install -e ".[peers]"
    python -m benchmarks.step --deepspeed-python ../peers/bin/python --out ../step.json
    python -m benchmarks.step --models 26m --precisions bf16 --micro-batches 1 --only zero2 fsdp2 --rounds 3 \
        --out ../small.json
    python -m benchmarks.step --against ../before --out ../step.json --resume

Every contestant trains the same model, from the same seed, on the same micro-batches, with AdamW. In every round the
contestants run one at a time, each in two processes of its own (gloo), in random order. A cell of the results is a
model, a precision and a number of micro-batches; each round goes through all cells.

- this package, by strategy name: `lightning.Trainer` with logging, checkpoints, progress bar and summary off; the
  module's step returns the loss and logs nothing. The time includes the loop's hooks, its data loader and the casts of
  inputs.
- ddp: `DistributedDataParallel` in a plain loop, without synchronization before the last micro-batch. In bf16 the
  parameters are bf16 and AdamW updates fp32 masters, as with all contestants here; there is no autocast.
- ddp_no_masters (bf16 only): AdamW updates the bf16 parameters themselves, with bf16 state. It computes less.
- forward_backward: forward and backward of the same micro-batches in the same two processes, whose gradients are freed
  at once: no reduction and no update, so it trains nothing. Its time is a lower bound for all others, apart from what
  these save by settings of the C allocator.
- fsdp2: `fully_shard` of every block; in bf16 with a `MixedPrecisionPolicy` that computes and reduces in bf16.
  Gradients are reduced after the last micro-batch.
- deepspeed1, 2, 3 and 2_offload: DeepSpeed's engine with its defaults but without clipping, and torch's AdamW; with
  offloading its own AdamW, which it compiles. Skipped if its interpreter has no DeepSpeed.
- before ...: the same strategies of another checkout of this package (`--against`).

`--bf16-products fp32` lets all contestants multiply bf16 matrices in fp32 and round the products, on processors that
have no instructions for bf16: torch's own products of bf16 would hide everything else there.

Time is measured from the end of one optimizer step to the end of the step `--steps` later, including forward, backward,
reduction, update, clearing of gradients and the loop around them; the slower rank's time counts. Ten steps come before,
mostly with short sequences, for work that a system does in its first steps only (this package compares the order of the
ranks' collectives in its first ten steps). Memory is the peak of resident memory of a rank since its start, with all
imports and the fp32 initialization (`peak_gib`), and during the measured steps (`peak_of_steps_gib`).

Ratios to other contestants are computed from the same round; their median and minimum over the rounds are saved. All
contestants that train must end with the same loss, otherwise the run stops. Results are saved after each contestant;
`--resume` continues with saved results, and `--overwrite` replaces them; otherwise the file `--out` must not exist. A
round that lacks a requested contestant is not complete, and another one is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import contest
from benchmarks.contest import (
    Contestant,
    Result,
    Round,
    ask,
    begin,
    check_torch,
    contend,
    ratios,
    revision,
    run_ranks,
    seconds_of,
)
from benchmarks.examples import ROOT, STRATEGIES

RANKS = 2
RANK = ROOT / "benchmarks/step_rank.py"
PEERS = ("ddp", "ddp_no_masters", "fsdp2")
BOUND = "forward_backward"  # it trains nothing
DEEPSPEED = ("deepspeed1", "deepspeed2", "deepspeed3", "deepspeed2_offload")
MODELS = ("26m", "200m")
PRECISIONS = ("bf16", "fp32")
SETTING = ("batch", "tokens", "warmup", "steps", "bf16_products")  # options that a rank gets
BASE, BEFORE = "ddp", "before "
MAX_SECONDS = 1800  # time limit of a contestant in a round
LOSS = {"bf16": 0.02, "fp32": 1e-3}  # DeepSpeed rounds the initial weights to bf16, and `ddp_no_masters` all of them
COLUMNS = {
    "median, s": "median",
    "min, s": "min",
    "to ddp": "to_ddp",
    "min": "to_ddp_min",
    "to fsdp2": "to_fsdp2",
    "min ": "to_fsdp2_min",
    "to deepspeed": "to_deepspeed",
    "min  ": "to_deepspeed_min",
    "to before": "to_before",
    "min   ": "to_before_min",
    "peak, GiB": "peak_gib",
    "of the steps": "peak_of_steps_gib",
}


@dataclass(frozen=True)
class Cell:
    """One training setting."""

    model: str
    precision: str
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.model} {self.precision} x{self.micro_batches}"


def contestants(options: argparse.Namespace) -> list[Contestant]:
    """The requested contestants that are installed."""

    def chosen(names: Sequence[str], python: str, prefix: str = "") -> list[Contestant]:
        return [Contestant(prefix + n, n, python) for n in names if not options.only or n in options.only]

    found = chosen([BOUND, *PEERS, *STRATEGIES], sys.executable)
    deepspeed = chosen(DEEPSPEED, options.deepspeed_python)
    if deepspeed and not deepspeed_version(options):
        print(f"DeepSpeed is left out: {options.deepspeed_python} does not have it")
        deepspeed = []
    before = chosen(STRATEGIES, options.against_python, BEFORE) if options.against else []
    return [*found, *deepspeed, *before]


def deepspeed_version(options: argparse.Namespace) -> str:
    return contest.version_in(options.deepspeed_python, "deepspeed")


def check_interpreters(field: Sequence[Contestant], against: Path | None) -> None:
    """Check that all contestants use the same version of torch, and "before" the package of the other checkout.

    Raises:
        SystemExit: a contestant does not.
    """
    check_torch(field)
    for python in {contestant.python for contestant in field if contestant.name.startswith(BEFORE)}:
        file = ask(python, "__import__('lightning_zero').__file__")
        assert against is not None
        if not Path(file or "/").resolve().is_relative_to(against.resolve()):
            raise SystemExit(
                f"{python} has lightning_zero in {file or 'no place'}; expected it in {against}: "
                "install that checkout there (pip install -e), or name its interpreter with --against-python"
            )


def takes_part(contestant: Contestant, precision: str) -> bool:
    return contestant.system != "ddp_no_masters" or precision == "bf16"


def measure(contestant: Contestant, cell: Cell, options: argparse.Namespace) -> Result:
    """Start the ranks of one contestant and wait for them."""
    # DeepSpeed's communication in shared memory needs LOCAL_SIZE.
    variables = {"LOCAL_SIZE": RANKS, "OMP_NUM_THREADS": threads(), "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        job = {"system": contestant.system, "folder": folder, **vars(cell)}
        job |= {key: getattr(options, key) for key in SETTING}
        start = time.monotonic()
        results = run_ranks(contestant, RANK, job, RANKS, variables, MAX_SECONDS)
        taken = time.monotonic() - start
    largest = {key: max(r[key] for r in results) for key in ("seconds", "peak_gib", "peak_of_steps_gib")}
    return largest | {key: results[0][key] for key in ("loss", "of_each_step")} | {"seconds_with_start": taken}


def threads() -> int:
    """The number of threads of torch and OpenMP in each rank."""
    return max(1, len(os.sched_getaffinity(0)) // RANKS)


def check(found: Round, cell: Cell) -> None:
    """Check that all contestants that train have trained the same.

    Raises:
        RuntimeError: a contestant's loss differs from that of the others.
    """
    trained = {name: result for name, result in found.items() if name != BOUND}
    reference = BASE if BASE in trained else next(iter(trained), BOUND)
    expected = found[reference]["loss"]
    for name, result in trained.items():
        if not abs(result["loss"] / expected - 1) <= LOSS[cell.precision]:
            raise RuntimeError(
                f"{name} ends at loss {result['loss']:.6g} in {cell}, {reference} at {expected:.6g}: "
                "they have not trained the same"
            )


def summary(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """By contestant: seconds, peaks in GiB, and ratios to others in the same round.

    They are DDP, FSDP2, DeepSpeed's training with the same stage and place, and the same strategy of another checkout.
    """
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for one in rounds for name in one):
        mine = [one[name] for one in rounds if name in one]
        row = found[name] = seconds_of(mine, ("peak_gib", "peak_of_steps_gib"))
        others = {"ddp": BASE, "fsdp2": "fsdp2", "before": BEFORE + name}
        if name.startswith("zero"):
            others["deepspeed"] = name.replace("zero", "deepspeed")
        for label, other in others.items():
            if found_ratios := ratios(rounds, name, other):
                row |= {f"to_{label}": found_ratios["median"], f"to_{label}_min": found_ratios["min"]}
    return found


def environment_of(options: argparse.Namespace) -> dict[str, Any]:
    """The hardware, versions, commits and command."""
    found = contest.environment() | {"threads_of_a_rank": threads()}
    if options.against:
        found["commit_before"] = revision(options.against)
    if deepspeed := deepspeed_version(options):
        found["deepspeed"] = deepspeed
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    contest.add_arguments(parser, ROOT / "benchmarks/results/step.json", rounds=7)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=["tiny", *MODELS])
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    names = [BOUND, *PEERS, *DEEPSPEED, *STRATEGIES]
    parser.add_argument("--only", nargs="+", default=[], choices=names, metavar="NAME")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--tokens", type=int, default=64, help="of a sequence")
    parser.add_argument(
        "--bf16-products",
        default="bf16",
        choices=("bf16", "fp32"),
        help="dtype in which all contestants multiply bf16 matrices; fp32 for CPUs without bf16 instructions",
    )
    parser.add_argument("--warmup", type=int, default=10, help="optimizer steps before the measured ones, at least 1")
    parser.add_argument("--steps", type=int, default=5, help="measured optimizer steps")
    parser.add_argument("--against", type=Path, help="another checkout of this package, for 'before'")
    parser.add_argument("--against-python", help="its interpreter; default: .venv/bin/python in that checkout")
    options = parser.parse_args()
    if options.warmup < 1 or options.steps < 1:
        parser.error(f"--warmup {options.warmup} --steps {options.steps}; expected at least 1 of each")
    options.deepspeed_python = contest.interpreter(options.deepspeed_python)
    if options.against:
        options.against_python = contest.interpreter(options.against_python or options.against / ".venv/bin/python")
    return options


def main() -> None:
    options = parse()
    field = contestants(options)
    # First, so that an error in these does not cost a measurement.
    check_interpreters(field, options.against)
    setting = {key: getattr(options, key) for key in (*SETTING, "seed")} | {"ranks": RANKS}
    result = begin(options, setting, environment_of(options))
    cells = [Cell(m, p, k) for m in options.models for p in options.precisions for k in options.micro_batches]

    def field_of(cell: Cell) -> list[Contestant]:
        return [contestant for contestant in field if takes_part(contestant, cell.precision)]

    contend(result, cells, field_of, options, measure, check, summary)
    for cell in cells:
        print(f"\n{cell}\n\n{contest.table(result['cells'][str(cell)]['summary'], COLUMNS)}")


if __name__ == "__main__":
    main()
