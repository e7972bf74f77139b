"""The machine of a run for plans: rates of its devices by their names, and rates of processors by their number.

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

# Assumed without measurement: a core with two units for 8 fused multiply-adds in fp32 at 3 GHz, and the rate of a
# connection between two processes of a machine.
CORE = 96e9
LOOPBACK = 2e9


def this_machine(device: torch.device, ranks: int, nodes: int) -> Machine:
    """Describes the machines of a run by the machine of this process.

    Args:
        device: device of this process; all ranks have a device of this type.
        ranks: number of ranks on each machine.
        nodes: number of machines.
    """
    kind = device_type(device)
    host = limits.machine_memory().get("MemTotal", limits.physical_memory() or 0)
    if kind.shares_host_memory:
        gpu = processors(cores(), ranks, host, DRAM)
    else:
        gpu = known_gpu(kind.name(device), kind.total_bytes(device) or 0)
    return Machine(gpu, ranks, nodes, host, DRAM, NETWORK)


def known_gpu(name: str, memory: int) -> Gpu:
    """Finds a GPU in the table by the name that its driver gives, or the most similar one.

    Args:
        name: such as "NVIDIA A100-SXM4-40GB".
        memory: bytes; a name that is not in the table gets the rates of the first GPU with as much memory, or the last.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    same = [gpu for gpu in GPUS.values() if gpu.name.split("-")[0] in words]
    if same:
        found = min(same, key=lambda gpu: abs(gpu.memory - memory))
        return dataclasses.replace(found, memory=memory or found.memory)
    larger = [gpu for gpu in GPUS.values() if gpu.memory >= memory] or list(GPUS.values())[-1:]
    return dataclasses.replace(larger[0], name=name, memory=memory, source=f"rates of {larger[0].name}")


def processors(count: int, ranks: int, memory: int, dram: float) -> Gpu:
    """Describes one rank's share of a machine without accelerators as a device.

    Args:
        count: number of the machine's cores.
        ranks: number of ranks that share cores and memory.
        memory: bytes of the memory.
        dram: bytes per second of the memory.
    """
    rate = CORE * count / ranks
    return Gpu(
        "cpu", memory // ranks, rate, rate, dram / ranks, LOOPBACK, dram / ranks, f"{count} cores, not measured", True
    )


def cores() -> int:
    """Counts the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
