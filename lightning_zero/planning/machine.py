"""The machine of a run, as plans see it: its devices' rates by their names, and those of processors by their number.

Nothing is measured here; see `calibration.py`.
"""

from __future__ import annotations

import dataclasses
import os
import re

import torch

from lightning_zero import limits
from lightning_zero.planning.devices import DRAM, GPUS, NETWORK, Gpu, Machine
from lightning_zero.storage import device_type

# Where nobody measured: a core with two units for 8 fused multiplications and additions in fp32 at 3 GHz, and what a
# connection between two processes of a machine carries.
CORE = 96e9
LOOPBACK = 2e9


def this_machine(device: torch.device, ranks: int, nodes: int) -> Machine:
    """Describes the machines of a run by the one that this process is on.

    Args:
        device: of this process; all ranks have such a one.
        ranks: on each machine.
        nodes: machines.
    """
    kind = device_type(device)
    host = limits.machine_memory().get("MemTotal", limits.physical_memory() or 0)
    if kind.shares_host_memory:
        gpu = processors(cores(), ranks, host, DRAM)
    else:
        gpu = known_gpu(kind.name(device), kind.total_bytes(device) or 0)
    return Machine(gpu, ranks, nodes, host, DRAM, NETWORK)


def known_gpu(name: str, memory: int) -> Gpu:
    """Finds a GPU of the table by the name that its driver gives, or the one that is most like it.

    Args:
        name: such as "NVIDIA A100-SXM4-40GB".
        memory: bytes; a name that is none in the table has the rates of the first that has as much, or of the last.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    same = [gpu for gpu in GPUS.values() if gpu.name.split("-")[0] in words]
    if same:
        found = min(same, key=lambda gpu: abs(gpu.memory - memory))
        return dataclasses.replace(found, memory=memory or found.memory)
    larger = [gpu for gpu in GPUS.values() if gpu.memory >= memory] or list(GPUS.values())[-1:]
    return dataclasses.replace(larger[0], name=name, memory=memory, source=f"rates of {larger[0].name}")


def processors(count: int, ranks: int, memory: int, dram: float) -> Gpu:
    """The share that one of the ranks of a machine without accelerators has of it, as a device.

    Args:
        count: of the machine's cores.
        ranks: that share them and the memory.
        memory: bytes.
        dram: bytes per second of the memory.
    """
    rate = CORE * count / ranks
    return Gpu(
        "cpu", memory // ranks, rate, rate, dram / ranks, LOOPBACK, dram / ranks, f"{count} cores, not measured", True
    )


def cores() -> int:
    """Counts the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
