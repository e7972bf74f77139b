"""Estimates of a step on imagined machines: memory with activations, what moves, and the least time.

A step cannot be faster than its computations, or than what it sends, or than what it copies; these overlap. An update
comes after them: in host memory it passes over all that it reads and writes at the speed of that memory, for all ranks
of a machine together; what rests on a disk is read and written meanwhile. The bound is the longest of the three, and
the update or the disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_zero.planning.account import Bytes
from lightning_zero.planning.devices import USABLE, Machine
from lightning_zero.planning.memory import Setting
from lightning_zero.planning.plan import BucketPlan, Plan

_SHORT = 1e-5  # seconds, in which little more than a kernel or two can be started
_MASTER = 4  # bytes of an element of a master, whole


@dataclass(frozen=True)
class Choice:
    """A way to train.

    Attributes:
        overrides: the Hydra overrides that select it: groups and values by their keys.
        python: the Python expression that makes the strategy.
        setting: the setting of its plan.
        reduced: whether the optimizer keeps its state in bf16.
    """

    overrides: Mapping[str, Any]
    python: str
    setting: Setting
    reduced: bool = False


@dataclass(frozen=True)
class Times:
    """The least seconds that the parts of a step take."""

    compute: float
    network: float
    pcie: float
    update: float
    disk: float = 0.0
    sums: float = 0.0

    @property
    def bound(self) -> float:
        """The least seconds of the whole step."""
        return max(self.compute, self.network, self.pcie, self.sums) + max(self.update, self.disk)

    @property
    def limit(self) -> str:
        """The name of the part that takes longest."""
        parts = asdict(self)
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Estimate:
    """One way to train on one kind of machine.

    Attributes:
        choice: the way.
        plan: the plan of one rank; its peak includes activations.
        times: the times of a step.
        device_fits: whether the peak fits into a GPU's memory.
        host_fits: whether the peaks of all ranks of a machine fit into its host memory.
        disk_fits: whether the state that all ranks of a machine keep on its disk fits there.
    """

    choice: Choice
    plan: Plan
    times: Times
    device_fits: bool
    host_fits: bool
    disk_fits: bool

    @property
    def fits(self) -> bool:
        """Whether it fits on the device, on the host and on the disk."""
        return self.device_fits and self.host_fits and self.disk_fits


def estimate(choice: Choice, plan: Plan, flops: float, wide: bool, machine: Machine) -> Estimate:
    """Estimates the times of a plan, and whether it fits.

    Args:
        choice: the way to train.
        plan: its plan for one rank.
        flops: operations of all micro-batches of a step of one rank.
        wide: whether the model computes in fp32.
        machine: the machine.
    """
    times = times_of(plan, choice.setting, flops, wide, machine)
    on_disk = plan.held.disk * machine.gpus <= machine.storage
    if machine.gpu.shares_host:
        fits = plan.peak.total * machine.gpus <= USABLE * machine.host
        return Estimate(choice, plan, times, fits, fits, on_disk)
    on_device = plan.peak.device <= USABLE * machine.gpu.memory
    return Estimate(choice, plan, times, on_device, plan.peak.host * machine.gpus <= machine.host, on_disk)


def times_of(plan: Plan, setting: Setting, flops: float, wide: bool, machine: Machine) -> Times:
    """The least seconds of each part of a step; for the arguments see :func:`estimate`."""
    gpu = machine.gpu
    # Replicas are on different machines; so are the shards of a group that is larger than a machine.
    across = {"all_reduce"} if setting.shard_size <= machine.gpus else {"all_gather", "reduce_scatter", "all_reduce"}
    on_network = sum(nbytes for name, nbytes in plan.sent.items() if name in across) if machine.nodes > 1 else 0
    on_links = sum(plan.sent.values()) - on_network
    on_device, on_host = (
        nbytes / rate
        for nbytes, rate in zip(update_bytes(plan, setting), (gpu.bandwidth, machine.dram / machine.gpus), strict=True)
    )
    return Times(
        compute=flops / (gpu.matmul_32 if wide else gpu.matmul_16),
        network=on_links / gpu.link + on_network / (machine.network / machine.gpus),
        pcie=max(plan.copied.values(), default=0) / gpu.pcie,
        # The device and the host update at the same time, unless they share a memory.
        update=on_device + on_host if gpu.shares_host else max(on_device, on_host),
        disk=disk_bytes(plan) / (machine.disk / machine.gpus),
        sums=plan.added / (machine.dram / machine.gpus),
    )


def disk_bytes(plan: Plan) -> int:
    """Bytes that a step reads from and writes to a disk: state that an update changes, once each, and gradients.

    Parameters that have masters beside them are only written. At stage 3 each pass also reads the parameters, while it
    computes.
    """
    gradients = sum(bucket.sharded_gradient.disk for bucket in plan.buckets)
    written = sum(bucket.param_shards.disk for bucket in plan.buckets if _has_master(bucket))
    return 2 * (plan.held.disk - gradients) - written + plan.summed


def update_bytes(plan: Plan, setting: Setting) -> tuple[int, int]:
    """Bytes that an update moves: it reads gradients, reads and writes masters and state, and writes parameters.

    Returns:
        The bytes of the buckets that are updated on the device, and of those that are updated on the host.
    """
    on_device = on_host = 0
    for bucket in plan.buckets:
        if not _anywhere(bucket.sharded_gradient):
            continue
        numel = bucket.padded_numel // setting.shard_size
        passes = 1 if _anywhere(bucket.masters) >= _MASTER * numel else 2  # as in `_has_master`
        state = _anywhere(bucket.masters) + _anywhere(bucket.optimizer_state)
        nbytes = _anywhere(bucket.sharded_gradient) + 2 * state + passes * numel * bucket.dtype.itemsize
        if bucket.sharded_gradient.device:
            on_device += nbytes
        else:
            on_host += nbytes
    return on_device, on_host


def _has_master(bucket: BucketPlan) -> bool:
    """Whether a bucket has masters apart from its shard on a disk, so that the update does not read the shard."""
    return _anywhere(bucket.masters) * bucket.dtype.itemsize >= _MASTER * _anywhere(bucket.param_shards)


def _anywhere(amount: Bytes) -> int:
    return amount.total + amount.disk


def preference(fits: bool, reduced: bool, bound: float, total: int) -> tuple[bool, bool, float]:
    """The key by which ways to train are sorted, the best first.

    Ways that fit come first, sorted by time; among them, optimizers with reduced state come last, since they round
    differently. Then come the ways that do not fit, sorted by memory. Times that differ by less than a hundredth, or
    that are too short for the bound to mean anything, count as equal, and equal ways keep their given order.

    Args:
        fits: whether the way fits.
        reduced: see :class:`Choice`.
        bound: least seconds of a step.
        total: bytes of its peak, device and host together.
    """
    if not fits:
        return True, False, float(total)
    return False, reduced, round(math.log(max(bound, _SHORT)) * 100)


def ranked(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Sorts estimates: those that fit first, the fastest first; then the others. See :func:`preference`."""

    def key(each: Estimate) -> tuple[bool, bool, float]:
        return preference(each.fits, each.choice.reduced, each.times.bound, each.plan.peak.total)

    return sorted(estimates, key=key)
