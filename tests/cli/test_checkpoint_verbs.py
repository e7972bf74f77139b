"""`lightning-zero inspect` and `export`: what they print, and with which exit code they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import lightning_zero
from lightning_zero.cli import app

FIELDS = [
    "schema",
    "file",
    "file_bytes",
    "global_step",
    "epoch",
    "lightning_version",
    "written_by",
    "loss_scale",
    "skipped_steps",
    "tensors",
    "weights_bytes",
    "other_entries",
    "optimizers",
    "optimizer_bytes",
    "callbacks",
    "keys",
    "opaque",
]
WEIGHTS = {"model.a": torch.randn(2, 3), "model.b": torch.randn(4), "other": torch.tensor(1)}


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_the_version_is_printed() -> None:
    assert invoke("--version").stdout == f"lightning-zero {lightning_zero.__version__}\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "a.ckpt"
    state = {"model.a": {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2, 3)}}
    groups = [{"lr": 0.01, "betas": (0.9, 0.95), "params": ["model.a"]}, {"lr": float("inf"), "params": ["model.b"]}]
    torch.save(
        {
            "epoch": 1,
            "global_step": 30,
            "pytorch-lightning_version": "2.6.6",
            "state_dict": WEIGHTS | {"model.tied": WEIGHTS["model.a"]},
            "optimizer_states": [{"state": state, "param_groups": groups}],
            "callbacks": {"[red]Markup": {}},
            "lightning_zero": {"version": "0.1.0", "world_size": 4, "stage": 3},
            "ZeroPrecision": {"skipped_steps": 2, "scaler": {"scale": 512.0}},
        },
        path,
    )
    return path


def test_inspect_prints_json(checkpoint: Path) -> None:
    result = invoke("inspect", checkpoint, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout, parse_constant=pytest.fail)  # no NaN or Infinity
    assert list(report) == FIELDS
    assert report["schema"] == 1
    assert report["tensors"][0] == {
        "name": "model.a",
        "shape": [2, 3],
        "dtype": "float32",
        "bytes": 24,
        "same_as": None,
    }
    assert report["tensors"][3]["same_as"] == "model.a"
    assert report["weights_bytes"] == 24 + 16 + 8
    assert report["optimizers"][0]["groups"][0] == {
        "parameters": ["model.a"],
        "hyperparameters": {"lr": 0.01, "betas": [0.9, 0.95]},
    }
    assert report["optimizers"][0]["groups"][1]["hyperparameters"] == {"lr": "inf"}
    assert report["written_by"] == {"version": "0.1.0", "world_size": 4, "stage": 3}


def test_inspect_prints_tables_of_whole_lines(checkpoint: Path) -> None:
    result = invoke("inspect", checkpoint)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) < 150 + len(str(checkpoint))  # nothing is filled up
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for line in (
        "step 30",
        "epoch 1",
        "Lightning 2.6.6",
        "written by version 0.1.0, world_size 4, stage 3",
        "loss scale 512.0",
        "skipped steps 2",
        "callbacks [red]Markup",
        "Weights: 4 tensors, 48 B",
        "model.a 2 x 3 float32 24",
        "other scalar int64 8",
        "model.tied 2 x 3 float32 24 same as model.a",
        "0 1 lr=0.01, betas=[0.9, 0.95]",
        "1 1 lr=inf",
        "exp_avg 1 float32 24",
        "total 76 B in tensors",
    ):
        assert line in lines


def test_export_says_what_became_of_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    result = invoke("export", checkpoint, tmp_path / "out", "--dtype", "bf16", "--strip-prefix", "model.")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"{tmp_path / 'out'}: model.safetensors, 2 tensors, 20 B, verified",
        "stripped: model.",
        "tied: tied is a, stored once",
        "left out, beginning otherwise: other",
    ]
    found = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(found["a"], WEIGHTS["model.a"].bfloat16())
    result = invoke("export", checkpoint, tmp_path / "out", "--max-shard-size", "24B", "--overwrite")
    assert result.stdout.startswith(f"{tmp_path / 'out'}: 2 files, 3 tensors, 48 B, verified\n")
    assert (tmp_path / "out/model.safetensors.index.json").is_file()
    assert not (tmp_path / "out/model.safetensors").exists()
    printed = json.loads(invoke("export", checkpoint, tmp_path / "json", "--json").stdout)
    assert (printed["schema"], printed["directory"], printed["bytes"]) == (1, str(tmp_path / "json"), 48)
    assert (printed["files"], printed["tied"]) == (["model.safetensors"], {"model.tied": "model.a"})


def test_every_verb_has_json_and_says_what_it_does() -> None:
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, verb in verbs.items():
        assert "--json" in {option for parameter in verb.params for option in parameter.opts}, name
        assert verb.help, name
    text = invoke("--help").stdout
    assert "Exit codes: 0 after success" in text
    assert all(name in text for name in verbs)


def test_export_for_transformers_advises_on_names(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"model.a": torch.ones(2)}}, path)
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "gpt2"}')
    result = invoke("export", path, tmp_path / "out", "--format", "hf", "--config", config)
    assert result.exit_code == 0
    assert "note: all names begin with 'model.'" in result.stdout
    result = invoke("export", path, tmp_path / "out2", "--format", "hf", "--config", config, "--strip-prefix", "auto")
    assert "note" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "none.ckpt"], "none.ckpt: No such file or directory"),
        (["inspect", "text"], "text is not a checkpoint"),
        (["export", "text", "out"], "text is not a checkpoint"),
        (["export", "a.ckpt", "."], ". is not empty"),
        (["export", "a.ckpt", "out", "--strip-prefix", "net"], "prefixes are model."),
        (["export", "a.ckpt", "out", "--format", "hf"], "--config FOLDER"),
        (["export", "a.ckpt", "out", "--format", "hf", "--config", "none"], "none: No such file or directory"),
        (["export", "a.ckpt", "text/out"], "Not a directory"),
    ],
)
def test_errors_say_what_to_do(
    arguments: list[str], message: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("text")
    (tmp_path / "a.ckpt").symlink_to(checkpoint)
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert {file.name for file in tmp_path.iterdir()} == {"text", "a.ckpt"}


def test_wrong_options_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    for option in (["--format", "gguf"], ["--dtype", "int8"], ["--max-shard-size", "big"], ["--config", "x"]):
        result = invoke("export", checkpoint, tmp_path / "out", *option)
        assert result.exit_code == 2
        assert option[0] in result.stderr
    assert not (tmp_path / "out").exists()


def test_neither_imports_lightning(checkpoint: Path, tmp_path: Path) -> None:
    code = """
import json, sys
from lightning_zero.cli import app
for words in json.loads(sys.argv[1]):
    print(app(words, standalone_mode=False))
print('lightning' in sys.modules, 'transformers' in sys.modules)
"""
    verbs = [["inspect", str(checkpoint)], ["export", str(checkpoint), str(tmp_path / "out")]]
    command = [sys.executable, "-P", "-c", code, json.dumps(verbs)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=os.environ)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert (lines.count("0"), lines[-2:]) == (2, ["0", "False False"])
