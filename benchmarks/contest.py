"""What benchmarks that compare systems share: contestants in processes of their own, in rounds that are interleaved.

A *cell* is what is trained; each round goes through all cells, and in a cell through all contestants, one at a time, in
an order that is drawn anew. Results are saved after each cell of a round, and are gone on with by ``--resume``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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
    """Who takes part.

    Attributes:
        name: unique.
        system: what the script of the ranks calls it.
        python: the interpreter that has it installed.
    """

    name: str
    system: str
    python: str


class RankError(RuntimeError):
    """A rank has ended with something else than 0.

    Attributes:
        code: what it ended with; of a signal the negative number.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


# ------------------------------------------------------------------------------------------------------- interpreters


def ask(python: str, expression: str) -> str:
    """What an interpreter prints for an expression with `version` and `lightning_zero`; empty where it fails."""
    code = f"from importlib.metadata import version; print({expression})"
    return subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def version_in(python: str, package: str) -> str:
    """Of a package that an interpreter has; empty where it has none."""
    return ask(python, f"version({package!r})")


def interpreter(named: str | None) -> str:
    """The one that was named, or this one: absolute, since ranks work in a folder of their own.

    Links stay, for they are what makes an environment.
    """
    return str(Path(named or sys.executable).absolute())


def check_torch(field: Sequence[Contestant]) -> None:
    """Whether all compute with the same torch.

    Raises:
        SystemExit: one of them does not.
    """
    for python in {contestant.python for contestant in field}:
        if (found := version_in(python, "torch")) != version("torch"):
            raise SystemExit(
                f"{python} has torch {found or 'not'}; expected {version('torch')}, as this one: install it there"
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
    """Run all ranks to their end, in ``job["folder"]``, and return what each has left in ``rank0.json`` and so on.

    Args:
        contestant: whose interpreter runs them.
        script: that each runs.
        job: what they are told.
        ranks: how many there are.
        environment: variables, beside those of a launcher.
        limit: seconds.
        watch: is called again and again meanwhile.

    Raises:
        RankError: a rank failed.
        RuntimeError: they took too long.
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
            failed = [number for number, rank in enumerate(started) if rank.poll()]
            if time.monotonic() > end:
                raise RuntimeError(f"{contestant.name} took more than {limit:g} s")
    finally:
        for process in started:
            process.kill()  # one whose peer has failed waits for it
            process.wait()
    for number in failed:
        said, code = (folder / f"output{number}").read_text()[-5000:], started[number].returncode
        raise RankError(f"rank {number} of {contestant.name} ended with {code}:\n{said}", code)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


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
    """Measure until each cell has as many rounds with everybody in them as were asked for.

    A round that lacks one of the contestants asked for is no full one, and another one is measured.

    Args:
        result: as by :func:`begin`, which is added to and saved.
        cells: that are trained; each is saved by its text.
        field: who takes part in a cell.
        options: ``rounds``, ``seed`` of the order, ``out``, and what ``measure`` needs.
        measure: one contestant.
        check: whether those of a round have trained the same; raises where they have not.
        summary: of a cell's rounds.
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
            drawn = {each.name: measure(each, cell, options) for each in draw.sample(everybody, len(everybody))}
            found = {name: drawn[name] for name in names}
            check(found, cell)
            kept["rounds"].append(found)
            kept["summary"] = summary(kept["rounds"])
            save(result, options.out)
            print(f"{cell}, round {number + 1}: {time.monotonic() - start:.0f} s", flush=True)


def seconds_of(results: Sequence[Result], numbers: Sequence[str]) -> dict[str, Any]:
    """Of a contestant's results, at least one: median and minimum of seconds, and medians of other numbers."""
    seconds = [result["seconds"] for result in results]
    middle = {key: median(result[key] for result in results) for key in numbers if key in results[0]}
    return {"median": median(seconds), "min": min(seconds), "rounds": len(results), **middle}


def ratios(rounds: Sequence[Round], name: str, other: str, key: str = "seconds") -> dict[str, float]:
    """Median and minimum of one contestant's number by another's of the same round; empty where there is none."""
    both = [one for one in rounds if key in one.get(name, {}) and key in one.get(other, {})]
    found = [one[name][key] / one[other][key] for one in both]
    return {"median": median(found), "min": min(found)} if found else {}


def table(rows: Mapping[str, Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A cell's summary as a Markdown table.

    Args:
        rows: by contestant.
        columns: keys of a row, by their heads, of which those that nobody has are left out; numbers have three places.
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
    """Empty results, or those to go on with.

    Raises:
        SystemExit: what is there was measured otherwise.
    """
    if not (options.resume and options.out.exists()):
        return {"environment": environment, "setting": setting, "cells": {}}
    result: dict[str, Any] = json.loads(options.out.read_text())
    environment = dict(environment)
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


def add_arguments(parser: argparse.ArgumentParser, out: Path, rounds: int) -> None:
    """The options of :func:`contend` and :func:`begin`."""
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--deepspeed-python", help="an interpreter that has DeepSpeed; default: this one")
    parser.add_argument("--resume", action="store_true", help="go on with the results that --out has")
    parser.add_argument("--out", type=Path, default=out)
