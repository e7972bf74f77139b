"""Muon with momentum on the host and its iteration on the device: the bits, what moves, and what memory it takes."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from device import sim
from device.test_overlap import BF16, FP16, FP32, Late, bits
from engine import driver
from engine.driver import Session
from helpers import models
from helpers.slow_disk import SlowDiskOfDevice, counting_copies
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_zero import Muon
from lightning_zero.engine import Engine
from lightning_zero.planning import plan
from lightning_zero.planning.memory import held_by, planned_parts
from lightning_zero.sharding import BucketForm, BucketPlacement, Mesh, MixedPrecisionPolicy, ShardingPolicy
from lightning_zero.storage import (
    DeviceStore,
    DiskStore,
    Executor,
    HostStore,
    InlineExecutor,
    Lane,
    StreamExecutor,
    Ticket,
)
from lightning_zero.storage.executor import Staged
from lightning_zero.storage.nvme import DiskTensor
from lightning_zero.storage.run_folder import RunFolder
from lightning_zero.update import DynamicLossScaler, Footprint, kept_whole, make_updater, two_places
from lightning_zero.update.attached import parameters_of

MICRO = 2
NO_MASTERS = MixedPrecisionPolicy(torch.bfloat16, keep_norms=False, master_weights=False)


def start(
    device: torch.device,
    executor: Executor,
    stage: int = 2,
    precision: MixedPrecisionPolicy = FP32,
    model: nn.Module | None = None,
    kind: type[torch.optim.Optimizer] = Muon,
    *,
    bucket_size_mb: float = 1.0,
    disk: Path | None = None,
    **options: Any,
) -> Session:
    """Parameters on the device, at stage 3 their shards on the host; master and momentum on the host, or on a disk."""
    torch.manual_seed(0)
    model = model or models.TinyTransformer(depth=4)
    optimizer = make_optimizer(model, kind, **options)
    scaler = DynamicLossScaler(init_scale=2.0**17) if precision is FP16 else None
    placement = place(device, executor, stage, precision)
    if disk is not None:
        store = DiskStore.in_folder(RunFolder(disk, "run", 0), executor, 1, pin_for=device)
        placement = placement._replace(optimizer_store=store)
    optimized, whole = parameters_of(optimizer), kept_whole([optimizer], torch.device("cpu"))
    options = {"optimized": optimized, "whole": whole, "scaler": scaler, "check_steps": 0}
    engine = Engine(model, placement, bucket_size_mb=bucket_size_mb, **options)
    engine.attach([make_updater(optimizer, engine)])
    return Session(model, engine, optimizer, engine.updaters[0])


def make_optimizer(model: nn.Module, kind: type[torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    groups = Muon.groups_of(model)
    return kind(groups if kind is Muon else groups[:1], lr=2e-2, **options)  # type: ignore[call-arg]


@pytest.mark.device
@pytest.mark.parametrize("store", ["device", "host"])
@pytest.mark.parametrize("precision", [FP32, BF16])
def test_copies_of_sharded_parameters_follow_the_plan(
    device: torch.device, store: str, precision: MixedPrecisionPolicy
) -> None:
    """Of shards on the device, an update in host memory sends the new values; of those on the host, a gather does."""
    executor = Counting(device)
    placement = place(device, executor, 3, precision)
    placement = placement._replace(param_store=DeviceStore(device)) if store == "device" else placement
    options = {"bucket_size_mb": 1.0}
    model, twin = (models.TinyTransformer(depth=2) for _ in range(2))
    planned = plan(model, placement, [torch.optim.AdamW(model.parameters())], micro_batches=MICRO, **options)
    engine, optimizer = Engine(twin, placement, check_steps=0, **options), torch.optim.AdamW(twin.parameters())
    engine.attach([make_updater(optimizer, engine)])
    session = Session(twin, engine, optimizer, engine.updaters[0])
    for _ in range(3):
        executor.counts.clear()
        backward(session, device)
        optimizer.step()
        engine.settle()
    assert planned.copied["h2d"] > 0
    assert {way: executor.counts[way] for way in ("h2d", "d2h")} == dict(planned.copied)


def place(device: torch.device, executor: Executor, stage: int, precision: MixedPrecisionPolicy) -> BucketPlacement:
    on_device, store = DeviceStore(device), HostStore(pin_for=device)
    params = store if stage == 3 else on_device
    policy = ShardingPolicy.from_stage(stage)
    return BucketPlacement(Mesh.single(), policy, precision, device, store, params, executor)


def train(session: Session, device: torch.device, steps: int) -> list[Tensor]:
    """Masters, weights and state after some steps of two micro-batches, clipped by turns."""
    blocked = copy.copy(getattr(session.engine.placement.executor, "blocked", None))
    for step, micro in enumerate(models.make_batches(steps, MICRO, 1)):
        batches = [batch.to(device) for (batch,) in micro]
        driver.run_step(session, batches, clip_norm=[0.01, 1e9][step % 2])
    session.engine.settle()
    assert getattr(session.engine.placement.executor, "blocked", None) == blocked  # by nothing since the set-up
    left = []
    for bucket in session.engine.buckets:
        bucket.await_update()
        left += [bucket.master.read(0, bucket.layout.shard_numel), bucket.shard.read(0, bucket.shard.numel)]
        left += [leaf for leaf in tree_leaves(session.updater.gather_state(bucket)) if isinstance(leaf, Tensor)]
    return [tensor.cpu().clone() for tensor in left]


def on_the_host(device: torch.device, *arguments: Any, steps: int, **options: Any) -> list[Tensor]:
    return train(start(device, InlineExecutor(), *arguments, **options, on_device=False), device, steps)


@pytest.mark.simulated
@pytest.mark.device("lazy", "random2")
@pytest.mark.parametrize(
    ("stage", "precision"),
    [(2, FP16), (3, BF16), (2, NO_MASTERS), *(pytest.param(stage, FP32, marks=pytest.mark.slow) for stage in (1, 3))],
)
def test_the_bits_are_those_of_an_iteration_on_the_host(
    device: torch.device, stage: int, precision: MixedPrecisionPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With clipping, micro-batches and, in fp16, steps that overflow; in more batches than are under way at a time."""
    monkeypatch.setattr(two_places, "_BATCH", 250)
    expected = on_the_host(device, stage, precision, steps=5)
    limits = ((64 << 20, 64 << 20), (500, 2000), (0, 0))[stage - 1]  # bytes in flight and of staging memory
    session = start(device, Late(device, *limits), stage, precision)
    actual = train(session, device, 5)
    if precision is FP16:
        assert session.engine.loss_scale < 2.0**17
    assert [bits(values) for values in actual] == [bits(values) for values in expected]


class EarlyCopies(StreamExecutor):
    """Copies to the device have ended when they are asked for; what else it was asked for need not have begun."""

    def _copy(self, lane: Lane, *arguments: Any) -> Any:
        work = super()._copy(lane, *arguments)
        if lane is Lane.H2D:
            work.synchronize()
        return work


@pytest.mark.device
def test_matrices_come_to_memory_that_nobody_uses_any_more(device: torch.device) -> None:
    """That of another stream is free for this one's copies when that stream has come to where it was given out."""
    expected = on_the_host(device, 2, FP32, steps=2)
    actual = train(start(device, EarlyCopies(device), 2, FP32), device, 2)
    if device.type == sim.DEVICE:
        assert [bits(values) for values in actual] == [bits(values) for values in expected]
    else:
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.01)


class Short(StreamExecutor):
    """Has memory for one batch at a time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.out: list[Staged] = []

    def take(self, numel: int, dtype: torch.dtype) -> Staged:
        if self.out:
            raise MemoryError("no room for another batch")
        self.out.append(super().take(numel, dtype))
        return self.out[-1]

    def give(self, staged: Staged, work: Ticket) -> None:
        self.out.remove(staged)
        super().give(staged, work)


@pytest.mark.device
def test_memory_of_a_batch_comes_back_where_there_is_none_for_another(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_places, "_BATCH", 250)
    executor = Short(device)
    session = start(device, executor)
    backward(session, device)
    session.optimizer.step()
    with pytest.raises(MemoryError, match="no room for another batch"):
        session.engine.settle()
    assert not executor.out


@pytest.mark.device
def test_the_next_bucket_comes_from_a_disk_while_matrices_are_computed(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it has none itself."""
    session = start(device, StreamExecutor(device), bucket_size_mb=0.0003, disk=tmp_path)
    order, load, finish = list[str](), DiskStore.load, two_places._Rounds._finish

    def loaded(store: DiskStore, tensor: DiskTensor, *rest: Any) -> Ticket:
        order.append(tensor.what)
        return load(store, tensor, *rest)

    def finished(rounds: two_places._Rounds, *rest: Any) -> Any:
        order.append(rounds._what)
        return finish(rounds, *rest)

    monkeypatch.setattr(DiskStore, "load", loaded)
    monkeypatch.setattr(two_places._Rounds, "_finish", finished)
    for _ in range(2):
        backward(session, device)
        order.clear()
        session.optimizer.step()
        session.engine.settle()
        names = [bucket.name for bucket in session.engine.buckets]
        kinds = [f"the matrices of {name}" in order for name in names]
        assert kinds == [False, False, True, True, False, True, True]
        last = max(number for number, what in enumerate(order) if what == f"the matrices of {names[3]}")
        assert order.index(f"the masters of {names[4]}") < last


@pytest.mark.device
def test_the_momentum_of_two_matrices_is_in_host_memory_however_slow_the_disk_is(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of one is written while the next one is worked on, whose gradient comes from the disk, too."""
    taken = Counter[str]()
    monkeypatch.setattr(DiskStore, "copy_for", counting_copies(taken))
    model = models.TinyTransformer(depth=4)
    for parameter in Muon.groups_of(model)[1]["params"]:
        parameter.requires_grad_(False)
    session = start(device, SlowDiskOfDevice(device), model=model, kind=torch.optim.Muon, disk=tmp_path)
    for _ in range(2):
        taken["most"] = 0
        backward(session, device)
        session.optimizer.step()
        session.engine.settle()
    assert taken["most"] <= 3 * taken["largest"]


class Counting(StreamExecutor):
    """Counts the bytes that it copies, by direction, and those of matrices that come back."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.counts: Counter[str] = Counter()

    def _copy(self, lane: Lane, target: Tensor, source: Tensor, what: str, *rest: Any) -> Any:
        self.counts[lane.name.lower()] += target.nbytes
        self.counts["matrices"] += target.nbytes if lane is Lane.D2H and what.startswith("the matrices of") else 0
        return super()._copy(lane, target, source, what, *rest)


class Alike(nn.Module):
    """Matrices of two shapes, a MiB in fp32, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(models.VOCAB, 128)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 128)) for _ in range(4)
        )
        self.head = nn.Linear(128, models.VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_alike(kind: type[torch.optim.Optimizer]) -> nn.Module:
    """Beside torch's own Muon everything else is frozen."""
    model = Alike()
    for parameter in Muon.groups_of(model)[1]["params"]:
        parameter.requires_grad_(kind is Muon)
    return model


@pytest.mark.device
@pytest.mark.parametrize(
    ("stage", "precision", "kind", "options"),
    [
        (2, BF16, Muon, {"batched": True}),
        (2, BF16, torch.optim.Muon, {}),
        pytest.param(2, FP32, Muon, {}, marks=pytest.mark.slow),
        pytest.param(3, FP32, Muon, {"batched": True}, marks=pytest.mark.slow),
    ],
)
def test_memory_and_copies_follow_the_plan(
    device: torch.device,
    stage: int,
    precision: MixedPrecisionPolicy,
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the update of a bucket takes on the device, too."""
    monkeypatch.setattr(two_places, "_BATCH", 1 << 16)
    executor, footprints = Counting(device), list[Footprint]()
    plain = two_places.TwoPlacesUpdater.footprint

    def footprint(self: two_places.TwoPlacesUpdater, bucket: BucketForm) -> Footprint:
        footprints.append(plain(self, bucket))
        return footprints[-1]

    monkeypatch.setattr(two_places.TwoPlacesUpdater, "footprint", footprint)
    model, placement = make_alike(kind), place(device, executor, stage, precision)
    optimizers = [make_optimizer(model, kind, **options)]
    planned = plan(model, placement, optimizers, bucket_size_mb=1.0, micro_batches=MICRO)
    session = start(device, executor, stage, precision, make_alike(kind), kind, **options)
    for _ in range(3):
        executor.counts.clear()
        backward(session, device)
        torch.accelerator.synchronize()
        executor.release()
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        with sim.counted() if device.type == sim.DEVICE else contextlib.nullcontext() as counts:
            session.optimizer.step()
            session.engine.settle()
        assert counts is None or not counts.waits + counts.pageable  # the training's thread waits for no device
    taken = torch.accelerator.max_memory_allocated(device) - before
    apart = [footprint.apart for footprint in footprints]
    numbers = 2048  # bytes of norms, which no plan counts
    assert taken - numbers <= max(each.device for each in apart) <= taken, (apart, taken)
    assert {way: executor.counts[way] for way in ("h2d", "d2h")} == dict(planned.copied)
    assert sum(each.moved for each in apart) == executor.counts["matrices"] == 2 * 8 * 256 * 128
    held, parts = held_by(session.engine), planned_parts(planned)
    staging = held.pop("staging").host, parts.pop("staging").host
    assert held == parts
    assert 0 < staging[0] <= staging[1]


def backward(session: Session, device: torch.device) -> None:
    session.optimizer.zero_grad()
    (micro,) = models.make_batches(1, MICRO, 1)
    for number, (batch,) in enumerate(micro, start=1):
        with session.engine.forward_context():
            loss = models.next_token_loss(session.model, batch.to(device))
        driver.backward(session.engine, loss, last=number == MICRO)
