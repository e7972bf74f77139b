"""`lightning-zero doctor --measure`: what it measures, keeps and says, and who uses it."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.ranks import RankPool
from strategy.fits import Lit, Recipe, make_trainer
from typer.testing import CliRunner

from lightning_zero import ZeroAutoStrategy
from lightning_zero.cli import app, rates
from lightning_zero.cli.rates import MeasureError, best, measure_all, measure_gather
from lightning_zero.planning.calibration import Calibration, CalibrationError, Rates, identify, read, write

CPU = torch.device("cpu")
SMALL = 1 << 16


def measured(failure: str = "") -> rates.Measured:
    """A measurement that takes no time, of a machine without accelerators."""
    gather = mock.Mock(return_value=1e9) if not failure else mock.Mock(side_effect=MeasureError(failure))
    with mock.patch.object(rates, "measure_gather", gather), mock.patch.object(torch.accelerator, "is_available", bool):
        return measure_all(None, seconds=0.001, nbytes=SMALL)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lightning_zero" / "calibration.json"


def test_a_measurement_is_of_this_machine_and_is_kept(cache: Path) -> None:
    found = measured()
    assert (found.path, found.failure) == (str(cache), "")
    assert read(CPU) == found.calibration
    made = found.calibration
    assert made.machine == identify(CPU)
    assert made.versions["torch"] == torch.__version__
    assert min(made.rates.dram, made.rates.update, made.rates.matmul_32, made.rates.matmul_16) > 0
    assert (made.rates.gather, made.rates.to_device, made.rates.disk) == (1e9, None, None)


def test_the_report_has_the_rates(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_zero.cli.doctor._run_checks", lambda *_: [])
    for failure, slower, said in (
        ("", 2.0, []),
        ("", 50.0, ["matrix products in bf16 take 50 times as long as in fp32 on cpu, with this torch"]),
        ("two ranks ended with code 1: no", 0.5, ["two ranks ended with code 1: no"]),
    ):
        found = measured(failure)
        speeds = dataclasses.replace(found.calibration.rates, matmul_32=1e12, matmul_16=1e12 / slower)
        found = dataclasses.replace(found, calibration=dataclasses.replace(found.calibration, rates=speeds))
        monkeypatch.setattr("lightning_zero.cli.doctor.measure_all", lambda disk, found=found: found)
        result = CliRunner().invoke(app, ["doctor", "--measure", "--json"], catch_exceptions=False)
        report = json.loads(result.stdout)
        assert report["rates"]["path"] == str(cache)
        assert report["rates"]["calibration"]["rates"]["update"] == found.calibration.rates.update
        assert [f["message"] for f in report["findings"] if f["section"] == "rates"] == said
    monkeypatch.setenv("COLUMNS", "200")
    text = CliRunner().invoke(app, ["doctor", "--measure"], catch_exceptions=False).stdout
    assert "matmul 16" in text
    assert failure in text


def test_rates_that_cannot_be_kept_are_a_problem(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_zero.cli.doctor._run_checks", lambda *_: [])
    monkeypatch.setattr("lightning_zero.cli.doctor.measure_all", mock.Mock(side_effect=OSError("read-only")))
    result = CliRunner().invoke(app, ["doctor", "--measure", "--json"], catch_exceptions=False)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["rates"] is None


def estimated(arguments: str) -> dict[str, Any]:
    size = "--params 2e6 --layers 2 --hidden 128 --vocab 8192 --seq 64 --precision 32-true"
    result = CliRunner().invoke(app, ["estimate", *shlex.split(f"{size} {arguments} --json")], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def keep(**changes: float) -> Calibration:
    given: dict[str, float] = {"dram": 10e9, "update": 8e9, "matmul_32": 1e12, "matmul_16": 2e12, "gather": 1e9}
    made = Calibration(identify(CPU), "2026-11-24T13:00:00+00:00", {}, Rates(**(given | changes)))
    write(made)
    return made


def test_an_estimate_for_this_machine_uses_them_and_says_so(cache: Path) -> None:
    assumed = estimated("--gpu this --gpus 2")["machine"]
    assert "not measured" in assumed["gpu"]["source"]
    keep()
    report = estimated("--gpu this --gpus 2")
    machine = report["machine"]
    assert (machine["dram"], machine["gpu"]["matmul_32"], machine["gpu"]["link"]) == (8e9, 0.5e12, 1e9)
    assert "measured on" in machine["gpu"]["source"]
    assert estimated("--gpu this --host 1GB")["machine"]["host"] == 10**9
    # On processors the parts of all ranks share one memory.
    for each in report["choices"]:
        total = 2 * (each["device_peak_bytes"] + each["host_peak_bytes"])
        assert each["fits"] or total > 0.95 * machine["host"]
    cache.write_text("{")
    result = CliRunner().invoke(app, ["estimate", "--gpu", "this", "--params", "2e6", "--layers", "2", "--hidden", "8"])
    assert result.exit_code == 1
    assert "doctor --measure" in result.stderr


def test_files_of_rates_that_cannot_be_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep()
    good = cache.read_text()
    assert read(CPU) is not None
    for old, new in (("8000000000.0", "null"), ("8000000000.0", "1e999"), ("8000000000.0", '"fast"'), (good, "[1]")):
        cache.write_text(good.replace(old, new))
        with pytest.raises(CalibrationError, match=r"calibration\.json cannot be read \(.*doctor --measure` writes it"):
            read(CPU)
    cache.write_bytes(b"\xff\xfe")
    with pytest.raises(CalibrationError, match="UnicodeDecodeError"):
        read(CPU)
    with (
        mock.patch.object(Path, "is_file", side_effect=PermissionError(13, "Permission denied")),
        pytest.raises(CalibrationError, match="Permission denied"),
    ):
        read(CPU)
    # Of a user without a home, as in some containers.
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", mock.Mock(side_effect=RuntimeError("Could not determine home directory.")))
    with pytest.raises(CalibrationError, match="set XDG_CACHE_HOME"):
        read(CPU)


def chosen(folder: str, broken: bool) -> tuple[str, float]:
    """The source of the rates of a choice, and the bound of its step."""
    with mock.patch.dict("os.environ", XDG_CACHE_HOME=folder):
        path = Path(folder) / "lightning_zero" / "calibration.json"
        if broken:
            path.write_text("{")
        strategy = ZeroAutoStrategy()
        make_trainer(strategy).fit(Lit(Recipe(steps=1)))
        assert strategy.chosen is not None
        return strategy.chosen.machine.gpu.source, strategy.chosen.machine.dram


@pytest.mark.filterwarnings("ignore:zero_auto uses no measured rates")
def test_a_choice_uses_them(cache: Path, pool1: RankPool) -> None:
    keep(update=5e9)
    for broken, says in ((False, "measured on"), (True, "not measured")):
        ((source, dram),) = pool1.run(chosen, str(cache.parents[1]), broken)
        assert says in source
        assert (dram == 5e9) == (not broken)


def test_ranks_that_fail_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.CompletedProcess([], 3, "", "much\nno gloo here\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(MeasureError, match="code 3: no gloo here"):
        measure_gather("cpu", 0.1, SMALL)
    monkeypatch.setattr(subprocess, "run", mock.Mock(side_effect=subprocess.TimeoutExpired("torchrun", 300.0)))
    with pytest.raises(MeasureError, match="more than 300 s"):
        measure_gather("cpu", 0.1, SMALL)


def test_the_best_of_several_repetitions_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 4.0, 5.0, 7.0, 8.0, 13.0, 14.0])  # the end of the time, then starts and ends
    monkeypatch.setattr(rates.time, "perf_counter", lambda: next(times))
    acts = mock.Mock()
    assert best(acts, 0.0) == 2.0
    assert acts.call_count == 4  # the first is not timed


@pytest.mark.slow
def test_two_ranks_are_really_started() -> None:
    assert measure_gather("cpu", 0.01, SMALL) > 0
