"""Estimates of a step on imagined machines: memory with activations, what moves, and the least time.

A step cannot be faster than its computations, or than what it sends, or than what it copies; these overlap. An update
comes after them: in host memory it passes over all that it reads and writes at the speed of that memory, for all ranks
of a machine together. The bound is the longest of the three, and the update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_zero.planning.devices import USABLE, Machine
from lightning_zero.planning.memory import Setting
from lightning_zero.planning.plan import Plan

_MASTER = 4  # bytes of an element of a master, whole


@dataclass(frozen=True)
class Choice:
    """A way to train.

    Attributes:
        hydra: what is typed for it with Hydra.
        python: the expression of the strategy in Python.
        setting: that it leads to.
        reduced: whether the optimizer is one whose state is small, in bf16.
    """

    hydra: str
    python: str
    setting: Setting
    reduced: bool = False


@dataclass(frozen=True)
class Times:
    """Seconds that parts of a step take at least."""

    compute: float
    network: float
    pcie: float
    update: float

    @property
    def bound(self) -> float:
        """Of the whole step."""
        return max(self.compute, self.network, self.pcie) + self.update

    @property
    def limit(self) -> str:
        """The part that takes longest: ``"compute"``, ``"network"``, ``"pcie"`` or ``"update"``."""
        parts = {"compute": self.compute, "network": self.network, "pcie": self.pcie, "update": self.update}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Estimate:
    """One way to train on one kind of machine.

    Attributes:
        choice: the way.
        plan: of one rank; its peak has the activations.
        times: of a step.
        device_fits: whether the peak fits a GPU.
        host_fits: whether the peaks of all ranks of a machine fit its memory.
    """

    choice: Choice
    plan: Plan
    times: Times
    device_fits: bool
    host_fits: bool

    @property
    def fits(self) -> bool:
        """Whether both do."""
        return self.device_fits and self.host_fits


def estimate(choice: Choice, plan: Plan, flops: float, wide: bool, machine: Machine) -> Estimate:
    """Judges a plan.

    Args:
        choice: that the plan is of.
        plan: of one rank.
        flops: of all micro-batches of a step of one rank.
        wide: whether they are computed in fp32.
        machine: on which.
    """
    return Estimate(
        choice,
        plan,
        times_of(plan, choice.setting, flops, wide, machine),
        plan.peak.device <= USABLE * machine.gpu.memory,
        plan.peak.host * machine.gpus <= machine.host,
    )


def times_of(plan: Plan, setting: Setting, flops: float, wide: bool, machine: Machine) -> Times:
    """The least seconds of each part of a step; for the arguments see :func:`estimate`."""
    gpu = machine.gpu
    # Replicas are on different machines; so are shards of a group that is larger than one.
    across = {"all_reduce"} if setting.shard_size <= machine.gpus else {"all_gather", "reduce_scatter", "all_reduce"}
    on_network = sum(nbytes for name, nbytes in plan.sent.items() if name in across) if machine.nodes > 1 else 0
    on_links = sum(plan.sent.values()) - on_network
    update = update_bytes(plan, setting)
    rate = machine.dram / machine.gpus if setting.optimizer_memory == "host" else gpu.bandwidth
    return Times(
        compute=flops / (gpu.matmul_32 if wide else gpu.matmul_16),
        network=on_links / gpu.link + on_network / (machine.network / machine.gpus),
        pcie=max(plan.copied.values(), default=0) / gpu.pcie,
        update=update / rate,
    )


def update_bytes(plan: Plan, setting: Setting) -> int:
    """Bytes that an update reads and writes: gradients once, masters and state twice, parameters written."""
    total = 0
    for bucket in plan.buckets:
        if not bucket.sharded_gradient.total:
            continue
        numel = bucket.padded_numel // setting.shard_size
        # Without a master of their own, or as the high half of one, parameters are read too.
        passes = 1 if bucket.masters.total >= _MASTER * numel else 2
        state = bucket.masters.total + bucket.optimizer_state.total
        total += bucket.sharded_gradient.total + 2 * state + passes * numel * bucket.dtype.itemsize
    return total


def ranked(estimates: Iterable[Estimate]) -> list[Estimate]:
    """Those that fit from the fastest on, then the others, by what they take.

    Of those that fit, optimizers with reduced state come after all others: they round otherwise. Times that differ by
    less than a hundredth count as equal, and what is equal stays in the order that it was given.
    """

    def key(each: Estimate) -> tuple[bool, bool, float]:
        if not each.fits:
            return True, False, float(each.plan.peak.total)
        return False, each.choice.reduced, round(math.log(each.times.bound) * 100) if each.times.bound else 0.0

    return sorted(estimates, key=key)
