"""Measures which lines and branches of the package the tests cover, including those run by ranks and other processes.

    pip install "coverage>=7.10"
    python benchmarks/covered.py --out after.json
    cd ../before && .venv/bin/python ../after/benchmarks/covered.py --out before.json
    cd ../after && python benchmarks/covered.py --read after.json --against ../before/before.json
    python benchmarks/covered.py --out slow.json -- -m "slow and not gpu" -n 2 --dist worksteal
    python -m benchmarks.covered --read after.json slow.json --against ../before/before.json --results coverage.json

Several files count together: what one of these runs has covered. `--results` writes the table, with where it was made.

It measures the package and the tests of the working folder, with the interpreter that runs this file. So a revision
without this file can be measured, too. Arguments after `--` are passed to pytest instead of those for the fast tests.

Every process begins by importing a module that starts the measurement. Since a rank ends when its pool kills it, each
rank saves its coverage before it sends an answer. Tests take several times as long; if a test exceeds its time limit,
its coverage still counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = "lightning_zero"
TESTS = ("-m", "not slow and not gpu", "--numprocesses", str(os.cpu_count()), "--dist", "worksteal")
CONFIGURATION = """\
[run]
branch = True
source = {source}
parallel = True
data_file = {folder}/data
concurrency = thread
patch = fork, _exit
disable_warnings = no-data-collected, module-not-measured, module-not-imported, already-imported, couldnt-parse
"""
# Python runs a module of this name at every start.
START = """\
import multiprocessing.connection as connections
import os

import coverage

coverage.process_startup()
STARTED = os.getpid()
send_bytes = connections.Connection.send_bytes


def save_and_send(self, *arguments, **named):
    if os.getpid() != STARTED and (current := coverage.Coverage.current()) is not None:
        current.save()
    send_bytes(self, *arguments, **named)


connections.Connection.send_bytes = save_and_send
"""


class Counts(NamedTuple):
    """The numbers of statements and branches, and how many of them ran."""

    statements: int = 0
    ran: int = 0
    branches: int = 0
    taken: int = 0

    def plus(self, other: Counts) -> Counts:
        return Counts(*map(sum, zip(self, other, strict=True)))

    def shares(self) -> tuple[float, float]:
        """Lines and branches that ran, in percent."""
        return 100.0 * self.ran / max(1, self.statements), 100.0 * self.taken / max(1, self.branches)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("covered.json"), help="file to write (covered.json)")
    parser.add_argument("--read", type=Path, nargs="+", help="print what such files have, and measure nothing")
    parser.add_argument("--against", type=Path, nargs="+", help="such files of another revision, to compare with")
    parser.add_argument("--results", type=Path, help="file for the table and where it was made")
    parser.add_argument("tests", nargs="*", help="pytest's arguments, after `--`")
    options = parser.parse_args(arguments)
    if options.read is None:
        options.out.write_text(json.dumps(measure(options.tests or TESTS)))
    before = by_folder(options.against) if options.against else {}
    lines = table(by_folder(options.read or [options.out]), before)
    print("\n".join(lines))
    if options.results:
        # Here, because an environment of another revision, in which this file measures, need not have what it imports.
        from benchmarks.environment import describe

        options.results.write_text(json.dumps({"environment": describe(), "table": lines}, indent=2) + "\n")


def measure(tests: Sequence[str]) -> dict[str, Any]:
    """Run pytest in this folder and return coverage's report."""
    with tempfile.TemporaryDirectory(prefix="covered-") as name:
        folder = Path(name)
        settings = folder / "settings"
        settings.write_text(CONFIGURATION.format(source=Path.cwd() / PACKAGE, folder=folder))
        (folder / "sitecustomize.py").write_text(START)
        path = os.pathsep.join(filter(None, (name, os.environ.get("PYTHONPATH"))))
        measured = os.environ | {"COVERAGE_PROCESS_START": str(settings), "PYTHONPATH": path}
        run = subprocess.run([Path(sys.executable).parent / "pytest", *tests], env=measured, check=False)
        print(f"pytest ended with {run.returncode}")
        for act in (["combine", "--quiet"], ["json", "--quiet", "-o", str(folder / "report.json")]):
            subprocess.run([sys.executable, "-m", "coverage", act[0], f"--rcfile={settings}", *act[1:]], check=True)
        report: dict[str, Any] = json.loads((folder / "report.json").read_text())
        return report


def table(now: Mapping[str, Counts], then: Mapping[str, Counts]) -> list[str]:
    """The lines of a table: percentages of lines and branches by folder of the package, and their changes."""
    lines = [f"{'':<16} {'lines %':>9} {'branches %':>11}" + (f" {'before':>18} {'change':>14}" if then else "")]
    for folder in sorted(now.keys() | then.keys(), key=lambda each: (each == "all", each)):
        shares, old = (counts.get(folder, Counts()).shares() for counts in (now, then))
        line = f"{folder:<16} {shares[0]:9.2f} {shares[1]:11.2f}"
        if then:
            line += f" {old[0]:9.2f} {old[1]:8.2f} {shares[0] - old[0]:+7.2f} {shares[1] - old[1]:+6.2f}"
        lines.append(line)
    return lines


def by_folder(paths: Sequence[Path]) -> dict[str, Counts]:
    """The counts of each folder of the package, and of the whole package, in all runs of one revision together."""
    reports = [json.loads(path.read_text())["files"] for path in paths]
    folders: dict[str, Counts] = {}
    for path in sorted(set().union(*reports)):
        inside = Path(path.partition(f"{PACKAGE}/")[2])
        lines, branches = (
            union([each[path] for each in reports if path in each], kind) for kind in ("lines", "branches")
        )
        for folder in (inside.parts[0] if len(inside.parts) > 1 else ".", "all"):
            folders[folder] = folders.get(folder, Counts()).plus(Counts(*lines, *branches))
    return folders


def union(of_file: Sequence[Mapping[str, Any]], kind: str) -> tuple[int, int]:
    """How many lines or branches a file has, and how many of them any of the runs has executed."""
    executed, missing = (
        {item if isinstance(item, int) else tuple(item) for each in of_file for item in each[f"{word}_{kind}"]}
        for word in ("executed", "missing")
    )
    return len(executed | missing), len(executed)


if __name__ == "__main__":
    main()
