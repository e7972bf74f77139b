"""The choice is the best of all that could be chosen, for machines and models that are not there."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from lightning_zero.integration import engines
from lightning_zero.integration.choices import Way, fine_ways
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.integration.options import StrategyOptions
from lightning_zero.integration.precision import ZeroPrecision
from lightning_zero.integration.remedies import setting_of
from lightning_zero.planning import Plan
from lightning_zero.planning.account import Peak
from lightning_zero.planning.choosing import Need, Room, choose, most, needs_of
from lightning_zero.planning.devices import DRAM, GPUS, NETWORK, USABLE, Machine
from lightning_zero.planning.estimate import Choice, Times
from lightning_zero.planning.machine import known_gpu, processors
from lightning_zero.planning.memory import Memory, Setting
from lightning_zero.planning.preflight import Claim, Pool
from lightning_zero.planning.transformer import Sizes, trace_of

GB = 10**9
# Parameters, layers, width, tokens of a micro-batch, different tokens. A plan takes its time for each layer: there are
# half as many as usual, with as many parameters.
MODELS = {
    "tiny": (2_000_000, 2, 128, 256, 8192),
    "124M": (124_000_000, 6, 768, 1024, 50257),
    "1.5B": (1_500_000_000, 24, 1600, 1024, 50257),
    "7B": (7_000_000_000, 16, 4096, 2048, 50257),
    "70B": (70_000_000_000, 40, 8192, 2048, 50257),
}


class Case(NamedTuple):
    """A model on machines; `host` and `disk` in GB of each."""

    model: str
    gpu: str
    gpus: int
    nodes: int
    host: int
    disk: int = 0
    micro_batches: int = 1

    def machine(self) -> Machine:
        return Machine(GPUS[self.gpu], self.gpus, self.nodes, self.host * GB, DRAM, NETWORK)


FAST = [Case("tiny", "t4", 1, 1, 16), Case("124M", "t4", 2, 1, 8), Case("124M", "h100", 8, 2, 500)]
SLOW = [
    Case("1.5B", "t4", 1, 1, 12, 100),
    Case("7B", "h100", 1, 1, 250, 0, 8),  # sums micro-batches on the device
    Case("7B", "3090", 1, 1, 128),
    Case("7B", "l4", 4, 2, 100, 2000),
    Case("70B", "h200", 8, 8, 2000),
]
POLICY = ZeroPrecision("bf16-mixed").policy


@functools.cache
def model(name: str) -> Sizes:
    params, layers, hidden, _, vocabulary = MODELS[name]
    with torch.device("meta"):
        return Sizes(params, layers, hidden, vocabulary)


@functools.cache
def memory(name: str, world: int, micro_batches: int) -> Memory:
    module = model(name)
    return Memory(
        module=module,
        trains=True,
        optimizers=[torch.optim.AdamW(module.parameters())],
        micro_batches=micro_batches,
        setting=setting_of(StrategyOptions(), 1, POLICY),
        dtypes={},
        units=None,
        native="auto",
        device=torch.device("meta"),
        world_size=world,
        rank=0,
        candidates=[],
        hint="",
        trace=trace_of(module, 1, MODELS[name][3], wide=False, recompute=False),
    )


@functools.cache
def planned(name: str, world: int, micro_batches: int, setting: Setting) -> Plan:
    return memory(name, world, micro_batches).plan_of(setting)


def setting(way: Way, case: Case) -> Setting:
    options = StrategyOptions(**{"nvme_path": "/disk", **way.options})
    return setting_of(options, engines.shard_size(options, case.nodes, case.gpus), POLICY)


def everything(case: Case) -> Iterator[Setting]:
    """Each name with each combination of options that a plan knows, over a machine and over all of them."""
    world = case.gpus * case.nodes
    parts = (1.0, 0.75, 0.5, 0.25)
    options = itertools.product(STRATEGIES, (25.0, 1.0), (10_000, 0), (None, 0), (None, world), ("none", "cpu"), parts)
    for name, bucket, persistent, live, size, store, part in options:
        stage, rests = STRATEGIES[name]["stage"], STRATEGIES[name].get("offload_optimizer", "none")
        if (stage == 3 and bucket == 1.0) or (stage < 3 and (persistent == 0 or live == 0 or store != "none")):
            continue  # of no effect there
        if (size is not None and (stage == 0 or case.nodes == 1)) or (rests == "nvme" and not case.disk):
            continue
        if part < 1 and ((rests, store) == ("none", "none") or (bucket, persistent, live) != (25.0, 10_000, None)):
            continue  # only of what is offloaded, and otherwise as it is by default
        changed = {"bucket_size_mb": bucket, "persistence_numel": persistent, "max_live_numel": live}
        changed |= {"offload_fraction": part}
        if store != "none" and rests == "none":
            changed["offload_optimizer"] = store
        sums = (False, True) if case.micro_batches > 1 and (rests, store) != ("none", "none") else (False,)
        for there in sums:
            changed["accumulate_on_device"] = there
            yield setting(Way(name, {**changed, **({} if size is None else {"shard_size": size})}), case)


def seconds(plan: Plan, tried: Setting, case: Case, flops: float) -> float:
    """The bound of a step, written down once more."""
    machine, gpu = case.machine(), GPUS[case.gpu]
    inside = tried.shard_size <= case.gpus
    far = plan.sent.get("all_reduce", 0) + (0 if inside else plan.sent["all_gather"] + plan.sent["reduce_scatter"])
    far *= case.nodes > 1
    sending = (sum(plan.sent.values()) - far) / gpu.link + far * case.gpus / machine.network
    updated = {True: 0, False: 0}  # by whether it is on the device
    added = 0
    for bucket in plan.buckets:
        numel = bucket.padded_numel // tried.shard_size
        # Gradients are read, fp32 masters and two states read and written, 16-bit parameters written.
        updated[bucket.sharded_gradient.device > 0] += bucket.sharded_gradient.total + numel * (2 * 12 + 2)
        if tried.sharding.shard_grads and not bucket.sharded_gradient.device and not tried.accumulate_on_device:
            added += (case.micro_batches - 1) * numel * (bucket.dtype.itemsize + 2 * 4)  # to a sum in fp32
    updating = max(updated[True] / gpu.bandwidth, updated[False] * case.gpus / machine.dram)
    written = sum(bucket.param_shards.disk for bucket in plan.buckets)  # all the rest on a disk is read, too
    disk = (2 * plan.held.disk - written) * case.gpus / machine.disk
    longest = max(flops / gpu.matmul_16, sending, max(plan.copied.values(), default=0) / gpu.pcie)
    longest = max(longest, added * case.gpus / machine.dram)
    return longest + max(updating, disk)


def fits(plan: Plan, case: Case) -> bool:
    on_device, in_host = plan.peak.device <= USABLE * GPUS[case.gpu].memory, plan.peak.host * case.gpus
    return on_device and in_host <= case.host * GB and plan.held.disk * case.gpus <= case.disk * GB


def room_of(case: Case) -> Room:
    """The memory of the ranks of one machine."""
    machine = case.machine()
    host, usable = Pool("host", "the host", "host", machine.host), int(USABLE * machine.gpu.memory)
    devices = [Pool(f"device {rank}", "the device", "device", usable) for rank in range(case.gpus)]
    claims = [Claim(rank, pool, 0, 0) for rank, device in enumerate(devices) for pool in (host, device)]
    return Room(claims, torch.device("meta"), case.disk * GB // case.gpus)


@pytest.mark.parametrize("case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_the_choice_is_the_best_of_an_exhaustive_search(case: Case) -> None:
    world, machine = case.gpus * case.nodes, case.machine()
    trace = memory(case.model, world, case.micro_batches).trace
    assert trace is not None
    flops, several = case.micro_batches * trace.flops, case.micro_batches > 1
    offered = fine_ways(case.gpus, case.nodes, disk=case.disk > 0, parts=True, several=several, fixed={})
    candidates = [Choice(way.overrides, way.python, setting(way, case)) for way in offered]
    plan_of = functools.partial(planned, case.model, world, case.micro_batches)
    needs = needs_of(candidates, lambda each: plan_of(each.setting), flops, False, machine)
    pick = choose(candidates, needs, room_of(case))
    tried = {each: plan_of(each) for each in everything(case)}
    possible = [seconds(plan, each, case, flops) for each, plan in tried.items() if fits(plan, case)]
    best = min(possible, default=None)
    chosen = candidates[pick.number].setting
    if best is None:
        assert pick.lacks
        assert pick.need.peak.total <= 1.01 * min(plan.peak.total for plan in tried.values())
        return
    assert not pick.lacks
    assert fits(tried[chosen], case)
    took = seconds(tried[chosen], chosen, case, flops)
    assert took == pytest.approx(pick.need.times.bound, rel=1e-9)
    assert took <= best * 1.011 or took < 2e-5, (offered[pick.number], took, best)


def test_the_most_that_any_rank_needs_counts() -> None:
    def need(device: int, seconds: float) -> Need:
        return Need(Peak(device, 10 - device, 10), device, Times(seconds, 0.0, 0.0, 0.0))

    assert most([[need(1, 2.0), need(2, 2.0)], [need(3, 1.0), "no split"]]) == [
        Need(Peak(3, 9, 10), 3, Times(2.0, 0.0, 0.0, 0.0)),
        "no split",
    ]


def test_what_is_equal_stays_in_order_what_rounds_otherwise_comes_last_and_reasons_are_told_once() -> None:
    case = FAST[0]
    some = [Choice({}, name, setting(Way("zero1", {}), case)) for name in "abc"]
    some[0] = replace(some[0], reduced=True)
    needs = [Need(Peak(1, 1, 2), 0, Times(seconds, 0.0, 0.0, 0.0)) for seconds in (0.5, 1.001, 1.0)]
    room = room_of(case)
    pick = choose(some, needs, room)
    assert (pick.number, pick.refused) == (1, ())
    pick = choose(some, [needs[0], "no split", "no split"], room)
    assert (pick.number, pick.refused) == (0, ("b is refused: no split",))
    with pytest.raises(ValueError, match=r":\n- a is refused: no units\n- c is refused: no split$"):
        choose(some, ["no units", "no units", "no split"], room)


def test_devices_are_known_by_the_names_of_their_drivers() -> None:
    gib = 2**30
    for name, memory, known in (
        ("NVIDIA A100-SXM4-40GB", 39 * gib, "a100-40"),
        ("NVIDIA A100 80GB PCIe", 79 * gib, "a100-80"),
        ("NVIDIA GeForce RTX 4090", 23 * gib, "4090"),
        ("Tesla V100-SXM2-16GB", 15 * gib, "v100-16"),
        ("NVIDIA H100 80GB HBM3", 79 * gib, "h100"),
        ("NVIDIA L40S", 44 * gib, "l40s"),
    ):
        found = known_gpu(name, memory)
        assert (found.name, found.memory, found.matmul_16) == (known, memory, GPUS[known].matmul_16)
    other = known_gpu("AMD Instinct MI300X", 192 * gib)
    assert (other.memory, other.matmul_16, other.source) == (192 * gib, GPUS["h200"].matmul_16, "rates of h200")
    assert processors(8, 2, 64 * gib, DRAM).memory == 32 * gib
