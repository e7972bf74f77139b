"""Time and memory of an optimizer step on two CPU ranks: this package beside DDP, FSDP2 and DeepSpeed.

    DS_BUILD_OPS=0 ../peers/bin/pip install -e ".[peers]"
    python -m benchmarks.step --deepspeed-python ../peers/bin/python
    python -m benchmarks.step --models 26m --precisions bf16 --micro-batches 1 --only zero2 fsdp2 --rounds 3
    python -m benchmarks.step --against ../before --resume

Every contestant trains the same model, from the same seed, on the same micro-batches, with AdamW: in every round as two
processes (gloo) that are started for it and end after it, one contestant at a time, in an order that is drawn anew.
A cell of the results is a model, a precision and a number of micro-batches; each round goes through all cells.

- ours, by name: `lightning.Trainer` with logging, checkpoints, progress bar and summary off; a module whose step
  returns the loss and logs nothing. The loop's own hooks, its data loader and the casts of inputs are part of the time.
- ddp: `DistributedDataParallel` in a plain loop, without synchronization before the last micro-batch. In bf16 the
  parameters are bf16 and AdamW updates fp32 masters, as everybody here does; there is no autocast.
- ddp_no_masters (bf16 only): AdamW updates the bf16 parameters themselves, with bf16 state. It computes less.
- fsdp2: `fully_shard` of every block; in bf16 with a `MixedPrecisionPolicy` that computes and reduces in it. Gradients
  are reduced after the last micro-batch.
- deepspeed1, 2, 3 and 2_offload: its engine with its defaults but without clipping, and torch's AdamW; offloaded with
  its own, which it compiles. Left out where its interpreter has no DeepSpeed.
- before ...: the same names of another checkout of this package (`--against`).

What is measured: from the end of one optimizer step to that of another one, `--steps` later, with forward, backward,
reduction, update, clearing of gradients and the loop around them; the slower rank's time counts. Before that are ten
steps, mostly with short sequences, for what a system does in the first ones only (in ten, this package compares the
order of the ranks' collectives). Memory is the most that was resident in a rank since its start, with all imports and
the fp32 initialization (`peak_gib`), and during the measured steps (`peak_of_steps_gib`).

The ratio to `ddp` is that of the same round; its median and minimum over the rounds are saved. All must end at the same
loss, else the run stops. Results are saved after each cell of a round; `--resume` goes on with what is there. A round
that lacks one of the contestants asked for is no full one, and another one is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environment import describe, free_port
from benchmarks.examples import ROOT, STRATEGIES

RANKS = 2
RANK = ROOT / "benchmarks/step_rank.py"
PEERS = ("ddp", "ddp_no_masters", "fsdp2")
DEEPSPEED = ("deepspeed1", "deepspeed2", "deepspeed3", "deepspeed2_offload")
MODELS = ("26m", "200m")
PRECISIONS = ("bf16", "fp32")
BASE, BEFORE = "ddp", "before "
MAX_SECONDS = 1800  # of one contestant in one round
LOSS = {"bf16": 0.02, "fp32": 1e-3}  # DeepSpeed rounds the initial weights to bf16, and `ddp_no_masters` all of them

Result = dict[str, Any]
Round = dict[str, Result]  # by contestant


@dataclass(frozen=True)
class Contestant:
    """Who takes part.

    Attributes:
        name: unique.
        system: what `benchmarks/step_rank.py` calls it.
        python: the interpreter that has it installed.
    """

    name: str
    system: str
    python: str

    def takes_part(self, precision: str) -> bool:
        return self.system != "ddp_no_masters" or precision == "bf16"


@dataclass(frozen=True)
class Cell:
    """What is trained."""

    model: str
    precision: str
    micro_batches: int

    def __str__(self) -> str:
        return f"{self.model} {self.precision} x{self.micro_batches}"


def contestants(options: argparse.Namespace) -> list[Contestant]:
    """Those that were asked for and are installed."""

    def chosen(names: Sequence[str], python: str, prefix: str = "") -> list[Contestant]:
        return [Contestant(prefix + n, n, python) for n in names if not options.only or n in options.only]

    found = chosen([*PEERS, *STRATEGIES], sys.executable)
    deepspeed = chosen(DEEPSPEED, options.deepspeed_python)
    if deepspeed and not deepspeed_version(options):
        print(f"DeepSpeed is left out: {options.deepspeed_python} does not have it")
        deepspeed = []
    before = chosen(STRATEGIES, options.against_python, BEFORE) if options.against else []
    return [*found, *deepspeed, *before]


def ask(python: str, expression: str) -> str:
    """What an interpreter prints for an expression with `version` and `lightning_zero`; empty where it fails."""
    code = f"from importlib.metadata import version; print({expression})"
    return subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def deepspeed_version(options: argparse.Namespace) -> str:
    return ask(options.deepspeed_python, "version('deepspeed')")


def check_interpreters(field: Sequence[Contestant], against: Path | None) -> None:
    """Whether all compute with the same torch, and those before with the package that is meant.

    Raises:
        SystemExit: one of them does not.
    """
    for python in {contestant.python for contestant in field}:
        if (found := ask(python, "version('torch')")) != version("torch"):
            raise SystemExit(
                f"{python} has torch {found or 'not'}; expected {version('torch')}, as this one: install it there"
            )
    for python in {contestant.python for contestant in field if contestant.name.startswith(BEFORE)}:
        file = ask(python, "__import__('lightning_zero').__file__")
        assert against is not None
        if not Path(file or "/").resolve().is_relative_to(against.resolve()):
            raise SystemExit(
                f"{python} has lightning_zero in {file or 'no place'}; expected it in {against}: "
                "install that checkout there (pip install -e), or name its interpreter with --against-python"
            )


def measure(contestant: Contestant, cell: Cell, options: argparse.Namespace) -> Result:
    """Start the ranks of one contestant and wait for them."""
    with tempfile.TemporaryDirectory(prefix="step-") as name:
        folder = Path(name)
        start = time.monotonic()
        run_ranks(contestant, job_of(contestant, cell, options, folder), folder)
        taken = time.monotonic() - start
        results = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    largest = {key: max(r[key] for r in results) for key in ("seconds", "peak_gib", "peak_of_steps_gib")}
    return largest | {key: results[0][key] for key in ("loss", "of_each_step")} | {"seconds_with_start": taken}


def job_of(contestant: Contestant, cell: Cell, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What the ranks are told."""
    what = {"system": contestant.system, "folder": str(folder), **vars(cell)}
    return what | {key: getattr(options, key) for key in ("batch", "tokens", "warmup", "steps")}


def run_ranks(contestant: Contestant, job: dict[str, Any], folder: Path) -> None:
    """Run both ranks to their end.

    Raises:
        RuntimeError: a rank failed, or they took too long.
    """
    # LOCAL_SIZE is for DeepSpeed's communication in shared memory.
    shared: dict[str, Any] = {"WORLD_SIZE": RANKS, "LOCAL_SIZE": RANKS, "NODE_RANK": 0, "OMP_NUM_THREADS": threads()}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "DS_ACCELERATOR": "cpu"}
    command = [contestant.python, "-P", str(RANK), json.dumps(job)]
    ranks: list[subprocess.Popen[bytes]] = []
    failed: list[int] = []
    end = time.monotonic() + MAX_SECONDS
    try:
        for rank in range(RANKS):
            own = {key: str(value) for key, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            with (folder / f"output{rank}").open("w") as output:
                ranks.append(
                    subprocess.Popen(command, cwd=folder, env=os.environ | own, stdout=output, stderr=subprocess.STDOUT)
                )
        while not failed and any(rank.poll() is None for rank in ranks):
            time.sleep(0.05)
            failed = [number for number, rank in enumerate(ranks) if rank.poll()]
            if time.monotonic() > end:
                raise RuntimeError(f"{contestant.name} took more than {MAX_SECONDS} s")
    finally:
        for process in ranks:
            process.kill()  # one whose peer has failed waits for it
            process.wait()
    for number in failed:
        said = (folder / f"output{number}").read_text()[-5000:]
        raise RuntimeError(f"rank {number} of {contestant.name} ended with {ranks[number].returncode}:\n{said}")


def threads() -> int:
    """Of torch and OpenMP in each rank."""
    return max(1, len(os.sched_getaffinity(0)) // RANKS)


def check(found: Round, cell: Cell) -> None:
    """Whether all trained the same.

    Raises:
        RuntimeError: somebody's loss is another one.
    """
    reference = BASE if BASE in found else next(iter(found))
    expected = found[reference]["loss"]
    for name, result in found.items():
        if not abs(result["loss"] / expected - 1) <= LOSS[cell.precision]:
            raise RuntimeError(
                f"{name} ends at loss {result['loss']:.6g} in {cell}, {reference} at {expected:.6g}: "
                "they have not trained the same"
            )


def summary(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """By contestant: seconds, peaks in GiB, and ratios to DDP and to the checkout before in the same round."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for one in rounds for name in one):
        mine = [one for one in rounds if name in one]
        seconds = [one[name]["seconds"] for one in mine]
        row = found[name] = {"median": median(seconds), "min": min(seconds), "rounds": len(mine)}
        row |= {key: median(one[name][key] for one in mine) for key in ("peak_gib", "peak_of_steps_gib")}
        for label, other in (("to_ddp", BASE), ("to_before", BEFORE + name)):
            if ratios := [one[name]["seconds"] / one[other]["seconds"] for one in mine if other in one]:
                row |= {label: median(ratios), f"{label}_min": min(ratios)}
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    """A cell's summary as a Markdown table."""
    columns = {
        "median, s": "median",
        "min, s": "min",
        "to ddp": "to_ddp",
        "min": "to_ddp_min",
        "to before": "to_before",
        "min ": "to_before_min",
        "peak, GiB": "peak_gib",
        "of the steps": "peak_of_steps_gib",
    }
    lines = [f"| who | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for name, row in found.items():
        lines.append(f"| {name} | {' | '.join(f'{row[c]:.3f}' if c in row else '' for c in columns.values())} |")
    return "\n".join(lines)


def revision(checkout: Path) -> str:
    """The last commit that changed the package, and whether files differ from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(checkout), *words, "--", "lightning_zero", "cpp"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    return git("log", "-1", "--format=%h", "--abbrev=12") + ("-dirty" if git("status", "--porcelain") else "")


def environment_of(options: argparse.Namespace) -> dict[str, Any]:
    """Hardware, versions, commits and command; paths of this machine are none of it."""
    found = describe() | {"threads_of_a_rank": threads(), "commit": revision(ROOT)}
    words = found["command"].split(" ")
    found["command"] = " ".join(Path(word).name if Path(word).is_absolute() else word for word in words)
    if options.against:
        found["commit_before"] = revision(options.against)
    if deepspeed := deepspeed_version(options):
        found["deepspeed"] = deepspeed
    return found


def begin(options: argparse.Namespace) -> dict[str, Any]:
    """Empty results, or those to go on with.

    Raises:
        SystemExit: what is there was measured otherwise.
    """
    setting = {key: getattr(options, key) for key in ("batch", "tokens", "warmup", "steps", "seed")} | {"ranks": RANKS}
    environment = environment_of(options)
    if not (options.resume and options.out.exists()):
        return {"environment": environment, "setting": setting, "cells": {}}
    result: dict[str, Any] = json.loads(options.out.read_text())
    run = {key: environment.pop(key) for key in ("date", "command")}
    old, new = result["environment"] | result["setting"], environment | setting
    # A peer or a checkout may join, or be left out this time.
    if differing := [key for key in old.keys() & new.keys() if old[key] != new[key]]:
        there, here = (", ".join(f"{key}={values[key]!r}" for key in differing) for values in (old, new))
        raise SystemExit(
            f"{options.out} was measured with {there}; expected {here}: "
            "leave out --resume, or name another file with --out"
        )
    result["environment"] = environment | result["environment"]
    result["environment"].setdefault("resumed", []).append(run)
    return result


def save(result: dict[str, Any], path: Path) -> None:
    temporary = path.with_suffix(".incomplete")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=["tiny", *MODELS])
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--only", nargs="+", default=[], choices=[*PEERS, *DEEPSPEED, *STRATEGIES], metavar="NAME")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--tokens", type=int, default=64, help="of a sequence")
    parser.add_argument("--warmup", type=int, default=10, help="optimizer steps before the measured ones, at least 1")
    parser.add_argument("--steps", type=int, default=5, help="measured optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--against", type=Path, help="another checkout of this package, for 'before'")
    parser.add_argument("--against-python", help="its interpreter; default: .venv/bin/python in that checkout")
    parser.add_argument("--deepspeed-python", default=sys.executable, help="an interpreter that has DeepSpeed")
    parser.add_argument("--resume", action="store_true", help="go on with the results that --out has")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/step.json")
    options = parser.parse_args()
    if options.warmup < 1 or options.steps < 1:
        parser.error(f"--warmup {options.warmup} --steps {options.steps}; expected at least 1 of each")
    # Absolute, since ranks work in a folder of their own; links stay, for they are what makes an environment.
    options.deepspeed_python = str(Path(options.deepspeed_python).absolute())
    if options.against:
        python = options.against_python or options.against / ".venv/bin/python"
        options.against_python = str(Path(python).absolute())
    return options


def main() -> None:
    options = parse()
    field = contestants(options)
    # First: what cannot be described or compared need not be measured.
    check_interpreters(field, options.against)
    result = begin(options)
    cells = [Cell(m, p, k) for m in options.models for p in options.precisions for k in options.micro_batches]
    for number in range(options.rounds):
        for cell in cells:
            kept = result["cells"].setdefault(str(cell), {"summary": {}, "rounds": []})
            taking_part = [contestant for contestant in field if contestant.takes_part(cell.precision)]
            names = [contestant.name for contestant in taking_part]
            if sum(one.keys() >= set(names) for one in kept["rounds"]) > number:
                continue
            start = time.monotonic()
            order = random.Random(f"{options.seed} {cell} {len(kept['rounds'])}").sample(taking_part, len(taking_part))
            found = {contestant.name: measure(contestant, cell, options) for contestant in order}
            check(found, cell)
            kept["rounds"].append({name: found[name] for name in names})
            kept["summary"] = summary(kept["rounds"])
            save(result, options.out)
            print(f"{cell}, round {number + 1}: {time.monotonic() - start:.0f} s", flush=True)
    for cell in cells:
        print(f"\n{cell}\n\n{table(result['cells'][str(cell)]['summary'])}")


if __name__ == "__main__":
    main()
