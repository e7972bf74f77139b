"""Somebody else's Hydra application: our groups compose by their names alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import RankPool, server_environment
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_zero import ZeroPrecision, ZeroStrategy

CONFIG = """\
defaults:
  - strategy: zero2_offload
  - precision: fp16
  - _self_
precision:
  scaler:
    init_scale: 64
"""
APP = """\
import hydra
import lightning as L
from hydra.utils import instantiate
from lightning.pytorch.demos.boring_classes import BoringModel

@hydra.main(version_base="1.3", config_path=".", config_name="config")
def main(cfg):
    strategy, precision = instantiate(cfg.strategy), instantiate(cfg.precision)
    trainer = L.Trainer(accelerator="cpu", devices=2, max_steps=2, strategy=strategy, plugins=[precision], logger=False)
    trainer.fit(BoringModel())

main()
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def fit(folder: str) -> None:
    """Two steps with the application's strategy and precision."""
    with initialize_config_dir(folder, version_base="1.3"):
        cfg = compose("config")
    strategy, precision = instantiate(cfg.strategy), instantiate(cfg.precision)
    assert isinstance(strategy, ZeroStrategy)
    assert isinstance(precision, ZeroPrecision)
    assert (strategy.stage, strategy.options.offload_optimizer, precision.precision) == (2, "cpu", "16-mixed")
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        max_steps=2,
        limit_val_batches=0,
        strategy=strategy,
        plugins=[precision],
        enable_checkpointing=False,
        **quiet,
    )
    model = BoringModel()
    before = model.layer.weight.detach().clone()
    trainer.fit(model)
    assert (trainer.global_step, strategy.skipped_steps, precision.scaler.scale) == (2, 0, 64.0)
    assert not torch.equal(model.layer.weight, before)


def test_our_groups_compose_and_train_in_an_application_without_our_paths(pool2: RankPool, app: Path) -> None:
    pool2.run(fit, str(app))


def test_the_applications_own_options_come_first(app: Path) -> None:
    (app / "strategy").mkdir()
    (app / "strategy" / "zero2.yaml").write_text("mine: 1\n")
    with initialize_config_dir(str(app), version_base="1.3"):
        assert compose("config", ["strategy=zero2"]).strategy == {"mine": 1}
        assert compose("config", ["strategy=zero3"]).strategy.stage == 3


def test_applications_that_use_nothing_of_ours_import_neither_torch_nor_lightning(app: Path) -> None:
    (app / "config.yaml").write_text("x: 1\n")
    script = """
import sys
from hydra import compose, initialize_config_dir
with initialize_config_dir(sys.argv[1], version_base="1.3"):
    assert compose("config") == {"x": 1}
assert "hydra_plugins.lightning_zero" in sys.modules
heavy = {"torch", "numpy", "lightning", "lightning_zero.ops", "lightning_zero.integration.strategy"}
assert not sys.modules.keys() & heavy
"""
    subprocess.run([sys.executable, "-c", script, str(app)], check=True, timeout=240)


def test_importing_the_configuration_package_imports_the_standard_library_only() -> None:
    heavy = ["hydra", "lightning", "numpy", "omegaconf", "torch"]
    script = (
        f"import sys, lightning_zero.config, lightning_zero.config.schemas\nassert not sys.modules.keys() & {heavy}"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)


@pytest.mark.slow
@pytest.mark.launch
def test_the_application_runs_as_a_script(app: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "app.py", "strategy=zero3_offload", "hydra.run.dir=out"],
        cwd=app,
        env=server_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also the other rank, should this one have failed
    assert process.returncode == 0, output
    assert "`Trainer.fit` stopped: `max_steps=2` reached." in output
