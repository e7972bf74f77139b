"""`lightning-zero import-deepspeed`: what it prints and writes, and with which exit code it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from lightning_zero.cli import app

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "zero_quantized_gradients": True},
    "gradient_cliping": 0.5,
    "wandb": {"enabled": True, "team": "a secret"},
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("ds_config.json")
    path.write_text(json.dumps(CONFIG))
    return path


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["import-deepspeed", *map(str, arguments)], catch_exceptions=False)


def test_the_table_says_what_became_of_every_key(file: Path) -> None:
    result = invoke(file, "--devices", 2, "--nodes", 3)
    assert result.exit_code == 0
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    titles = [line for line in lines if line and not line.startswith(" ")]
    assert titles == [
        "Taken over",
        "Taken over under another name",
        "No meaning here",
        "Left open in the file: to be given here",
        "Not supported",
        "Unknown",
        (
            "11 keys: 3 taken over, 3 taken over under another name, 1 no meaning here, 1 left open in the file, "
            "2 not supported, 1 unknown"
        ),
        "ds_config.yaml: strategy=zero2, precision=bf16_true, optimizer=adamw",
    ]
    rows = {line.split()[0]: line for line in lines if line.startswith("  ")}
    assert "strategy.stage" in rows["zero_optimization.stage"]
    assert "DataLoader(batch_size=4)" in rows["train_micro_batch_size_per_gpu"]
    assert "learning_rate" in rows["optimizer.params.lr"]
    assert "precision.reduce_dtype=bfloat16" in rows["zero_optimization.zero_quantized_gradients"]
    assert "did you mean gradient_clipping?" in rows["gradient_cliping"]
    assert "secret" not in result.stdout
    written = Path("ds_config.yaml").read_text()
    assert "  batch_size: 24 # samples of an optimizer step" in written
    assert "trainer:\n  accumulate_grad_batches: 1\n" in written
    assert "  devices: 2\n  num_nodes: 3\n" in written


def test_json_has_all_of_it(file: Path) -> None:
    result = invoke(file, "--json", "--dry-run")
    assert result.exit_code == 0
    printed = json.loads(result.stdout)
    assert (printed["schema"], printed["file"], printed["out"]) == (1, "ds_config.json", None)
    assert printed["groups"] == {"strategy": "zero2", "precision": "bf16_true", "optimizer": "adamw"}
    assert printed["settings"]["optimizer.weight_decay"] == 0.1
    by_key = {row["key"]: row for row in printed["keys"]}
    assert by_key["gradient_cliping"] == {
        "key": "gradient_cliping",
        "value": 0.5,
        "status": "unknown",
        "here": "",
        "note": "did you mean gradient_clipping? DeepSpeed has no such key",
        "line": 1,
        "column": json.dumps(CONFIG).index("0.5") + 1,
    }
    assert not Path("ds_config.yaml").exists()


@pytest.mark.parametrize(
    ("accumulate", "flags", "expected"),
    [
        (2, "--nodes 2", (8, 4, 2, 64)),  # the file is for 8 ranks
        (2, "--devices 4 --nodes 2", (8, 4, 2, 64)),
        (None, "--nodes 2", (2, 1, 2, 64)),  # it is for any number: one on each machine
        (2, "--nodes 3", "train_batch_size is for 8 ranks, which 3 machines cannot share evenly: use another --nodes"),
        (2, "--devices 2 --nodes 2", "x 4 ranks = 32: use 8 ranks"),
    ],
)
def test_ranks_of_several_machines_are_those_of_the_file(
    accumulate: int | None, flags: str, expected: Any, file: Path
) -> None:
    batch = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulate}
    file.write_text(json.dumps({key: value for key, value in batch.items() if value is not None}))
    result = invoke(file, *flags.split(), "--json", "--dry-run")
    if isinstance(expected, str):
        assert result.exit_code == 1
        assert expected in result.stderr
        return
    printed = json.loads(result.stdout)
    settings = [printed["settings"][key] for key in ("trainer.devices", "trainer.num_nodes", "data.batch_size")]
    assert (printed["ranks"], *settings) == expected


def test_nothing_is_replaced_or_written_against_the_users_will(file: Path) -> None:
    out = Path("mine.yaml")
    out.write_text("mine")
    own = Path("own.yaml")
    own.write_text(file.read_text())
    for arguments, message in (
        ([file, out], "error: mine.yaml exists: give another OUT, or --overwrite."),
        ([file, "other.yaml", "--strict"], "and --strict is given"),
        (["missing.json"], "error: missing.json: No such file or directory"),
        ([""], "error: . is a folder; expected a file such as ds_config.json"),
        ([file, "nowhere/mine.yaml"], "nowhere is no folder: make it, or give another OUT"),
        ([file, file, "--overwrite"], "ds_config.json is not the name of a YAML file"),
        ([own, own, "--overwrite"], "own.yaml is the file that is read: give another OUT"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 1
        assert message in result.stderr
    assert (out.read_text(), own.read_text()) == ("mine", file.read_text())
    assert not Path("other.yaml").exists()
    assert invoke(file, out, "--overwrite", "--experiment").exit_code == 0
    assert "  - override /strategy: zero2\n" in out.read_text()


def test_an_error_has_line_and_column(file: Path) -> None:
    file.write_text('{\n  "bf16": {"enabled": true},\n}')
    result = invoke(file)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == ("error: ds_config.json:2:28: a comma before '}', which JSON does not allow: remove it.\n")
