"""The acceptance run over Lightning's tests: what it replaces, reads and compares. The run itself is not a test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.benchmark import load
from lightning.pytorch.accelerators import CPUAccelerator

from lightning_zero import ZeroStrategy

suite = load("lightning_suite")
substitute = load("lightning_substitute").substitute
FILE = "models/test_small.py"
TESTS = """
import os
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

def test_default():
    assert isinstance(Trainer(accelerator="cpu", devices=1).strategy, SingleDeviceStrategy)

class TestOfAClass:
    @pytest.mark.parametrize("name", ["a b", "c"])
    def test_given(self, name):
        assert type(Trainer(accelerator="cpu", devices=1, strategy="ddp").strategy) is DDPStrategy

def test_ours():
    assert type(Trainer(accelerator="cpu", devices=1).strategy).__name__ != "ZeroStrategy", "a class name"

@pytest.mark.skipif(True, reason="never")
def test_never():
    raise AssertionError
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    file = tmp_path / "tests" / "tests_pytorch" / FILE
    file.parent.mkdir(parents=True)
    file.write_text(TESTS)
    file.with_name("test_absent.py").write_text("import a_package_that_is_absent\n")
    return tmp_path


# As after a RecursionError, whose sources Python 3.11 cannot parse again, so that pytest cannot show the failure.
NOT_SHOWN = "import ast\n\ndef test_a():\n    ast.parse = None\n    raise OSError('lost')\n\ndef test_b(): ...\n"


@pytest.mark.slow
def test_what_a_strategy_changes_is_told_apart(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    last = "models/test_z.py"
    (checkout / "tests" / "tests_pytorch" / last).write_text(NOT_SHOWN)
    processes: list[tuple[Sequence[str], str]] = []
    found: dict[str, Any] = {}
    run_files = suite.run_files

    def run(checkout: Path, files: Sequence[str], strategy: str, **limits: Any) -> tuple[Any, bool]:
        """One process for each strategy; a file that runs again alone would end as among the others."""
        processes.append((files, strategy))
        if strategy not in found:
            found[strategy], ended = run_files(checkout, files, strategy, **limits)
            assert ended
        return {name: one for name, one in found[strategy].items() if name.partition("::")[0] in files}, True

    monkeypatch.setattr(suite, "run_files", run)
    runs = suite.Runs(checkout, 100.0, checkout / "kept")
    files = suite.find_files(checkout, ["models"])
    results = runs.group(files, ["zero3"])
    assert processes == [(files, "plain"), (files, "zero3"), ([FILE], "zero3"), ([FILE], "ddp")]
    shown = results["plain"][f"{last}::test_a"]
    assert shown.result == "failed"
    assert "lost" in shown.message
    given = {f"{FILE}::TestOfAClass::test_given[{name}]" for name in ("a b", "c")}
    assert {name for name, outcome in results["plain"].items() if outcome.result == "passed"} == given | {
        f"{FILE}::test_default",
        f"{FILE}::test_ours",
        f"{last}::test_b",
    }
    assert all(name.startswith(FILE) for name in results["ddp"]), "only files that differ run with it"
    compared = suite.compare(results, "zero3", ())
    assert compared["passed_with_and_without"] == 3
    assert compared["passed_without"] == 5
    assert compared["differs_under_ddp_too"] == [f"{FILE}::test_default"]
    assert list(compared["unexplained"]) == [f"{FILE}::test_ours"]
    assert "a class name" in compared["unexplained"][f"{FILE}::test_ours"]
    expected = (
        suite.Expected("*::test_o*", "no such message", "no"),
        suite.Expected("*::test_o*", "a class name", "it asserts one"),
    )
    explained = suite.compare(results, "zero3", expected)
    assert explained["expected"] == {"it asserts one": [f"{FILE}::test_ours"]}
    assert not explained["unexplained"]


def test_the_strategy_stands_in_for_the_default_alone() -> None:
    assert substitute({}, "zero3") == "zero3"
    assert substitute({"strategy": "auto", "accelerator": CPUAccelerator()}, "ddp") == "ddp"
    assert substitute({"strategy": "auto", "accelerator": "gpu"}, "zero3") == "auto"
    assert substitute({"strategy": "fsdp"}, "zero3") == "fsdp"
    assert substitute({"strategy": "ddp_spawn"}, "ddp") == "ddp_spawn"
    spawning = substitute({"strategy": "ddp_spawn"}, "zero2_offload")
    assert isinstance(spawning, ZeroStrategy)
    assert (spawning.stage, spawning.offload_optimizer, spawning.start_method) == (2, "cpu", "spawn")


def test_a_run_that_was_cut_short_is_read_from_its_log() -> None:
    log = f"tests_pytorch/{FILE}::test_a[x y] PASSED   [ 10%]\ntests_pytorch/{FILE}::test_b FAILED\n{FILE}::test_c \n"
    found = suite.read_log(log, FILE, None)
    assert [found[f"{FILE}::{name}"].result for name in ("test_a[x y]", "test_b", "test_c")] == [
        "passed",
        "failed",
        "unfinished",
    ]
    assert suite.read_log("", FILE, -9) == {f"{FILE}::": suite.Outcome("unfinished", "the process ended with -9")}


def test_names_are_files_or_folders_of_the_checkout(checkout: Path) -> None:
    assert suite.find_files(checkout, [FILE, "models"]) == [FILE, "models/test_absent.py"]
    with pytest.raises(FileNotFoundError, match=r"nothing.*expected a copy of Lightning's repository"):
        suite.main([str(checkout), "--tests", "nothing"])
