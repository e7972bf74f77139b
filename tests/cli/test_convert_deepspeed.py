"""`lightning-zero convert-deepspeed`: what it prints, and with which exit code it ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.deepspeed_folder import Folder, write_folder
from typer.testing import CliRunner, Result

from lightning_zero.cli import app

WEIGHT = torch.randn(3, 5)


def invoke(*arguments: Any) -> Result:
    words = ["convert-deepspeed", *map(str, arguments)]
    return CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folder") / "last.ckpt"
    entry = {"step": torch.tensor(2.0), "exp_avg": torch.ones(3, 5), "exp_avg_sq": torch.ones(3, 5)}
    groups = [{"lr": 0.5, "betas": (0.9, 0.99), "params": ["a"]}]
    checkpoint = {
        "state_dict": {"a": WEIGHT, "tied": WEIGHT, "buffer": torch.ones(1)},
        "optimizer_states": [{"state": {"a": entry}, "param_groups": groups}],
    }
    write_folder(path, checkpoint, set(), {"buffer"}, Folder(3, more={"mine": object}))
    return path


def test_it_says_what_is_in_the_file(folder: Path, tmp_path: Path) -> None:
    result = invoke(folder, tmp_path / "out.ckpt", "--trust")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"{tmp_path / 'out.ckpt'}: 3 tensors, 64 B, from DeepSpeed 0.19.8, stage 3, 2 ranks",
        "optimizer: step, exp_avg, exp_avg_sq of 1 parameter in 1 group",
        "tied: tied is a, stored once",
        "left out, no plain value: mine, a builtins.type",
        "note: Lightning has not written this folder; epochs and steps of a resumed fit are counted from 0",
    ]
    assert torch.equal(torch.load(tmp_path / "out.ckpt", weights_only=True)["state_dict"]["a"], WEIGHT)
    printed = json.loads(invoke(folder, tmp_path / "json.ckpt", "--trust", "--json").stdout)
    assert (printed["schema"], printed["out"], printed["stage"]) == (1, str(tmp_path / "json.ckpt"), 3)
    assert (printed["tied"], printed["state"]) == ({"tied": "a"}, ["step", "exp_avg", "exp_avg_sq"])


def test_without_trust_nothing_is_read(folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(folder, tmp_path / "a")
    for file in (folder / "checkpoint").iterdir():
        file.write_bytes(b"reading this would fail")
    result = invoke(folder, tmp_path / "out.ckpt")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "a pickle can run any program" in result.stderr
    assert result.stderr.endswith(f"lightning-zero convert-deepspeed {folder} {tmp_path / 'out.ckpt'} --trust\n")


@pytest.fixture(scope="module")
def in_a_process(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    code = "import sys\nfrom lightning_zero.cli import app\nprint(app(sys.argv[1:], standalone_mode=False))\n"
    code += "print('lightning' in sys.modules, 'deepspeed' in sys.modules)"
    out = tmp_path_factory.mktemp("out") / "a.ckpt"
    command = [sys.executable, "-P", "-c", code, "convert-deepspeed", str(folder), str(out), "--trust"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=os.environ)


def test_it_imports_neither_lightning_nor_deepspeed(in_a_process: subprocess.CompletedProcess[str]) -> None:
    assert in_a_process.returncode == 0, in_a_process.stderr
    assert in_a_process.stdout.endswith("0\nFalse False\n")
    assert in_a_process.stderr == ""
