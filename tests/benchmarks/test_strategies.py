"""The benchmarks that train the examples: short runs, whose scripts run in the ranks of a pool."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.benchmark import load
from helpers.images import write_files
from helpers.pages import ROOT
from helpers.ranks import RankPool
from helpers.scripts import SHORT, run_script, short_run

STEPS = SHORT["trainer.max_steps"]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, pool2: RankPool, tmp_path: Path) -> Callable[..., Any]:
    """Runs a benchmark with a command line; the scripts that it starts run short, and start nothing."""

    def in_pool(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        run = short_run(ROOT / command[1], command[2:])
        (folder,) = (word for word in command if word.startswith("hydra.run.dir="))
        pool2.run(run_script, run.script, [*run.arguments, folder], tmp_path)
        return subprocess.CompletedProcess(command, 0)

    def run(name: str, *options: str) -> Any:
        module = load(name)
        monkeypatch.setattr(load("examples"), "subprocess", SimpleNamespace(run=in_pool))
        monkeypatch.setattr(module, "STEPS", STEPS)
        monkeypatch.setattr(sys, "argv", [name, *options, "--out", str(tmp_path / "out.json")])
        module.main()
        return json.loads((tmp_path / "out.json").read_text())

    return run


@pytest.mark.slow
def test_gpt2(benchmark: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 10)
    options = "--strategies", "zero2", "ddp", "--precisions", "fp32"
    runs = benchmark("gpt2_strategies", "--data", f"{tmp_path}/text", *options)
    assert list(runs) == ["zero2 fp32", "ddp fp32"]
    assert runs["zero2 fp32"]["val_loss"] == pytest.approx(runs["ddp fp32"]["val_loss"], rel=1e-5)
    assert {run["steps"] for run in runs.values()} == {STEPS}
    assert f"| `zero2` | {runs['zero2 fp32']['val_loss']:.5f} |" in capsys.readouterr().out


@pytest.mark.slow
def test_muon(benchmark: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 10)
    result = benchmark("muon", "--data", f"{tmp_path}/text", "--adamw", "1e-3", "--muon", "2e-3", "4e-3")
    assert {name: list(rates) for name, rates in result["val_loss"].items()} == {
        "adamw": ["0.001"],
        "muon": ["0.002", "0.004"],
    }
    losses = [found["1"] for rates in result["val_loss"].values() for found in rates.values()]
    assert len({*losses}) == 3  # each has trained otherwise
    assert result["best"]["muon"]["val_loss"] == min(losses[1:])


@pytest.mark.slow
def test_cifar10(benchmark: Callable[..., Any], tmp_path: Path) -> None:
    write_files(tmp_path / "images", 4)
    options = "--strategies", "zero2", "--precisions", "fp32", "--whole", "zero2", "--epochs", "1"
    results = benchmark("cifar10_strategies", "--data", f"{tmp_path}/images", *options)
    assert list(results) == ["zero2 fp32", "zero2 1 epochs"]
    assert results["zero2 fp32"]["passed"]
    assert results["zero2 1 epochs"]["steps"] == STEPS
