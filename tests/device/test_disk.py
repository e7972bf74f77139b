"""Optimizer state on a disk beside a device that trains: in every schedule the bits of state in host memory."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from device import sim
from device.sim import Schedule
from device.test_overlap import BF16, Case, Late, assert_overlapped_is_inline, start
from device.test_training import EAGER, LAZY, Digests, digests
from device.test_update_under_forward import Held, backward, left_by_zeros
from device.where import DevicePool
from helpers import models
from strategy.fits import Recipe, fit

from lightning_zero.checkpoint.state import module_state_dict
from lightning_zero.engine.shadow import follow
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.sharding import BucketPlacement
from lightning_zero.storage import InlineExecutor
from lightning_zero.storage.nvme import DiskTensor
from lightning_zero.storage.threads import in_lane

RECIPE = Recipe(steps=3, micro=2, optimizer="adamw")
SEEDS = 4
BUFFER_GB = 2.0**-12  # tiles of 4096 elements, the smallest there are


def train(options: dict[str, Any], precision: str, optimizer: str, schedules: Sequence[Schedule]) -> list[Digests]:
    found, recipe = [], dataclasses.replace(RECIPE, optimizer=optimizer)
    for schedule in schedules:
        with sim.scheduled(schedule):
            flags: dict[str, Any] = {"precision": precision, "gradient_clip_val": 0.3}
            found.append(digests(fit(options, recipe, accelerator=sim.DEVICE, **flags)))
    return found


@pytest.mark.simulated
@pytest.mark.slow
@pytest.mark.device("eager")  # the test chooses its schedules itself
@pytest.mark.parametrize(
    ("precision", "world", "optimizer"),
    [("32-true", 1, "adamw"), ("bf16-true", 2, "adamw"), ("bf16-true", 1, "muon_and_adamw")],
)
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_state_on_a_disk_gives_the_bits_of_state_in_host_memory(
    device_pool1: DevicePool,
    device_pool2: DevicePool,
    tmp_path: Path,
    name: str,
    precision: str,
    world: int,
    optimizer: str,
) -> None:
    pool = (device_pool1, device_pool2)[world - 1]
    small = {"persistence_numel": 0}
    there = {"nvme_path": str(tmp_path), "nvme_buffer_gb": BUFFER_GB, "offload_gradients": "nvme"}
    disk = STRATEGIES[f"{name}_nvme"] | small | there
    (expected,) = pool.run(train, STRATEGIES[f"{name}_offload"] | small, precision, optimizer, [EAGER])[0]
    schedules = [LAZY, *(Schedule("random", seed) for seed in range(SEEDS))]
    found = pool.run(train, disk, precision, optimizer, schedules)[0]
    wrong = [str(schedule) for schedule, actual in zip(schedules, found, strict=True) if actual != expected]
    assert not wrong


CASES = [
    Case(2, micro=2, native="off"),
    Case(1, precision=BF16, split=True),
    Case(3, micro=2, precision=BF16, prefetch_mb=1.0),
    Case(3),
]


@pytest.mark.device("lazy")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_overlapped_is_inline(device: torch.device, tmp_path: Path, case: Case) -> None:
    """With gradients on the disk, and at stage 3 parameters."""
    assert_overlapped_is_inline(dataclasses.replace(case, disk=tmp_path), device, (500, 2000))


@pytest.mark.device("lazy")
def test_gradients_that_an_update_reads_are_not_overwritten(device: torch.device, tmp_path: Path) -> None:
    """Nor are tiles of them let go in another thread."""
    left = [left_by_zeros(Case(2, disk=tmp_path), executor, device) for executor in (InlineExecutor(), Late(device))]
    assert all(map(torch.equal, *left))


@pytest.mark.device("lazy")
@pytest.mark.parametrize("ahead", [False, True])
def test_parameters_are_fetched_when_nobody_else_reads_them(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """An average, in another thread; also those that are fetched long before their unit needs them."""
    monkeypatch.setattr(BucketPlacement, "tiles_ahead", lambda placement, dtype: int(ahead))
    executor, expect, seen = Held(device), DiskTensor.expect, list[bool]()
    session = start(Case(3, disk=tmp_path), executor, device, models.TinyTransformer(depth=4))
    later, shadow = session.engine.bucket_of(session.model.blocks[2].down.weight), session.engine.make_shadow()
    assert later is not None
    assert len(shadow.shards) == len(session.engine.buckets)  # and what they begin with has come
    executor.word = f"the second values of {later.name}"
    shadow.update(follow)

    def noted(tensor: DiskTensor, start: int, stop: int) -> None:
        if tensor is later.shard:
            seen.append(executor.gate.is_set())
        expect(tensor, start, stop)

    monkeypatch.setattr(DiskTensor, "expect", noted)
    threading.Timer(0.3, executor.gate.set).start()
    with torch.no_grad(), session.engine.forward_context():
        session.model(torch.zeros(2, 4, dtype=torch.long, device=device))
    assert seen
    assert all(seen)


@pytest.mark.device("lazy")
@pytest.mark.parametrize("saved", [False, True])
def test_masters_are_gathered_when_nobody_else_reads_them(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    executor, seen = Held(device), list[bool]()
    session = start(Case(2, precision=BF16, disk=tmp_path), executor, device)
    bucket, shadow = session.engine.buckets[0], session.engine.make_shadow()
    assert len(shadow.shards) == len(session.engine.buckets)  # and what they begin with has come
    executor.word = f"the second values of {bucket.name}"
    shadow.update(follow)
    read = bucket.master.read

    def noted(start: int, stop: int) -> torch.Tensor:
        seen.append(executor.gate.is_set())
        return read(start, stop)

    monkeypatch.setattr(bucket.master, "read", noted)
    threading.Timer(0.3, executor.gate.set).start()
    if saved:
        copy.deepcopy(module_state_dict(session.engine))
    else:
        bucket.gather_master()
    assert seen
    assert all(seen)


@pytest.mark.device("lazy")
def test_no_tile_is_let_go_that_an_update_writes(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another optimizer with parameters in the same buckets steps while the update of the first one goes on."""
    executor, drop = Held(device), DiskTensor.drop
    session = start(Case(3, disk=tmp_path, optimizers=2), executor, device)
    first, second = (updater.optimizer for updater in session.engine.updaters)
    backward(session, device)
    executor.word = "the update of"
    first.step()
    running = {id(bucket.shard) for bucket in session.engine.buckets if bucket.updating}
    dropped = []

    def noted(tensor: DiskTensor, *args: Any, **kwargs: Any) -> None:
        dropped.append(id(tensor) in running and not in_lane())
        drop(tensor, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(DiskTensor, "drop", noted)
        second.step()
    executor.gate.set()
    session.engine.settle()
    assert running
    assert not any(dropped)
