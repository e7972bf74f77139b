"""Measured rates of machines, in a file of the user's cache, and the machine of a run with them.

`lightning-zero doctor --measure` writes them; plans of runs on the same machine read them. A file may hold the rates of
several machines, since they may share the user's folder.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_zero import limits
from lightning_zero.planning.devices import Gpu, Machine
from lightning_zero.planning.machine import cores
from lightning_zero.storage import device_type

_SCHEMA = 1
_ALWAYS = frozenset({"dram", "update", "matmul_32", "matmul_16"})  # rates that are measured on any machine


class CalibrationError(ValueError):
    """A file of measured rates cannot be read; the message names it."""


@dataclass(frozen=True)
class Rates:
    """Measured rates; None if there was nothing to measure.

    Attributes:
        dram: bytes per second of host memory, read and written together, by all threads (a triad of STREAM).
        update: bytes per second of host memory that the native Adam reads and writes together.
        matmul_32: operations per second of matrix products in fp32 on the device, as torch computes them by default.
        matmul_16: the same in bf16.
        device_memory: bytes per second of an accelerator's memory, read and written together.
        to_device: bytes per second of copies from pinned host memory to the device.
        to_host: bytes per second of copies from the device to pinned host memory.
        gather: bytes per second that each of two ranks sends in an all-gather.
        disk: bytes per second of a disk, read and written together.
    """

    dram: float
    update: float
    matmul_32: float
    matmul_16: float
    device_memory: float | None = None
    to_device: float | None = None
    to_host: float | None = None
    gather: float | None = None
    disk: float | None = None


@dataclass(frozen=True)
class Identity:
    """Identifies a machine by everything on which its rates depend.

    Attributes:
        host: its host name.
        cpu: the model of its processors.
        cores: number of cores on which this process may run.
        device: the model of its accelerators, or "cpu".
    """

    host: str
    cpu: str
    cores: int
    device: str


@dataclass(frozen=True)
class Calibration:
    """Rates that were measured on a machine.

    Attributes:
        machine: the machine.
        date: the date in UTC, in the format of ISO 8601.
        versions: the versions of the package and of torch.
        rates: the rates.
    """

    machine: Identity
    date: str
    versions: Mapping[str, str]
    rates: Rates

    @property
    def source(self) -> str:
        """Says where a rate comes from."""
        return f"measured on {self.machine.host}, {self.date[:10]}"


def identify(device: torch.device) -> Identity:
    """The identity of this process's machine with the computing device."""
    return Identity(
        platform.node(), limits.processor() or platform.machine(), cores(), device_type(device).name(device)
    )


def cache_file() -> Path:
    """The path of the user's measured rates, in `XDG_CACHE_HOME` or `~/.cache`; the file may not exist.

    Raises:
        CalibrationError: the user's home folder is unknown.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(cache).expanduser() / "lightning_zero" / "calibration.json"
    except RuntimeError as error:
        raise CalibrationError(f"the folder of {cache} is unknown ({error}); set XDG_CACHE_HOME") from error


def write(calibration: Calibration, path: Path | None = None) -> Path:
    """Adds a machine's rates to the file, in place of older ones of the same machine; returns the path.

    Raises:
        OSError: the file cannot be written.
        CalibrationError: the user's home folder is unknown.
    """
    path = path or cache_file()
    try:
        kept = [other for other in _read_all(path) if other.machine != calibration.machine]
    except CalibrationError:
        kept = []  # an unreadable file is of no use
    machines = [asdict(one) for one in (*kept, calibration)]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"schema": _SCHEMA, "machines": machines}, indent=2) + "\n")
    temporary.replace(path)
    return path


def read(device: torch.device, path: Path | None = None) -> Calibration | None:
    """Finds the rates of this machine; None if they have not been measured.

    Raises:
        CalibrationError: the file is not what :func:`write` writes.
    """
    mine = identify(device)
    return next((found for found in _read_all(path or cache_file()) if found.machine == mine), None)


def _read_all(path: Path) -> list[Calibration]:
    try:
        if not path.is_file():
            return []
        found = json.loads(path.read_text())
        if found["schema"] != _SCHEMA:
            raise ValueError(f"its schema is {found['schema']}")
        return [_calibration(entry) for entry in found["machines"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CalibrationError(
            f"{path} cannot be read ({type(error).__name__}: {error}); `lightning-zero doctor --measure` writes it anew"
        ) from error


def _calibration(entry: Mapping[str, Any]) -> Calibration:
    rates = Rates(**entry["rates"])
    for name, rate in asdict(rates).items():
        if (rate is None and name in _ALWAYS) or (rate is not None and not 0 < rate < math.inf):
            raise ValueError(f"{name}={rate!r} is no rate")
    return Calibration(Identity(**entry["machine"]), str(entry["date"]), dict(entry["versions"]), rates)


def calibrated(machine: Machine, calibration: Calibration) -> Machine:
    """Returns a machine with measured rates instead of the assumed ones."""
    rates = calibration.rates
    changes: dict[str, Any] = {"dram": rates.update}
    if rates.disk is not None:
        changes["disk"] = rates.disk
    return dataclasses.replace(machine, gpu=_device(machine, calibration), **changes)


def _device(machine: Machine, calibration: Calibration) -> Gpu:
    rates, gpu = calibration.rates, machine.gpu
    shares = machine.gpus if calibration.machine.device == "cpu" else 1  # ranks of a machine share its processors
    found: dict[str, float | None] = {
        "matmul_16": rates.matmul_16 / shares,
        "matmul_32": rates.matmul_32 / shares,
        "bandwidth": rates.dram / shares if shares > 1 or rates.device_memory is None else rates.device_memory,
        "link": rates.gather,
        "pcie": None if rates.to_device is None or rates.to_host is None else min(rates.to_device, rates.to_host),
    }
    known = {name: rate for name, rate in found.items() if rate is not None}
    return dataclasses.replace(gpu, source=calibration.source, **known)  # type: ignore[arg-type]
