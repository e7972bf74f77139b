"""`RunReport`: what it counts as training, and its folder. Its files are tested with the examples."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_zero.callbacks import RunReport


def test_a_second_fit_has_a_speed_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after one that ended in an error."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    report, trainer = RunReport(tmp_path, "zero2", step_size=10, unit="images"), SimpleNamespace(global_step=0)
    some: Any = trainer
    report.on_train_start(some, some)
    now = 5.0
    report.on_exception(some, some, RuntimeError())
    now = 100.0
    report.on_train_start(some, some)
    now, report._step = 102.0, 4
    report._measure_speed()
    assert report._speed == 4 * 10 / 2
    assert report.clock.seconds == 7.0


def test_its_folder_is_made_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the program changes its folder afterwards."""
    monkeypatch.chdir(tmp_path)
    report = RunReport("outputs/run", "zero2", step_size=10, unit="images")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(report, "plot", lambda _: None)  # it needs matplotlib
    strategy = SimpleNamespace(precision_plugin=None)
    trainer: Any = SimpleNamespace(is_global_zero=True, global_step=0, world_size=1, strategy=strategy)
    report.setup(trainer, trainer, "fit")
    report.write(trainer)
    assert (tmp_path / "outputs/run/summary.json").exists()


def test_a_url_is_no_folder() -> None:
    """Its files would come into a local folder of that name."""
    with pytest.raises(ValueError, match=r"run_dir='s3://bucket/run' is a URL; expected .* local folder\. Write"):
        RunReport("s3://bucket/run", "zero2", step_size=10, unit="images")
