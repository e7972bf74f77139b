"""Measured rates are kept by machine, and stand in for assumed ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_zero.planning import calibration
from lightning_zero.planning.calibration import Calibration, CalibrationError, Rates, calibrated, identify, read, write
from lightning_zero.planning.devices import DRAM, GPUS, NETWORK, Machine
from lightning_zero.planning.machine import processors

CPU = torch.device("cpu")
GIB = 2**30
VERSIONS = {"torch": "2.13.0"}


def found(rates: Rates, device: str = "cpu") -> Calibration:
    return Calibration(replace(identify(CPU), device=device), "2026-11-24T13:00:00+00:00", VERSIONS, rates)


def test_rates_are_kept_by_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read(CPU) is None
    mine, others = found(Rates(10e9, 8e9, 1e12, 2e12, gather=1e9)), found(Rates(1.0, 1.0, 1.0, 1.0), "H100")
    assert write(others) == write(mine) == tmp_path / "lightning_zero" / "calibration.json"
    assert read(CPU) == mine
    newer = replace(mine, date="2026-12-01T00:00:00+00:00")
    write(newer)
    assert read(CPU) == newer
    assert "measured on" in newer.source
    assert "2026-12-01" in newer.source
    assert [path.name for path in (tmp_path / "lightning_zero").iterdir()] == ["calibration.json"]
    monkeypatch.setattr(calibration, "identify", lambda _: others.machine)
    assert read(CPU) == others


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2, "machines": []}', '{"schema": 1, "machines": [{}]}'])
def test_a_file_that_is_none_is_an_error_until_it_is_written_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=r"calibration\.json cannot be read .*doctor --measure"):
        read(CPU, path)
    mine = found(Rates(10e9, 8e9, 1e12, 2e12))
    write(mine, path)
    assert read(CPU, path) == mine


def test_measured_rates_stand_in_for_assumed_ones() -> None:
    gpu = Machine(GPUS["h100"], 8, 1, 512 * GIB, DRAM, NETWORK)
    rates = Rates(200e9, 150e9, 50e12, 700e12, 3e12, to_device=50e9, to_host=40e9, gather=300e9, disk=6e9)
    made = calibrated(gpu, found(rates, "NVIDIA H100"))
    assert (made.dram, made.disk, made.network) == (150e9, 6e9, NETWORK)
    device = made.gpu
    assert (device.matmul_16, device.bandwidth, device.link, device.pcie) == (700e12, 3e12, 300e9, 40e9)
    assert (device.memory, device.name) == (GPUS["h100"].memory, "h100")
    # One GPU has no link to measure; ranks on processors share them.
    assert calibrated(gpu, found(replace(rates, gather=None), "NVIDIA H100")).gpu.link == GPUS["h100"].link
    cpus = Machine(processors(8, 4, 64 * GIB, DRAM), 4, 1, 64 * GIB, DRAM, NETWORK)
    made = calibrated(cpus, found(Rates(200e9, 150e9, 4e12, 8e12, gather=2e9)))
    assert (made.gpu.matmul_32, made.gpu.bandwidth, made.gpu.link) == (1e12, 50e9, 2e9)
