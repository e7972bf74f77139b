"""The workflows: their syntax, what they pin, and that they build what pyproject.toml promises."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from lightning_zero.cli import app

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
CIBUILDWHEEL: dict[str, Any] = PROJECT["tool"]["cibuildwheel"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(name: str) -> dict[str, Any]:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    found: dict[str, Any] = workflow["jobs"]
    return found


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_jobs_limited(path: Path) -> None:
    text = path.read_text()
    uses = re.findall(r"uses: (.*)", text)
    assert uses
    assert all(re.fullmatch(r"[\w-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in uses)
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] > 0
        assert not re.search(r"latest", str(job["runs-on"]))


def test_wheels_are_built_for_every_python_of_the_classifiers() -> None:
    named = re.findall(r"Python :: 3\.(\d+)", " ".join(PROJECT["project"]["classifiers"]))
    assert CIBUILDWHEEL["build"] == [f"cp3{minor}-*" for minor in named]
    assert PROJECT["project"]["requires-python"] == f">=3.{min(map(int, named))}"
    assert not any(fnmatch("cp311-manylinux_x86_64", pattern) for pattern in CIBUILDWHEEL["skip"])


def test_every_architecture_has_a_machine_and_an_image() -> None:
    machines = {entry["arch"]: entry["runner"] for entry in jobs("release")["wheels"]["strategy"]["matrix"]["include"]}
    assert machines == {"x86_64": "ubuntu-24.04", "aarch64": "ubuntu-24.04-arm"}
    linux = CIBUILDWHEEL["linux"]
    assert {name for name in linux if name.startswith("manylinux")} == {f"manylinux-{arch}-image" for arch in machines}
    assert any(command.startswith("auditwheel repair ") for command in linux["repair-wheel-command"])
    assert any(re.search(r"cibuildwheel==\d+\.\d+\.\d+", command) for command in commands(jobs("release")["wheels"]))


def test_the_smoke_test_is_a_verb() -> None:
    program, verb = CIBUILDWHEEL["test-command"].split()
    group: Any = typer.main.get_command(app)
    assert program in PROJECT["project"]["scripts"]
    assert verb in group.commands


def test_only_a_tag_is_published_and_only_what_was_tested() -> None:
    release = jobs("release")
    publish = release["publish"]
    assert set(publish["needs"]) == set(release) - {"publish"}
    assert "ref_type == 'tag'" in publish["if"]
    assert [name for name, job in release.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    uploaded = [
        step["with"]["name"] for job in release.values() for step in job["steps"] if "name" in step.get("with", {})
    ]
    download = publish["steps"][0]["with"]["pattern"]
    assert len(uploaded) == 2
    assert all(fnmatch(name, download) for name in uploaded)


def test_another_package_is_installed_in_the_place_of_one(tmp_path: Path) -> None:
    pip, log = tmp_path / "venv/bin/pip", tmp_path / "log"
    pip.parent.mkdir(parents=True)
    (pip.parent / "python").touch()
    pip.write_text(f'#!/bin/sh\necho "$2 $3" >> {log}\n')
    pip.chmod(0o755)
    wheel = tmp_path / "own.whl"
    wheel.touch()
    for package in ("-e .", "-e .", str(wheel)):
        command = ["make", f"{tmp_path}/venv/.installed-dev", f"VENV={tmp_path}/venv", f"PACKAGE={package}"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert log.read_text().split() == ["-e", ".[examples,dev]", f"{wheel}[examples,dev]"]


def test_continuous_integration_runs_what_a_developer_runs() -> None:
    assert commands(jobs("ci")["run"]) == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert re.search(r"^docs:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert commands(jobs("ci")["docs"]) == ["make docs"]
