"""The plan on a device: its peak, and no wait of the host per bucket."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import pytest
import torch
from device import sim
from device.where import DevicePool, every_case
from engine import driver
from engine.driver import Session
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.planning import plan
from lightning_zero.sharding import BucketPlacement, Mesh, MixedPrecisionPolicy, ShardingPolicy
from lightning_zero.storage import DeviceStore, HostStore, make_executor
from lightning_zero.update import make_updater

on_device = pytest.mark.device("lazy")

PRECISIONS = {"fp32": driver.UNCHANGED, "bf16": MixedPrecisionPolicy(torch.bfloat16, keep_norms=False)}
WIDTH = 1024
BUCKET_SIZE_MB = 8.0
ROUNDING = 0.03  # of the caching allocator: blocks are multiples of 512 bytes, large ones may stay unsplit


class Deep(nn.Module):
    """64 MiB of fp32 parameters, and activations of a few KB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def make_placement(stage: int, offload: bool, precision: MixedPrecisionPolicy, device: torch.device) -> BucketPlacement:
    store = HostStore(pin_for=device) if offload else DeviceStore(device)
    policy, param_store = ShardingPolicy.from_stage(stage), store if stage == 3 else DeviceStore(device)
    executor = make_executor(device, overlap=True)
    return BucketPlacement(Mesh.single(), policy, precision, device, store, param_store, executor)


def start(placement: BucketPlacement) -> Session:
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = Engine(model, placement, bucket_size_mb=BUCKET_SIZE_MB)
    updater = make_updater(optimizer, engine)
    engine.attach([updater])
    return Session(model, engine, optimizer, updater)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def batch_of(placement: BucketPlacement) -> Tensor:
    return torch.ones(1, WIDTH, device=placement.device, dtype=placement.precision.param_dtype or torch.float32)


def measure(stage: int, offload: bool, precision: str, device: torch.device) -> dict[str, Any]:
    """Bytes on the device at rest and at the worst moment of two steps, without what was there before."""
    gc.collect()
    torch.accelerator.empty_cache()
    placement = make_placement(stage, offload, PRECISIONS[precision], device)
    with torch.device("meta"):
        outline = Deep()
    optimizers = [torch.optim.AdamW(outline.parameters())]
    planned = plan(outline, placement, optimizers, bucket_size_mb=BUCKET_SIZE_MB, micro_batches=2)
    linear, batch = nn.Linear(WIDTH, WIDTH, device=device), batch_of(placement)
    loss_of(linear.to(batch.dtype), batch).backward()  # workspaces of cuBLAS
    del linear
    before = torch.accelerator.memory_allocated()
    session = start(placement)
    torch.accelerator.reset_peak_memory_stats()
    for _ in range(2):
        driver.run_step(session, [batch] * 2, loss_of)
    session.optimizer.zero_grad()
    session.engine.settle()  # an update may go on until somebody waits for it
    return {
        "held": torch.accelerator.memory_allocated() - before,
        "peak": torch.accelerator.max_memory_allocated() - before,
        "planned held": planned.held.device,
        "planned peak": planned.peak.device,
        "staged": placement.executor.staged_bytes,
        "planned staging": planned.staging.host,
    }


@pytest.mark.slow
@on_device
@every_case(precision=list(PRECISIONS), offload=[False, True], stage=[1, 2, 3])
def test_device_memory_follows_the_plan(device: torch.device, stage: int, offload: bool, precision: str) -> None:
    figures = measure(stage, offload, precision, device)
    slack = 1 << 20  # activations
    assert figures["held"] <= figures["planned held"] * (1 + ROUNDING) + slack
    assert figures["held"] >= figures["planned held"] * 0.99
    assert figures["staged"] <= figures["planned staging"]
    assert bool(figures["staged"]) == bool(figures["planned staging"])
    assert figures["peak"] <= figures["planned peak"] * (1 + ROUNDING) + slack
    if device.type == sim.DEVICE:  # a GPU's copies may end, and give their memory back, long before they must
        assert figures["peak"] >= 0.75 * figures["planned peak"]


class Waits(Protocol):
    """Counts how often the host has waited for the device."""

    def __call__(self) -> int: ...


@contextmanager
def counted_waits(device: torch.device) -> Iterator[Waits]:
    """Counts inside: of the simulated device all waits, of CUDA those that torch warns of."""
    if device.type == sim.DEVICE:
        with sim.counted() as counts:
            yield counts.waits.total
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield lambda: sum("synchroniz" in str(warning.message) for warning in caught)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_device
@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (2, True),
        (3, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, False), (2, False), (3, False), (1, True))),
    ],
    ids=str,
)
def test_a_step_waits_for_the_device_once(device: torch.device, stage: int, offload: bool) -> None:
    """For norm and flags, after the backward, wherever state rests."""
    session = start(make_placement(stage, offload, driver.UNCHANGED, device))
    engine, batch = session.engine, batch_of(session.engine.placement)
    driver.run_step(session, [batch, batch], loss_of)
    engine.settle()
    torch.accelerator.synchronize()
    with counted_waits(device) as waits:
        session.optimizer.zero_grad()
        for last in (False, True):
            driver.backward(engine, loss_of(session.model, batch), last=last)
        assert waits() == 1
        engine.stats(session.optimizer)
        session.optimizer.step()
        engine.settle()
        assert waits() == 1


def waits_of_two_collectives(device: str, checked: bool) -> int:
    group = Mesh.create().shard
    group.checked = checked
    flat = torch.ones(8, device=device)
    torch.accelerator.synchronize()
    with counted_waits(flat.device) as waits:
        group.reduce_scatter(flat, "sum a tensor")
        group.all_gather_(flat, "gather a tensor")
        return waits()


@on_device
@pytest.mark.parametrize("checked", [False, True])
def test_a_collective_waits_for_the_device_only_to_compare_notes(device_pool2: DevicePool, checked: bool) -> None:
    assert device_pool2.run(waits_of_two_collectives, device_pool2.where.type, checked) == [2 * checked] * 2
