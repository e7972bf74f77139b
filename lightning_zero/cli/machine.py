"""Cores, memory and limits of the machine, as this process sees them.

They are read from `/proc` and `/sys`; a fact that a system does not have is None. Every function takes the `root` that
these lie in.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from lightning_zero.cgroups import Unlimited, cpu_quota, memory_limit, read_text
from lightning_zero.limits import locked_memory, machine_memory, physical_memory, processor, shared_memory

_SYS_PTRACE = 19  # the number of the capability, see capabilities(7)


@dataclass(frozen=True, slots=True)
class MachineReport:
    """Facts about the machine, seen from this process.

    Attributes:
        system: name and release of the operating system.
        architecture: of the CPU, as `uname -m` has it.
        cpu: the CPU's model name.
        cores: logical cores of the machine.
        cores_by_affinity: those that this process may run on.
        cpu_quota: cores' worth of time that its control groups allow.
        memory_bytes: physical memory.
        memory_available_bytes: what the kernel believes can be had without swapping.
        memory_limit_bytes: of its control groups.
        memlock_bytes: soft limit of locked memory (RLIMIT_MEMLOCK).
        shared_memory_bytes: size of `/dev/shm`.
        numa_nodes: number of memory nodes.
        huge_pages: mode of transparent huge pages: "always", "madvise" or "never".
        cross_memory: whether ranks can read each other's memory: "yes", "no" and why not, or "unknown".
    """

    system: str
    architecture: str
    cpu: str | None
    cores: int | None
    cores_by_affinity: int | None
    cpu_quota: float | Unlimited | None
    memory_bytes: int | None
    memory_available_bytes: int | None
    memory_limit_bytes: int | Unlimited | None
    memlock_bytes: int | Unlimited | None
    shared_memory_bytes: int | None
    numa_nodes: int | None
    huge_pages: str | None
    cross_memory: str


def read_machine(root: Path = Path("/"), ops: ModuleType | None = None) -> MachineReport:
    """Collects the facts; files are looked for under `root`. `ops`: `lightning_zero.ops`, if it can be imported."""
    memory = machine_memory(root)
    return MachineReport(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        cpu=processor(root),
        cores=os.cpu_count(),
        cores_by_affinity=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        cpu_quota=cpu_quota(root),
        memory_bytes=memory.get("MemTotal", physical_memory()),
        memory_available_bytes=memory.get("MemAvailable"),
        memory_limit_bytes=memory_limit(root),
        memlock_bytes=locked_memory(),
        shared_memory_bytes=shared_memory(root),
        numa_nodes=_numa_nodes(root),
        huge_pages=_huge_pages(root),
        cross_memory=_cross_memory(root, ops),
    )


def _numa_nodes(root: Path) -> int | None:
    nodes = root / "sys/devices/system/node"
    return sum(bool(re.fullmatch(r"node\d+", path.name)) for path in nodes.iterdir()) if nodes.is_dir() else None


def _huge_pages(root: Path) -> str | None:
    mode = re.search(r"\[(\w+)\]", read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    return mode[1] if mode else None


def _cross_memory(root: Path, ops: ModuleType | None) -> str:
    if ops is None:
        return "unknown"
    try:
        refusal = ops.cma_refusal()
    except ValueError as error:
        refusal = str(error)
    mode = (read_text(root / "proc/sys/kernel/yama/ptrace_scope") or "").strip()
    if not refusal and mode == "2" and not _may_trace(root):
        refusal = f"kernel.yama.ptrace_scope={mode}, so only processes with CAP_SYS_PTRACE may, such as those of root"
    elif not refusal and mode not in ("", "0", "1", "2"):
        refusal = f"kernel.yama.ptrace_scope={mode}, so no process may"
    return f"no: {refusal}" if refusal else "yes"


def _may_trace(root: Path) -> bool:
    """Whether this process has the capability to trace others."""
    held = re.search(r"^CapEff:\s*([0-9a-f]+)$", read_text(root / "proc/self/status") or "", re.MULTILINE)
    return held is not None and bool(int(held[1], 16) >> _SYS_PTRACE & 1)
