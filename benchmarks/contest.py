"""Shared code of benchmarks that compare systems: contestants in separate processes, in interleaved rounds.

A *cell* is one training setting. Each round goes through all cells, and in each cell through all contestants, one at a
time, in random order. Results are saved after each contestant; ``--resume`` continues with them, within a round, too.
Without it a benchmark does not begin if its file exists, unless ``--overwrite`` replaces the file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.environment import describe, free_port
from benchmarks.examples import ROOT

Result = dict[str, Any]
Round = dict[str, Result]  # by contestant


@dataclass(frozen=True)
class Contestant:
    """A system that takes part.

    Attributes:
        name: unique name.
        system: its name in the script of the ranks.
        python: the interpreter in which it is installed.
    """

    name: str
    system: str
    python: str


class RankError(RuntimeError):
    """Raised when a rank ends with an exit code other than 0.

    Attributes:
        code: the exit code; the negative number of a signal that ended it.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


# ------------------------------------------------------------------------------------------------------- interpreters


def ask(python: str, expression: str) -> str:
    """Print an expression, which may use `version`, in an interpreter; returns the output, or "" if it fails."""
    code = f"from importlib.metadata import version; print({expression})"
    return subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def version_in(python: str, package: str) -> str:
    """The version of a package in an interpreter; "" if it is not installed."""
    return ask(python, f"version({package!r})")


def interpreter(named: str | None) -> str:
    """The absolute path of the named interpreter, or of this one; ranks run in a folder of their own.

    Symbolic links are not resolved, because the link is what selects a virtual environment.
    """
    return str(Path(named or sys.executable).absolute())


def check_torch(field: Sequence[Contestant]) -> None:
    """Check that all contestants use the same version of torch as this process.

    Raises:
        SystemExit: a contestant does not.
    """
    for python in {contestant.python for contestant in field}:
        if (found := version_in(python, "torch")) != version("torch"):
            raise SystemExit(
                f"{python} has torch {found or 'not'}; expected {version('torch')}, as here: install it there"
            )


# -------------------------------------------------------------------------------------------------------------- ranks


def run_ranks(
    contestant: Contestant,
    script: Path,
    job: Mapping[str, Any],
    ranks: int,
    environment: Mapping[str, Any],
    limit: float,
    watch: Callable[[], object] = lambda: None,
) -> list[Result]:
    """Run all ranks in ``job["folder"]`` until they end, and return the contents of ``rank0.json``, ``rank1.json`` ...

    Args:
        contestant: its interpreter runs the ranks.
        script: the script that each rank runs.
        job: the argument of the script, as JSON.
        ranks: number of ranks.
        environment: environment variables, in addition to those of a launcher.
        limit: time limit in seconds.
        watch: called repeatedly while the ranks run.

    Raises:
        RankError: a rank failed; an abort after it has saved its result is none.
        RuntimeError: the ranks exceeded the limit.
    """
    folder = Path(job["folder"])
    shared = {"WORLD_SIZE": ranks, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [contestant.python, "-P", str(script), json.dumps(job)]
    started: list[subprocess.Popen[bytes]] = []
    failed: list[int] = []
    end = time.monotonic() + limit
    try:
        for rank in range(ranks):
            own = {**shared, **environment, "RANK": rank, "LOCAL_RANK": rank}
            with (folder / f"output{rank}").open("w") as output:
                variables = os.environ | {key: str(value) for key, value in own.items()}
                started.append(
                    subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT)
                )
        while not failed and any(rank.poll() is None for rank in started):
            watch()
            time.sleep(0.05)
            failed = [number for number, rank in enumerate(started) if _has_failed(rank, _result(folder, number))]
            if time.monotonic() > end:
                raise RuntimeError(f"{contestant.name} took more than {limit:g} s")
    finally:
        for process in started:
            process.kill()  # a rank whose peer has failed waits for it without end
            process.wait()
        _remove_shared_memory(shared["MASTER_ADDR"], shared["MASTER_PORT"])
    for number in failed:
        said, code = (folder / f"output{number}").read_text()[-5000:], started[number].returncode
        raise RankError(f"rank {number} of {contestant.name} ended with {code}:\n{said}", code)
    return [json.loads(_result(folder, rank).read_text()) for rank in range(ranks)]


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def _has_failed(rank: subprocess.Popen[bytes], result: Path) -> bool:
    """Whether a rank has ended without a result. At its exit torch's gloo may abort it, or threads of DeepSpeed."""
    code = rank.poll()
    return bool(code) and not (code == -signal.SIGABRT and result.exists())


def _remove_shared_memory(address: str, port: int) -> None:
    """Remove the buffers of DeepSpeed's collectives in shared memory, 64 MiB a rank: they outlive its processes."""
    for left in Path("/dev/shm").glob(f"deepspeed_*_{address}_{port}_*"):
        left.unlink()


# ------------------------------------------------------------------------------------------------------------- rounds


def contend(
    result: dict[str, Any],
    cells: Sequence[Any],
    field: Callable[[Any], Sequence[Contestant]],
    options: argparse.Namespace,
    measure: Callable[[Contestant, Any, argparse.Namespace], Result],
    check: Callable[[Round, Any], None],
    summary: Callable[[Sequence[Round]], dict[str, Any]],
) -> None:
    """Measure until each cell has the requested number of complete rounds.

    A round that lacks a requested contestant is not complete, and another one is measured.

    Args:
        result: the result of :func:`begin`, which is extended and saved.
        cells: the cells to train; each is saved under its string.
        field: returns the contestants of a cell.
        options: ``rounds``, ``seed`` for the order, ``out``, and the options that ``measure`` needs.
        measure: measures one contestant.
        check: raises if the contestants of a round have not trained the same.
        summary: summarizes the rounds of a cell.
    """
    for number in range(options.rounds):
        for cell in cells:
            kept = result["cells"].setdefault(str(cell), {"summary": {}, "rounds": []})
            everybody = field(cell)
            names = [contestant.name for contestant in everybody]
            if sum(one.keys() >= set(names) for one in kept["rounds"]) > number:
                continue
            start = time.monotonic()
            draw = random.Random(f"{options.seed} {cell} {len(kept['rounds'])}")
            begun: Round = kept.setdefault("begun", {})
            for each in draw.sample(everybody, len(everybody)):
                if each.name not in begun:
                    begun[each.name] = measure(each, cell, options)
                    save(result, options.out)
                    print(f"{cell}, {each.name}: {told(begun[each.name])}", flush=True)
            found = {name: begun[name] for name in names}
            del kept["begun"]
            save(result, options.out)  # without a round that the check refuses
            check(found, cell)
            kept["rounds"].append(found)
            kept["summary"] = summary(kept["rounds"])
            save(result, options.out)
            print(f"{cell}, round {number + 1}: {time.monotonic() - start:.0f} s", flush=True)


def told(result: Result) -> str:
    """A line about a contestant's result."""
    seconds = f"{result['seconds']:.3f} s per step" if "seconds" in result else "no time"
    return f"{seconds}, {result['seconds_with_start']:.0f} s in all" if "seconds_with_start" in result else seconds


def seconds_of(results: Sequence[Result], numbers: Sequence[str]) -> dict[str, Any]:
    """Summarize a contestant's results: median and minimum of seconds, and medians of the other numbers."""
    seconds = [result["seconds"] for result in results]
    middle = {key: median(result[key] for result in results) for key in numbers if key in results[0]}
    return {"median": median(seconds), "min": min(seconds), "rounds": len(results), **middle}


def ratios(rounds: Sequence[Round], name: str, other: str, key: str = "seconds") -> dict[str, float]:
    """Median and minimum of the ratios of two contestants' numbers in the same rounds; empty if there are none."""
    both = [one for one in rounds if key in one.get(name, {}) and key in one.get(other, {})]
    found = [one[name][key] / one[other][key] for one in both]
    return {"median": median(found), "min": min(found)} if found else {}


def table(rows: Mapping[str, Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A cell's summary as a Markdown table.

    Args:
        rows: rows by contestant.
        columns: maps column titles to keys of the rows. Columns without any value are left out. Numbers have three
            decimal places.
    """
    columns = {head: key for head, key in columns.items() if any(key in row for row in rows.values())}
    lines = [f"| who | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for name, row in rows.items():
        shown = [row.get(key, "") for key in columns.values()]
        lines.append(f"| {name} | {' | '.join(f'{v:.3f}' if isinstance(v, float) else str(v) for v in shown)} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------ results


def revision(checkout: Path) -> str:
    """The last commit that changed the package, and whether files differ from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(checkout), *words, "--", "lightning_zero", "cpp"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    return git("log", "-1", "--format=%h", "--abbrev=12") + ("-dirty" if git("status", "--porcelain") else "")


def environment() -> dict[str, Any]:
    """Hardware, versions, commit and command; paths of this machine are none of it."""
    found = describe() | {"commit": revision(ROOT)}
    words = found["command"].split(" ")
    found["command"] = " ".join(Path(word).name if Path(word).is_absolute() else word for word in words)
    return found


def begin(options: argparse.Namespace, setting: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
    """Make empty results, or read those to continue.

    Raises:
        SystemExit: the existing results were measured with other options, or are neither to be continued nor replaced.
    """
    if options.overwrite or not options.out.exists():
        return {"environment": environment, "setting": setting, "cells": {}}
    if not options.resume:
        raise SystemExit(
            f"{options.out} exists; expected a new file: continue its results with --resume, name another file with "
            "--out, or replace it with --overwrite"
        )
    result: dict[str, Any] = json.loads(options.out.read_text())
    environment = dict(environment)
    run = {key: environment.pop(key) for key in ("date", "command")}
    old, new = result["environment"] | result["setting"], environment | setting
    # A peer or a checkout may join, or be left out this time.
    if differing := [key for key in old.keys() & new.keys() if old[key] != new[key]]:
        there, here = (", ".join(f"{key}={values[key]!r}" for key in differing) for values in (old, new))
        raise SystemExit(
            f"{options.out} was measured with {there}; expected {here}: "
            "name another file with --out, or replace this one with --overwrite instead of --resume"
        )
    result["environment"] = environment | result["environment"]
    result["environment"].setdefault("resumed", []).append(run)
    return result


def save(result: dict[str, Any], path: Path) -> None:
    temporary = path.with_suffix(".incomplete")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)


def add_arguments(parser: argparse.ArgumentParser, out: Path, rounds: int) -> None:
    """The options of :func:`contend` and :func:`begin`."""
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--deepspeed-python", help="an interpreter that has DeepSpeed; default: this one")
    parser.add_argument("--out", type=Path, default=out, help="file of the results; an existing one is not replaced")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="continue the results in --out")
    existing.add_argument("--overwrite", action="store_true", help="replace the results in --out")
