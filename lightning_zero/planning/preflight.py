"""Compares a plan with the memory of the ranks' devices and machines, and with the limits of processes.

A :class:`Pool` is memory that one or several processes use: a device, a machine's memory, the limit of a control group
(a container's), the address space of a process. Each rank states how much it wants of which pool (:class:`Claim`), and
the claims of all ranks on the same pool are added. The sums are compared with the total memory of a pool, not with the
memory that is free at the moment, since other processes may free theirs.
"""

from __future__ import annotations

import mmap
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_zero import cgroups, limits
from lightning_zero.engine import Engine
from lightning_zero.planning.account import Bytes, Peak
from lightning_zero.planning.memory import held_by
from lightning_zero.sharding import values_held
from lightning_zero.storage import device_type
from lightning_zero.torch_private import bytes_of_storages

Side = Literal["device", "host", "locked"]
_GIB = 2**30
# More bytes per element than any plan takes: fp64 parameters, gradients, masters, their sums and eight states are 96.
_CEILING, _MORE = 128, 2**28
# Address space of a few threads: stacks of 8 MiB, and arenas of 64 MiB of the C library, which stay mapped when freed.
_RESERVED = 2**27
_TRIAL = 2**30  # bytes that are pinned for a trial at most


@dataclass(frozen=True)
class Pool:
    """A limited amount of memory.

    Attributes:
        key: equal for exactly those processes that share the pool.
        name: a name for messages, such as "the memory of the machine".
        side: the part of a plan that uses the pool.
        total: bytes of the pool.
        beside: bytes that threads and libraries may take in addition to any plan.
    """

    key: str
    name: str
    side: Side
    total: int
    beside: int = 0


@dataclass(frozen=True)
class Claim:
    """The bytes that one rank wants of a pool.

    Attributes:
        rank: number of the rank.
        pool: the pool.
        used: bytes that the rank uses already and that a plan does not include.
        wanted: bytes of the plan at its peak.
    """

    rank: int
    pool: Pool
    used: int
    wanted: int


@dataclass(frozen=True)
class Shortage:
    """A pool that is too small for the claims of its ranks, in bytes."""

    pool: Pool
    ranks: tuple[int, ...]
    used: int
    wanted: int

    def __str__(self) -> str:
        several = len(self.ranks) > 1
        who = f"ranks {self.ranks[0]} to {self.ranks[-1]} take" if several else f"rank {self.ranks[0]} takes"
        used = f" beside {in_units(self.used)} that {'are' if several else 'is'} in use" if self.used else ""
        return f"{self.pool.name} has {in_units(self.pool.total)}: {who} {in_units(self.wanted)}{used}"


def claims(
    module: nn.Module, engine: Engine | None, device: torch.device, rank: int, root: Path = Path("/")
) -> list[Claim]:
    """Reads all pools of a process, and the memory that it uses before a fit; nothing is wanted yet.

    Memory that the module and an engine hold does not count as used, since a plan includes it.

    Args:
        module: the module to train.
        engine: the engine of an earlier fit.
        device: the training device.
        rank: number of this process's rank.
        root: see :mod:`lightning_zero.limits`.
    """
    kind = device_type(device)
    if engine is None:
        held = Bytes(host=_module_bytes(module, torch.device("cpu")))
        held += Bytes() if kind.shares_host_memory else Bytes(device=_module_bytes(module, device))
    else:
        # A fit makes its averages anew; those that are still there at its start belong to somebody else.
        held = sum((part for name, part in held_by(engine).items() if name != "averages"), Bytes())
    mine = held.total if kind.shares_host_memory else held.host
    sizes = limits.process_memory(root)
    resident = max(0, sizes.get("RssAnon", 0) + sizes.get("RssShmem", 0) - mine)
    divided = limits.divided_memory(root)
    if "Pss_Anon" in divided:  # forked ranks share what the process has that started them, the module as well
        resident = min(resident, divided["Pss_Anon"] + divided.get("Pss_Shmem", 0))
    boot, own = limits.boot(root) or socket.gethostname(), f"of rank {rank}"
    memory = limits.machine_memory(root)
    swap = memory.get("SwapTotal", 0)  # it is slow, but no process is killed
    if isinstance(allowed := cgroups.swap_limit(root), int):
        swap = min(swap, allowed)
    found: list[tuple[Pool, int]] = []
    total = memory.get("MemTotal", limits.physical_memory())
    if total is not None:
        found.append((Pool(f"machine {boot}", "the machine's memory", "host", total + swap), resident))
    if (group := cgroups.memory_group(root)) is not None:
        name, limit = group
        found.append((Pool(f"{name} {boot}", "the control group (container)", "host", limit + swap), resident))
    for key, name, most, taken in (
        ("address space", "the address space of a process (ulimit -v)", limits.address_space(), "VmSize"),
        ("data", "the data of a process (ulimit -d)", limits.data_size(), "VmData"),
    ):
        if isinstance(most, int) and taken in sizes:
            found.append((Pool(f"{key} {own}", name, "host", most, _RESERVED + mine), max(0, sizes[taken] - mine)))
    if (size := kind.total_bytes(device)) is not None:
        pool = Pool(f"device {own}", f"the device {device}", "device", size)
        used = kind.used_bytes(device) - held.device
        found.append((pool, max(0, used)))
    if kind.can_pin and isinstance(locked := limits.locked_memory(), int):
        found.append((Pool(f"locked memory {own}", "memory that may be locked (ulimit -l)", "locked", locked), 0))
    return [Claim(rank, pool, used, 0) for pool, used in found]


def _module_bytes(module: nn.Module, device: torch.device) -> int:
    """Counts the bytes of a device's memory that the module's own tensors take."""
    tensors = (values_held(tensor) for tensor in (*module.parameters(), *module.buffers()) if not is_lazy(tensor))
    return bytes_of_storages(t for t in tensors if t.device.type == device.type and t.layout is torch.strided)


def ceiling(module: nn.Module) -> Peak:
    """Returns an amount that exceeds any plan of a module, without planning."""
    numel = sum(p.numel() for p in module.parameters() if not is_lazy(p))  # the engine refuses lazy ones
    most = _CEILING * numel + sum(b.numel() * b.element_size() for b in module.buffers() if not is_lazy(b)) + _MORE
    return Peak(most, most, most, most)


def with_plan(found: Iterable[Claim], peak: Peak, device: torch.device) -> list[Claim]:
    """Returns the claims with the bytes that a plan wants at its peak."""
    host = peak.total if device_type(device).shares_host_memory else peak.host
    wanted = {"device": peak.device, "host": host, "locked": peak.pinned}
    return [replace(claim, wanted=wanted[claim.pool.side]) for claim in found]


def shortages(found: Iterable[Claim]) -> list[Shortage]:
    """Returns the pools that are too small for the claims of all ranks together, in the order of the claims."""
    by_key: dict[str, list[Claim]] = {}
    for claim in found:
        by_key.setdefault(claim.pool.key, []).append(claim)
    short = []
    for same in by_key.values():
        # If ranks see different limits, for example since a limit changed while they started, the smallest counts.
        pool = min((claim.pool for claim in same), key=lambda pool: pool.total)
        used, wanted = sum(claim.used for claim in same), sum(claim.wanted for claim in same)
        if used + wanted > pool.total:
            short.append(Shortage(pool, tuple(claim.rank for claim in same), used, wanted))
    return short


def lock_limit_holds(device: torch.device, limit: int) -> bool:
    """Whether pinning more than RLIMIT_MEMLOCK fails: drivers differ in whether they respect it.

    This is tried with a page more than the limit allows. If the limit is so large that the trial would take long, the
    result is False, since no run is assumed to reach it.
    """
    nbytes = limit + mmap.PAGESIZE
    if nbytes > _TRIAL:
        return False
    block = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    kind = device_type(device)
    try:
        kind.pin(block.data_ptr(), nbytes)
    except RuntimeError:
        return True
    kind.unpin(block.data_ptr())
    return False


def fits(found: Sequence[Claim], peak: Peak, device: torch.device) -> bool:
    """Whether a plan with this peak on every rank fits."""
    return not shortages(with_plan(found, peak, device))


def in_units(nbytes: int) -> str:
    """Writes a number of bytes in GiB, or in MiB if it is less than one GiB."""
    return f"{nbytes / _GIB:,.1f} GiB" if nbytes >= _GIB else f"{nbytes / 2**20:,.0f} MiB"
