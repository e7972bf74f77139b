"""All verbs of `lightning-zero` behave alike: help, `--json`, errors and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lightning_zero.cli import app

GROUP: Any = typer.main.get_command(app)
WRONG = {  # arguments of an error
    "estimate": ["--params", "7e9"],
    "config": ["--params", "7e9", "--layers", "1", "--hidden", "8"],
    "import-deepspeed": ["missing.json"],
    "inspect": ["missing.ckpt"],
    "export": ["missing.ckpt", "out"],
    "consolidate": ["missing", "out"],
    "convert-deepspeed": ["missing", "out", "--trust"],
}


def test_help_is_one_text_in_one_order() -> None:
    """Lines fit a terminal of 80 columns: help prints them as they are."""
    assert list(GROUP.commands) == ["doctor", *WRONG]
    for name, verb in GROUP.commands.items():
        first, *rest = verb.help.splitlines()
        assert first.endswith("."), name
        assert first[0].isupper()
        assert all(len(line) <= 78 for line in rest), name
        options = {option for parameter in verb.params for option in parameter.opts}
        assert "--json" in options, name
        for parameter in verb.params:
            assert parameter.help.endswith("."), (name, parameter.name)
    printed = CliRunner().invoke(app, ["--help"], terminal_width=100).stdout
    for code in ("0 after success", "1 after an error", "2 for wrong arguments", "130 after Ctrl-C"):
        assert code in printed


@pytest.mark.parametrize("name", WRONG)
def test_errors_go_to_stderr_with_their_exit_code(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed = CliRunner().invoke(app, [name, *WRONG[name], "--json"])
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert failed.stderr.startswith("error: ")
    assert not list(tmp_path.iterdir())
    wrong = CliRunner().invoke(app, [name, *WRONG[name], "--jsno"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "--json" in wrong.stderr


def test_json_is_one_object_with_the_version_of_its_schema(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text("{}")
    arguments = ["import-deepspeed", str(tmp_path / "ds_config.json"), "--dry-run", "--json"]
    assert json.loads(CliRunner().invoke(app, arguments).stdout)["schema"] == 1
