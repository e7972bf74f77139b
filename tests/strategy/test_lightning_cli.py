"""LightningCLI: strategies by name, by class with options, and by the configuration that it prints."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
from helpers.ranks import RankPool
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_zero import ZeroPrecision, ZeroStrategy

QUIET = (
    "accelerator=cpu devices=1 max_steps=2 logger=false enable_checkpointing=false enable_progress_bar=false "
    "enable_model_summary=false limit_val_batches=0"
).split()


def run_cli(*arguments: str) -> ZeroStrategy:
    """Run a command line; the strategy that has trained."""
    cli = LightningCLI(BoringModel, save_config_callback=None, args=[*arguments])
    strategy = cli.trainer.strategy
    assert isinstance(strategy, ZeroStrategy)
    assert cli.trainer.global_step == 2
    return strategy


def train_by_command_lines(folder: Path) -> None:
    quiet = [f"--trainer.{flag}" for flag in QUIET]
    by_name = run_cli("fit", "--trainer.strategy=zero2_offload", *quiet)
    assert (by_name.stage, by_name.offload_optimizer) == (2, "cpu")

    auto = ["--trainer.strategy=lightning_zero.ZeroAutoStrategy", "--trainer.strategy.init_args.preflight=warn"]
    assert run_cli("fit", *auto, "--trainer.strategy.init_args.bucket_size_mb=3", *quiet).preflight == "warn"

    by_class = ["fit", "--trainer.strategy=lightning_zero.ZeroStrategy", "--trainer.strategy.init_args.stage=3", *quiet]
    by_class += ["--trainer.plugins+=lightning_zero.ZeroPrecision", "--trainer.plugins.init_args.precision=bf16-mixed"]
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        run_cli(*by_class, "--print_config")
    config = folder / "config.yaml"
    config.write_text(printed.getvalue())
    for arguments in (by_class, ["fit", f"--config={config}"]):
        strategy = run_cli(*arguments)
        assert (strategy.stage, strategy.offload_optimizer) == (3, "none")
        assert isinstance(strategy.precision_plugin, ZeroPrecision)
        assert strategy.precision_plugin.precision == "bf16-mixed"


def test_a_command_line_and_what_it_prints_train(pool1: RankPool, tmp_path: Path) -> None:
    pool1.run(train_by_command_lines, tmp_path)
