"""Lightning's own tests, with a strategy of this package in the place of its default: what do they say otherwise?

    python -m benchmarks.lightning_suite CHECKOUT
    python -m benchmarks.lightning_suite CHECKOUT --strategies zero3 --tests trainer/optimization models/test_hooks.py

``CHECKOUT`` is a copy of Lightning's repository at (or near) the version that is installed, of which only the folder
``tests`` is read. Each test file runs in a process of its own, by pytest, first with nothing replaced, then with each
strategy, and with ``ddp`` in one process: what fails under that, too, was never meant for a distributed strategy.
Files that need a package which is not installed fail in all of them.

Printed is, by strategy, every test that passes with nothing replaced and not with it, that passes under ``ddp``, and
for which :data:`EXPECTED` has no reason. The exit status is 1 if there is any.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.environment import describe

# What touches a strategy most comes first.
TESTS = (
    "models/test_hooks.py models/test_restore.py trainer/optimization trainer/connectors/test_checkpoint_connector.py "
    "checkpointing core/test_lightning_optimizer.py core/test_lightning_module.py callbacks loops "
    "trainer/test_trainer.py trainer/flags trainer/logging_ models/test_amp.py"
).split()
PLAIN, DDP = "plain", "ddp"


class Expected(NamedTuple):
    """Tests that need not pass under a strategy of ours, and why."""

    test: str  # a pattern of its identification
    message: str  # a regular expression that is found in how it fails
    reason: str


_SPIES = "it spies on the `step` of the optimizer's class, which runs on pieces of shards, and in a trial before"
_REFUSED = "an optimizer that is not element-wise is refused"
EXPECTED = (
    Expected("*", r"LBFGS cannot run over shards", _REFUSED),
    Expected("core/test_lightning_optimizer.py::*_manual_optimization_and_accumulated_gradients", r"assert", _SPIES),
    Expected("core/test_lightning_optimizer.py::*_automatic_optimization_optimizer_step", r"assert", _SPIES),
)


@dataclass(frozen=True)
class Outcome:
    """How a test ended: ``passed``, ``failed``, ``skipped`` or ``unfinished``, and the message if it failed."""

    result: str
    message: str = ""


Outcomes = dict[str, Outcome]


def run_file(checkout: Path, file: str, strategy: str, seconds: float) -> Outcomes:
    """Run one file of tests with a strategy in the place of the default.

    Args:
        checkout: of Lightning's repository.
        file: of tests, relative to the folder of Lightning's.
        strategy: its name, or :data:`PLAIN`.
        seconds: after which those that have not ended are given up.
    """
    environment = {key: value for key, value in os.environ.items() if key != "LIGHTNING_STRATEGY"}
    if strategy != PLAIN:
        environment["LIGHTNING_STRATEGY"] = strategy
    with tempfile.TemporaryDirectory() as folder:
        # The plugin lies alone on the path: beside it, the sources would hide the installed package and its extension.
        shutil.copy(Path(__file__).with_name("lightning_substitute.py"), folder)
        environment |= {"PYTHONPATH": folder, "PL_RUN_STANDALONE_TESTS": "0"}
        report, log = Path(folder) / "report.xml", Path(folder) / "log.txt"
        options = ["-p", "lightning_substitute", "-p", "no:cacheprovider", "-rN"]
        options += [f"--basetemp={folder}/tests", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        options += ["--timeout", str(seconds / 4), "-v", "--color=no"]
        command = [sys.executable, "-m", "pytest", *options, f"tests_pytorch/{file}"]
        with log.open("w") as output:
            try:
                code = subprocess.run(
                    command,
                    check=False,
                    cwd=checkout / "tests",
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=seconds,
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        if report.exists():
            return read_report(report.read_text())
        return read_log(log.read_text(errors="replace"), file, code)


def read_report(xml: str) -> Outcomes:
    """The outcomes in a report of pytest."""
    outcomes = {}
    for case in ET.fromstring(xml).iter("testcase"):
        file = case.get("file", "").rpartition("tests_pytorch/")[2]
        inner = case.get("classname", "").rpartition(f"{Path(file).stem}")[2].strip(".")  # a class
        name = "::".join(part for part in (file, inner, case.get("name", "")) if part)
        failed = next((found for kind in ("failure", "error") if (found := case.find(kind)) is not None), None)
        if failed is not None:
            outcomes[name] = Outcome("failed", f"{failed.get('message', '')}\n{failed.text or ''}")
        else:
            outcomes.setdefault(name, Outcome("passed" if case.find("skipped") is None else "skipped"))
    return outcomes


def read_log(log: str, file: str, code: int | None) -> Outcomes:
    """The outcomes of a run that did not come to its end, by what it printed."""
    outcomes = {}
    why = "it took too long" if code is None else f"the process ended with {code}"
    for line in log.splitlines():
        if found := re.match(r"\S*\.py::(.+?)(?: (PASSED|FAILED|SKIPPED)\b.*| *)$", line):
            name, result = found.groups()
            outcomes[f"{file}::{name}"] = Outcome(result.lower()) if result else Outcome("unfinished", why)
    return outcomes or {f"{file}::": Outcome("unfinished", why)}


def differing(plain: Outcomes, other: Outcomes) -> list[str]:
    """Tests that pass with nothing replaced, and not with what was."""
    return [name for name, one in plain.items() if one.result == "passed" and not _passes(other, name)]


def _passes(outcomes: Outcomes, name: str) -> bool:
    return name in outcomes and outcomes[name].result == "passed"


def reason_for(name: str, outcome: Outcome | None, expected: Iterable[Expected] = EXPECTED) -> str | None:
    """Why it is expected that a test does not pass; ``None`` where it is not."""
    message = "" if outcome is None else outcome.message
    for entry in expected:
        if fnmatch.fnmatchcase(name, entry.test) and re.search(entry.message, message):
            return entry.reason
    return None


def compare(results: Mapping[str, Outcomes], strategy: str, expected: Iterable[Expected] = EXPECTED) -> dict[str, Any]:
    """What one strategy makes of the tests, beside nothing replaced and ``ddp``.

    Args:
        results: by strategy.
        strategy: one of those.
        expected: differences with a reason.
    """
    plain, own = results[PLAIN], results[strategy]
    names = differing(plain, own)
    theirs = [name for name in names if not _passes(results[DDP], name)]
    rest = [name for name in names if name not in theirs]
    reasons = {name: reason for name in rest if (reason := reason_for(name, own.get(name), expected)) is not None}
    return {
        "passed": sum(outcome.result == "passed" for outcome in own.values()),
        "passed_without": sum(outcome.result == "passed" for outcome in plain.values()),
        "differs_under_ddp_too": sorted(theirs),
        "expected": {
            reason: sorted(n for n in reasons if reasons[n] == reason) for reason in sorted(set(reasons.values()))
        },
        "unexplained": {name: _last_line(own.get(name)) for name in rest if name not in reasons},
    }


def _last_line(outcome: Outcome | None) -> str:
    if outcome is None:
        return "it did not run"
    lines = [line.removeprefix("E ").strip() for line in outcome.message.splitlines() if line.startswith("E  ")]
    first = outcome.message.strip().splitlines()[0] if outcome.message.strip() else outcome.result
    return (lines[0] if lines else first)[:300]


def find_files(checkout: Path, chosen: Sequence[str]) -> list[str]:
    """The files of tests in folders and under names that were chosen, relative to the folder of Lightning's tests.

    Raises:
        FileNotFoundError: there is none of a name.
    """
    folder = checkout / "tests" / "tests_pytorch"
    files: dict[str, None] = {}
    for name in chosen:
        path = folder / name
        if not path.exists():
            raise FileNotFoundError(
                f"{path} does not exist; expected a copy of Lightning's repository, names in its tests/tests_pytorch"
            )
        found = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        files.update((str(file.relative_to(folder)), None) for file in found)
    return list(files)


def run_all(
    checkout: Path, files: Sequence[str], strategies: Sequence[str], jobs: int, seconds: float
) -> dict[str, Outcomes]:
    """Run all files with all strategies, some side by side; results by strategy. What differs is printed by file."""
    results: dict[str, Outcomes] = {strategy: {} for strategy in strategies}
    with ThreadPoolExecutor(jobs) as pool:
        work = {
            file: {strategy: pool.submit(run_file, checkout, file, strategy, seconds) for strategy in strategies}
            for file in files
        }
        for file, running in work.items():
            of_file = {strategy: future.result() for strategy, future in running.items()}
            for strategy, outcomes in of_file.items():
                results[strategy].update(outcomes)
                counts = Counter(outcome.result for outcome in outcomes.values())
                print(f"{file} {strategy}: {', '.join(f'{n} {what}' for what, n in sorted(counts.items()))}")
            for strategy in strategies:
                if strategy not in (PLAIN, DDP):
                    for name, message in compare(of_file, strategy)["unexplained"].items():
                        print(f"  {strategy}: {name.partition('::')[2]}: {message}")
            sys.stdout.flush()
    return results


def show(strategy: str, compared: Mapping[str, Any]) -> None:
    """Print what :func:`compare` returns."""
    print(f"\n{strategy}: {compared['passed']} passed, {compared['passed_without']} with nothing replaced;", end=" ")
    print(f"{len(compared['differs_under_ddp_too'])} differ under ddp, too")
    for reason, names in compared["expected"].items():
        print(f"  expected: {reason}: {len(names)}")
        for name in names:
            print(f"    {name}")
    for name, message in compared["unexplained"].items():
        print(f"  differs: {name}\n    {message}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="a copy of Lightning's repository")
    parser.add_argument("--strategies", nargs="+", default=["zero2_offload", "zero3"], help="names to try")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="NAME", help="files or folders of tests_pytorch")
    parser.add_argument("--jobs", type=int, default=2, help="files that run side by side")
    parser.add_argument("--seconds", type=float, default=600.0, help="for one file")
    parser.add_argument("--out", type=Path, help="file for the result, as JSON")
    chosen = parser.parse_args(arguments)
    checkout = chosen.checkout.resolve()
    strategies = [PLAIN, DDP, *chosen.strategies]
    results = run_all(checkout, find_files(checkout, chosen.tests), strategies, chosen.jobs, chosen.seconds)
    compared = {strategy: compare(results, strategy) for strategy in chosen.strategies}
    for strategy, one in compared.items():
        show(strategy, one)
    if chosen.out is not None:
        described = describe() | {"tests_of": _version_of(checkout)}
        content = {"environment": described, "tests": list(chosen.tests), "strategies": compared}
        chosen.out.write_text(json.dumps(content, indent=2) + "\n")
    return int(any(one["unexplained"] for one in compared.values()))


def _version_of(checkout: Path) -> str:
    """The version of the checkout, by the file that Lightning keeps it in."""
    file = checkout / "src" / "version.info"
    return file.read_text().strip() if file.exists() else f"unknown; installed is {version('lightning')}"


if __name__ == "__main__":
    sys.exit(main())
