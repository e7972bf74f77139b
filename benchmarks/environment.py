"""Describes, for result files, where a measurement was made, and finds a free port for ranks."""

from __future__ import annotations

import datetime as dt
import platform
import shlex
import socket
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
"""Flags of `/proc/cpuinfo` on which the rate of matrix products depends."""


def describe() -> dict[str, Any]:
    """The date, command, hardware and versions of this process."""
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in _lines("/proc/cpuinfo"))}
    flags = facts.get("flags", facts.get("Features", "")).split()
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "date": dt.date.today().isoformat(),
        "command": shlex.join(["python", "-m", _module_name(), *sys.argv[1:]]),
        "cpu": facts.get("model name") or platform.processor(),
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "cores": torch.get_num_threads(),
        "memory_gib": round(memory / 2**20, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "lightning", "lightning-zero")},
    }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _module_name() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None else Path(sys.argv[0]).stem
