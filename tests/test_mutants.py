"""The script that plants mutants: its list fits the package and the tests, and it sees who survives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mutants import catalogue
from mutants.catalogue import Mutant, StaleError
from mutants.generate import Changes

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "lightning_zero"


def test_the_list_fits_the_package_and_the_tests() -> None:
    mutants = catalogue.read(TESTS / "mutants")
    assert len(mutants) >= 86
    catalogue.check(mutants, PACKAGE, TESTS.parent)


def test_stale_entries_are_named(tmp_path: Path) -> None:
    (tmp_path / "add.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_add.py").write_text("def test_add(): ...\n")
    fits = Mutant("fits", "add.py", "a + b", "a - b", killed_by=("test_add.py::test_add[1]",))
    catalogue.check([fits], tmp_path, tmp_path)
    stale = [
        Mutant("moved", "sub.py", "a + b", "a - b", killed_by=fits.killed_by),
        Mutant("gone", "add.py", "a * b", "a - b", killed_by=fits.killed_by),
        Mutant("twice", "add.py", "a", "b", killed_by=fits.killed_by),
        Mutant("broken", "add.py", "a + b", "a +", killed_by=fits.killed_by),
        Mutant("equal", "add.py", "a + b", "a + b", killed_by=fits.killed_by),
        Mutant("renamed", "add.py", "a + b", "a - b", killed_by=("test_add.py::test_sub",)),
        Mutant("alone", "add.py", "a + b", "a - b"),
        fits,
    ]
    with pytest.raises(StaleError) as caught:
        catalogue.check([fits, *stale], tmp_path, tmp_path)
    named = [line.strip().partition(":")[0] for line in str(caught.value).splitlines()[1:]]
    assert named == ["fits", *(mutant.id for mutant in stale[:-1])]


@pytest.mark.slow  # a run of its own, with workers that import pytest, is seconds on a busy machine
def test_a_survivor_fails_the_run(tmp_path: Path) -> None:
    """Tests of a package that is installed elsewhere see the mutant, and processes that they start see it too."""
    installed = tmp_path / "installed" / "sums"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("def add(a, b):\n    return a + b\n\n\ndef unused():\n    return 1\n")
    (tmp_path / "test_sums.py").write_text(
        "import subprocess, sys\n"
        "import sums\n"
        "def test_add(): assert sums.add(2, 1) == 3\n"
        "SCRIPT = 'import sums; assert sums.add(2, 1) == 3'\n"
        "def test_script(): subprocess.run([sys.executable, '-c', SCRIPT], check=True)\n"
    )
    lists = tmp_path / "lists"
    lists.mkdir()
    nodes = ("test_sums.py::test_add", "test_sums.py::test_script")
    mutants = [
        Mutant("minus", "__init__.py", "a + b", "a - b", killed_by=nodes),
        Mutant("unused", "__init__.py", "return 1", "return 2", killed_by=nodes[:1]),
    ]
    (lists / "sums.toml").write_text("\n".join(mutant.toml() for mutant in mutants))
    assert catalogue.read(lists) == mutants
    command = [sys.executable, "-P", "-m", "mutants", "--all", "--package=sums", "--preload=pytest,hypothesis,xdist"]
    path = f"{TESTS}:{installed.parent}"
    done = subprocess.run(
        [*command, f"--root={tmp_path}", f"--catalogue={lists}"],
        env={"PYTHONPATH": path, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert done.returncode == 1, done.stdout + done.stderr
    assert "passed" in lines["2"]
    assert all(node in lines["minus"] for node in nodes)
    assert "SURVIVED" in lines["unused"]
    assert lines["1"] == "1 of 2 killed: unused"


def test_generated_changes_are_python_and_differ() -> None:
    source = (PACKAGE / "sharding" / "layout.py").read_text()
    changes = Changes(source).found
    assert {"operator", "comparison", "offset", "negation", "skipped-call", "opposite"} <= {c.kind for c in changes}
    for change in changes:
        changed = source[: change.start] + change.becomes + source[change.end :]
        assert changed != source
        compile(changed, "layout.py", "exec")
