"""Runs Lightning's own tests with a strategy of this package instead of the default one, and reports differences.

    python -m benchmarks.lightning_suite CHECKOUT
    python -m benchmarks.lightning_suite CHECKOUT --strategies zero3 --tests trainer/optimization models/test_hooks.py

``CHECKOUT`` is a copy of Lightning's repository at (or near) the installed version; only its tests are used. The test
files of a folder run in one process, by pytest, first with nothing replaced, then with each strategy. If a test passes
with nothing replaced but not with a strategy, its file runs again alone, and that run counts. Then the file runs with
``ddp`` in one process: a test that fails with that, too, is not meant for distributed strategies. Tests that need a
package which is not installed fail or are skipped in all runs.

For each strategy it prints the tests that pass with nothing replaced but not with the strategy, that pass with ``ddp``,
and for which :data:`EXPECTED` gives no reason. The exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.environment import describe

# Tests that use strategies most come first.
TESTS = (
    "models trainer callbacks checkpointing core loops accelerators strategies tuner loggers profilers plugins "
    "utilities overrides deprecated_api tests_fabric/test_fabric.py tests_fabric/test_wrappers.py "
    "tests_fabric/test_connector.py tests_fabric/test_cli.py tests_fabric/strategies tests_fabric/plugins "
    "tests_fabric/utilities"
).split()
PLAIN, DDP = "plain", "ddp"
STRATEGIES = ("zero1", "zero2_offload", "zero3")
GROUP = 12  # maximum number of files in one process


class Expected(NamedTuple):
    """Tests that need not pass with a strategy of this package, and the reason."""

    test: str  # a pattern for the identification of the test
    message: str  # a regular expression that occurs in its failure
    reason: str


_SPIES = "it spies on the `step` of the optimizer's class, which runs on pieces of shards, and in a trial before"
_REFUSED = "an optimizer that is not element-wise is refused"
_ENTRIES = "it lists the entries of a checkpoint, which has more: of this package's format, of its precision"
_SHARDED = (
    "`state_dict` of an optimizer would be empty, since its state is sharded: the error names what to call instead"
)
_ERRORS = "it asserts the text of an error; ours has the same facts in other words, or shows the object that was given"
_CLIPS = "it spies on torch's clipping by norm, which is not called: the factor is applied inside of the update"
_MOCK = "its mock of a ModelCheckpoint has no `dirpath`, whose interrupted saves are completed before a fit"
_RECURSION = "it has Lightning's `Strategy.backward` call that of the strategy, which calls it"
_BETWEEN = "gradients of micro-batches before the last one lie in shards: reading raises, with the call to use instead"
_CLOSURE = "the loss is computed before the optimizer's own `step`: one that forgets its closure trains all the same"
_BACKWARD = "as FSDP, the engine takes part in backward and casts the module, in a `setup_module` that it replaces"
_MASTERS = "`configure_model` makes full-precision weights, from which masters are taken; they are cast after it"
_PLUGINS = "precision is a ZeroPrecision; plugins of other classes are refused, with what works"
_SAVES = "it replaces `torch.save`, which writes the frame of a checkpoint, or the writer that ours stands in for"
EXPECTED = (
    Expected("checkpointing/test_checkpoint_callback_frequency.py::*", r"BadZipFile: File is not a zip file", _SAVES),
    Expected("checkpointing/*::test_trainer_save_checkpoint_storage_options", r"expected call not found", _SAVES),
    Expected("loops/optimization/test_closure.py::test_optimizer_step_no_closure_raises", r"DID NOT RAISE", _CLOSURE),
    Expected("loops/test_loops.py::test_validation_during_gradient_*", r"not complete: more micro-batches", _BETWEEN),
    Expected("tests_fabric/test_fabric.py::test_backward_required*", r"to call `fabric.backward|BFloat16", _BACKWARD),
    Expected("plugins/precision/test_half.py::test_configure_model*", r"torch\.float32 == torch\.", _MASTERS),
    Expected("plugins/precision/test_transformer_engine.py::test_configure_model", r"does not work with", _PLUGINS),
    Expected("plugins/test_amp_plugins.py::test_amp_ddp*ddp_spawn-2]", r"MyAMP does not|isinstance\(", _PLUGINS),
    Expected("models/test_amp.py::test_amp_cpus*", r"'ZeroPrecision' object has no attribute 'device'", _PLUGINS),
    Expected("trainer/test_trainer.py::test_train_loop_system", r"assert \['step', 'ste", _SPIES),
    Expected("*", r"At index \d+ diff: \{'name': '(Callback\.)?on_(save|load)_checkpoint'", _ENTRIES),
    Expected("*", r"state_dict\(\) would be empty: the state is sharded", _SHARDED),
    Expected("*", r"LBFGS cannot run over shards", _REFUSED),
    Expected("models/test_amp.py::test_precision_16_clip_gradients*", r"Expected 'clip_grad_norm_'", _CLIPS),
    Expected("trainer/*::test_stateful_trainer_ckpt_path_support", r"Mock object has no attribute 'dirpath'", _MOCK),
    Expected("trainer/*::test_interactive_incompatible_backend_error", r"strategy=<lightning_zero", _ERRORS),
    Expected("trainer/*::test_ddp_fork_on_unsupported_platform*", r"start method 'fork' is not available", _ERRORS),
    Expected("trainer/optimization/*", r"RecursionError[\s\S]+_mock_wraps", _RECURSION),
    Expected("callbacks/test_stochastic_weight_avg.py::*", r"maximum recursion depth exceeded", _RECURSION),
    Expected("trainer/optimization/*", r"assert \[call.*optim='sgd'\)\]", _SPIES),
    Expected("core/test_lightning_optimizer.py::*_manual_optimization_and_accumulated_gradients", r"assert", _SPIES),
    Expected("core/test_lightning_optimizer.py::*_automatic_optimization_optimizer_step", r"assert", _SPIES),
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test (``passed``, ``failed``, ``skipped`` or ``unfinished``), and the message if it failed."""

    result: str
    message: str = ""


Outcomes = dict[str, Outcome]


def run_files(
    checkout: Path, files: Sequence[str], strategy: str, seconds: float, one_process: bool = False
) -> tuple[Outcomes, bool]:
    """Run test files in one process, with a strategy instead of the default one.

    Args:
        checkout: a copy of Lightning's repository.
        files: test files, named as by :func:`find_files`.
        strategy: name of the strategy, or :data:`PLAIN`.
        seconds: time limit of a test; if the test does not end then, the process is killed after half that time again.
        one_process: skip tests that start other processes.

    Returns:
        The outcomes by test, and whether the process ended by itself.
    """
    environment = {key: value for key, value in os.environ.items() if key != "LIGHTNING_STRATEGY"}
    if strategy != PLAIN:
        environment["LIGHTNING_STRATEGY"] = strategy
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # The plugin is copied to a folder of its own: the path must not contain sources, which would hide the installed
        # package and its extension.
        shutil.copy(Path(__file__).with_name("lightning_substitute.py"), folder)
        environment |= {"PYTHONPATH": folder, "PL_RUN_STANDALONE_TESTS": "0"}
        environment["LIGHTNING_ONE_PROCESS"] = str(int(one_process))
        report, log = Path(folder) / "report.xml", Path(folder) / "log.txt"
        options = ["-p", "lightning_substitute", "-p", "no:cacheprovider", "-rN"]
        options += [f"--basetemp={folder}/tests", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        # Python 3.11 cannot parse the source again after a RecursionError, as pytest's own tracebacks would.
        options += ["--tb=native"]
        # A file that cannot be imported fails alone.
        options += ["--continue-on-collection-errors", "--timeout", str(seconds), "-v", "--color=no"]
        command = [sys.executable, "-m", "pytest", *options, *map(_path_of, files)]
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=checkout / "tests",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = _wait(process, log, 1.5 * seconds)
        if report.exists():
            return read_report(report.read_text()), True
        return read_log(log.read_text(errors="replace"), files[0], code), False


def _wait(process: subprocess.Popen[bytes], log: Path, silence: float) -> int | None:
    """Wait for a process and return its exit status.

    If it prints nothing for a while, it is killed with all processes of its session, and the result is ``None``.

    Args:
        process: the leader of a session of its own.
        log: file with its output.
        silence: seconds without output after which it is killed.
    """
    size, since = 0, time.monotonic()
    try:
        while process.poll() is None and time.monotonic() - since < silence:
            time.sleep(0.5)
            if log.stat().st_size != size:
                size, since = log.stat().st_size, time.monotonic()
        return process.poll()
    finally:
        with contextlib.suppress(ProcessLookupError):  # no process of the session is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _path_of(name: str) -> str:
    """The path of a file or folder in Lightning's ``tests``: among the Trainer's, unless it is in ``tests_fabric``."""
    return name if name.startswith("tests_fabric") else f"tests_pytorch/{name}"


def _name_of(path: str) -> str:
    """The inverse of :func:`_path_of`."""
    return re.sub(r"^(?:tests/)?(?:tests_pytorch/)?", "", path)


def read_report(xml: str) -> Outcomes:
    """The outcomes in an XML report of pytest."""
    outcomes = {}
    for case in ET.fromstring(xml).iter("testcase"):
        file = _name_of(case.get("file", ""))
        inner = case.get("classname", "").rpartition(f"{Path(file).stem}")[2].strip(".")  # a class
        name = "::".join(part for part in (file, inner, case.get("name", "")) if part)
        failed = next((found for kind in ("failure", "error") if (found := case.find(kind)) is not None), None)
        if failed is not None:
            outcomes[name] = Outcome("failed", f"{failed.get('message', '')}\n{failed.text or ''}")
        else:
            outcomes.setdefault(name, Outcome("passed" if case.find("skipped") is None else "skipped"))
    return outcomes


def read_log(log: str, file: str, code: int | None) -> Outcomes:
    """The outcomes of a run that did not end by itself, from its output.

    Args:
        log: the output.
        file: the file to name if the output names no test.
        code: the exit status; ``None`` for a process that was killed.
    """
    outcomes = {}
    why = "it took too long" if code is None else f"the process ended with {code}"
    for line in log.splitlines():
        if found := re.match(r"(\S*\.py)::(.+?)(?: (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS|RERUN)\b.*| *)$", line):
            path, name, result = found.groups()
            ended = {"ERROR": "failed", "XFAIL": "skipped", "XPASS": "passed"}.get(result, (result or "").lower())
            outcomes[f"{_name_of(path)}::{name}"] = Outcome(ended) if result else Outcome("unfinished", why)
    return outcomes or {f"{file}::": Outcome("unfinished", why)}


class Runs:
    """Runs test files, and keeps their outcomes in a folder so that they need not run again.

    Args:
        checkout: a copy of Lightning's repository.
        seconds: time limit of a test.
        kept: folder with outcomes of earlier runs, to which new ones are added.
        one_process: skip tests that start other processes.
    """

    def __init__(self, checkout: Path, seconds: float, kept: Path, one_process: bool = False) -> None:
        self.kept = kept
        self._run = functools.partial(run_files, checkout, seconds=seconds, one_process=one_process)

    def together(self, files: Sequence[str], strategy: str) -> Outcomes:
        """Run files in one process and return the outcomes; if a file ends the process, the rest run in another one."""
        outcomes: Outcomes = {}
        rest = [file for file in files if not self._file_of(file, strategy).exists()]
        while rest:
            found, ended = self._run(rest, strategy)
            reached = rest if ended else rest[: 1 + max(rest.index(_file_of(name)) for name in found)]
            for file in reached:
                self._keep(file, strategy, {name: one for name, one in found.items() if _file_of(name) == file})
            rest = rest[len(reached) :]
        for file in files:
            outcomes |= self._kept(file, strategy)
        return outcomes

    def alone(self, file: str, strategy: str) -> Outcomes:
        """Run a file in a process of its own and return the outcomes."""
        mark = self._file_of(file, f"{strategy}-alone")
        if not mark.exists():
            self._keep(file, strategy, self._run([file], strategy)[0])
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        return self._kept(file, strategy)

    def group(self, files: Sequence[str], strategies: Sequence[str]) -> dict[str, Outcomes]:
        """Outcomes by strategy, including :data:`PLAIN` and, for files with differences, :data:`DDP`."""
        results = {PLAIN: self.together(files, PLAIN), DDP: {}}
        differ: dict[str, None] = {}
        for strategy in strategies:
            results[strategy] = self.together(files, strategy)
            for file in dict.fromkeys(map(_file_of, differing(results[PLAIN], results[strategy]))):
                alone = self.alone(file, strategy)
                own = {name: one for name, one in results[strategy].items() if _file_of(name) != file}
                results[strategy] = own | alone
                if any(_file_of(name) == file for name in differing(results[PLAIN], results[strategy])):
                    differ[file] = None
        for file in differ:
            results[DDP] |= self.alone(file, DDP)
        return results

    def _file_of(self, file: str, strategy: str) -> Path:
        return self.kept / strategy / f"{file}.json"

    def _keep(self, file: str, strategy: str, outcomes: Outcomes) -> None:
        target = self._file_of(file, strategy)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()}))

    def _kept(self, file: str, strategy: str) -> Outcomes:
        read = json.loads(self._file_of(file, strategy).read_text())
        return {name: Outcome(**outcome) for name, outcome in read.items()}


def _file_of(name: str) -> str:
    return name.partition("::")[0]


def differing(plain: Outcomes, other: Outcomes) -> list[str]:
    """The tests that pass in ``plain``, with nothing replaced, but not in ``other``."""
    return [name for name, one in plain.items() if one.result == "passed" and not _passes(other, name)]


def _passes(outcomes: Outcomes, name: str) -> bool:
    return name in outcomes and outcomes[name].result == "passed"


def reason_for(name: str, outcome: Outcome | None, expected: Iterable[Expected] = EXPECTED) -> str | None:
    """The reason why a test is expected not to pass; ``None`` if it is expected to pass."""
    message = "" if outcome is None else outcome.message
    for entry in expected:
        if fnmatch.fnmatchcase(name, entry.test) and re.search(entry.message, message):
            return entry.reason
    return None


def compare(results: Mapping[str, Outcomes], strategy: str, expected: Iterable[Expected] = EXPECTED) -> dict[str, Any]:
    """Compare the outcomes of one strategy with those of nothing replaced and of ``ddp``.

    Args:
        results: outcomes by strategy.
        strategy: the strategy to compare.
        expected: differences that have a reason.
    """
    plain, own = results[PLAIN], results[strategy]
    names = differing(plain, own)
    theirs = [name for name in names if not _passes(results[DDP], name)]
    rest = [name for name in names if name not in theirs]
    reasons = {name: reason for name in rest if (reason := reason_for(name, own.get(name), expected)) is not None}
    return {
        "passed_with_and_without": sum(_passes(own, name) for name, one in plain.items() if one.result == "passed"),
        "passed_without": sum(outcome.result == "passed" for outcome in plain.values()),
        "differs_under_ddp_too": sorted(theirs),
        "expected": {
            reason: sorted(n for n in reasons if reasons[n] == reason) for reason in sorted(set(reasons.values()))
        },
        "unexplained": {name: _last_line(own.get(name)) for name in rest if name not in reasons},
    }


def by_folder(results: Mapping[str, Outcomes]) -> dict[str, dict[str, int]]:
    """By folder, the number of tests that pass with nothing replaced, and how many of these pass with each strategy."""
    table: dict[str, Counter[str]] = {}
    for name, one in results[PLAIN].items():
        if one.result == "passed":
            parts = Path(_file_of(name)).parts
            row = table.setdefault("/".join(parts[: 2 if parts[0] == "tests_fabric" else 1]), Counter())
            row.update(strategy for strategy in results if strategy != DDP and _passes(results[strategy], name))
    return {folder: dict(row) for folder, row in table.items()}


def _last_line(outcome: Outcome | None) -> str:
    if outcome is None:
        return "it did not run"
    lines = [line.removeprefix("E ").strip() for line in outcome.message.splitlines() if line.startswith("E  ")]
    first = outcome.message.strip().splitlines()[0] if outcome.message.strip() else outcome.result
    return (lines[0] if lines else first)[:300]


def find_files(checkout: Path, chosen: Sequence[str]) -> list[str]:
    """Find the test files with the chosen names or in the chosen folders.

    Names are relative to the folder of the Trainer's tests; those of Fabric begin with ``tests_fabric/``.

    Raises:
        FileNotFoundError: a name does not exist.
    """
    folder = checkout / "tests"
    files: dict[str, None] = {}
    for name in chosen:
        path = folder / _path_of(name)
        if not path.exists():
            raise FileNotFoundError(
                f"{path} does not exist; expected a copy of Lightning's repository, names in its tests/tests_pytorch"
            )
        found = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        files.update((_name_of(str(file.relative_to(folder))), None) for file in found)
    return list(files)


def groups_of(files: Iterable[str]) -> list[list[str]]:
    """Group consecutive files of the same folder, at most :data:`GROUP` per group."""
    folders = (list(group) for _, group in itertools.groupby(files, lambda file: Path(file).parent))
    return [group[at : at + GROUP] for group in folders for at in range(0, len(group), GROUP)]


def run_all(runs: Runs, files: Sequence[str], strategies: Sequence[str], jobs: int) -> dict[str, Outcomes]:
    """Run all files with all strategies, ``jobs`` at a time, print differences by group, and return the outcomes."""
    results: dict[str, Outcomes] = {strategy: {} for strategy in (PLAIN, DDP, *strategies)}
    groups = groups_of(files)
    with ThreadPoolExecutor(jobs) as pool:
        for group, found in zip(groups, pool.map(lambda group: runs.group(group, strategies), groups), strict=True):
            for strategy, outcomes in found.items():
                results[strategy].update(outcomes)
                counts = Counter(outcome.result for outcome in outcomes.values())
                print(f"{group[0]}, ... {strategy}: {', '.join(f'{n} {what}' for what, n in sorted(counts.items()))}")
            for strategy in strategies:
                for name, message in compare(found, strategy)["unexplained"].items():
                    print(f"  {strategy}: {name}: {message}")
            sys.stdout.flush()
    return results


def show(strategy: str, compared: Mapping[str, Any]) -> None:
    """Print the result of :func:`compare`."""
    print(f"\n{strategy}: {compared['passed_with_and_without']} of {compared['passed_without']} passed;", end=" ")
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
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, help="names to try")
    parser.add_argument(
        "--tests", nargs="+", default=TESTS, metavar="NAME", help="files or folders of Lightning's tests"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes that run side by side")
    parser.add_argument("--seconds", type=float, default=150.0, help="for one test")
    parser.add_argument("--one-process", action="store_true", help="skip the tests that start ranks or scripts")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="outcomes, which spare another run the same files")
    parser.add_argument("--out", type=Path, help="file for the result, as JSON")
    chosen = parser.parse_args(arguments)
    checkout = chosen.checkout.resolve()
    files = find_files(checkout, chosen.tests)
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(checkout, chosen.seconds, chosen.keep or Path(folder), chosen.one_process)
        results = run_all(runs, files, chosen.strategies, chosen.jobs)
    compared = {strategy: compare(results, strategy) for strategy in chosen.strategies}
    for strategy, one in compared.items():
        show(strategy, one)
    if chosen.out is not None:
        described = describe() | {"tests_of": _version_of(checkout)}
        content = {"environment": described, "tests": list(chosen.tests), "passed": by_folder(results)}
        chosen.out.write_text(json.dumps(content | {"strategies": compared}, indent=2) + "\n")
    return int(any(one["unexplained"] for one in compared.values()))


def _version_of(checkout: Path) -> str:
    """The version of the checkout, read from Lightning's version file."""
    file = checkout / "src" / "version.info"
    return file.read_text().strip() if file.exists() else f"unknown; installed is {version('lightning')}"


if __name__ == "__main__":
    sys.exit(main())
