"""Split masters of which the device has the high half: what the host holds, what is exact, and who waits for whom."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoint.resuming import run
from device import sim
from device.sim import Schedule
from device.test_overlap import BF16, FP16, Late, bits
from device.test_peak import Deep
from device.test_training import Digests, digests
from device.test_update_under_forward import Held, backward
from device.where import DevicePool
from engine import driver, memory
from engine.driver import Session
from helpers import models
from lightning import Callback, LightningModule, Trainer
from strategy import test_cpu_optimizers
from strategy.fits import make_trainer
from torch import Tensor

import lightning_zero
from lightning_zero import ZeroPrecision, ZeroStrategy
from lightning_zero.engine import Engine
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.planning import plan
from lightning_zero.planning.memory import held_by, planned_parts
from lightning_zero.sharding import BucketPlacement, MasterForm, Mesh, MixedPrecisionPolicy, ShardingPolicy
from lightning_zero.sharding.masters import SplitMaster
from lightning_zero.storage import DeviceStore, Executor, HostStore, InlineExecutor, Lane, StreamExecutor
from lightning_zero.storage.rested import Resident
from lightning_zero.storage.staged import StagedTensor, staged_tile
from lightning_zero.update import DynamicLossScaler, make_updater
from lightning_zero.update.cpu import block_of

N, SMALL = 1000, 2000  # elements; bytes of staging memory, which make tiles of 256 elements of 16 bits


def staged(device: torch.device, executor: Executor) -> tuple[StagedTensor, Tensor]:
    values = torch.zeros(N, dtype=torch.bfloat16, device=device)
    return StagedTensor(Resident(values, "device"), executor, "a"), values


@pytest.mark.device("lazy", "eager", "random1", "random4")
def test_a_tensor_of_the_device_is_worked_on_a_tile_at_a_time(device: torch.device) -> None:
    executor = StreamExecutor(device, staging_bytes=SMALL)
    tensor, values = staged(device, executor)
    assert tensor.tile == 256
    with torch.inference_mode():  # memory in passing outlives it
        assert tensor.read(0, N).eq(0).all()
    values += 1  # after which it comes

    def add(step: int) -> None:
        for start in range(0, N, 256):
            stop = min(start + 256, N)
            for low in (start, stop):  # the next one comes meanwhile
                if low < N:
                    tensor.expect(low, min(low + 256, N))
            tensor.view(start, start + 100).add_(step)
            tensor.view(start + 100, stop).add_(step)
            tensor.commit(start, stop)

    for step in (2, 4):  # the second one fetches what the first puts back
        add(step)
    assert values.cpu().eq(7).all()
    values *= 2
    assert tensor.read(200, 600).eq(14).all()
    executor.submit(lambda: [add(step) for step in (8, 16)], Lane.HOST, "a").wait()
    assert (values + 1).cpu().eq(39).all()

    def twice() -> None:
        for _ in range(2):
            tensor.view(0, 256).add_(1)
            tensor.commit(0, 256)

    executor.submit(twice, Lane.HOST, "a").wait()
    assert values[:256].cpu().eq(40).all()
    tile = tensor.view(0, 256)
    tensor.commit(0, 256, after=[executor.commit(tile, torch.full_like(values[:256], 41), "a")])
    assert values[:256].cpu().eq(41).all()
    tensor.view(0, 256).fill_(42)
    tensor.commit(0, 256)
    tensor.settle()
    with torch.Stream(device=device):  # which waits for nobody
        assert values[:256].cpu().eq(42).all()
    assert executor.staged_bytes <= SMALL + 512
    assert not executor.blocked


@pytest.mark.device("lazy", "random1")
def test_what_was_expected_and_not_seen_is_let_go(device: torch.device) -> None:
    executor = StreamExecutor(device, staging_bytes=SMALL)
    tensor, values = staged(device, executor)
    target, on_host = torch.zeros_like(values[:256]), HostStore(pin_for=device).zeros(N, torch.bfloat16)
    tensor.expect(0, 256)
    tensor.drop(0, 256)
    with executor.filling(target, "a") as filled:
        filled.fill_(9)
        executor.commit(on_host, values, "a").synchronize()  # and what was fetched in vain has come
    assert target.cpu().eq(9).all()
    tensor.expect(0, 256)
    tensor.expect(256, 512)
    tensor.view(256, 512).fill_(3)
    values[:256].fill_(5)
    tensor.commit(0, 512)
    assert values[:256].cpu().eq(5).all()
    assert tensor.read(0, 512).tolist() == [5.0] * 256 + [3.0] * 256
    tensor.view(0, 256)
    tensor.drop(0, 256)
    values.fill_(7)
    assert tensor.view(0, 256).eq(7).all()


def test_a_tile_never_cuts_a_block_of_state() -> None:
    executor = InlineExecutor()
    assert staged_tile(executor, torch.bfloat16) % lightning_zero.ops.BLOCK == 0
    for nbytes in (1, SMALL, 5000, 256 << 20, 1 << 40):
        executor.staging_bytes = nbytes
        tile = staged_tile(executor, torch.bfloat16)
        assert tile % lightning_zero.ops.BLOCK == 0
        assert tile & (tile - 1) == 0


# -------------------------------------------------------------------------------------------------------------- masters


def start(
    device: torch.device,
    executor: Executor,
    stage: int = 2,
    precision: MixedPrecisionPolicy = BF16,
    overflow: bool = False,
    depth: int = 2,
    known: bool = True,
    shared: bool = False,
    of_torch: bool = False,
    **options: Any,
) -> Session:
    """Parameters on the device at every stage, with the state of an optimizer that is known then in host memory.

    Where ``shared``, another one that torch computes has every second parameter. An optimizer ``of_torch`` has split
    masters because the placement says so.
    """
    on_device, store = DeviceStore(device), HostStore(pin_for=device)
    policy = ShardingPolicy.from_stage(stage)
    placement = BucketPlacement(Mesh.single(), policy, precision, device, store, on_device, executor)
    torch.manual_seed(0)
    model = models.TinyTransformer(depth=depth)
    parameters = [*model.parameters()][:: 1 + shared]
    optimizer: torch.optim.Optimizer
    if of_torch:
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        placement = placement._replace(split_masters=True)
    else:
        optimizer = lightning_zero.CPUAdamW(parameters, **{"lr": 1e-2, "master_layout": "split"} | options)
    others = [torch.optim.RMSprop([*model.parameters()][1::2], lr=1e-2)] if shared else []
    scaler = DynamicLossScaler(init_scale=2.0**17) if overflow else None
    if known:
        placement = placement._replace(block=block_of([optimizer]))
    engine = Engine(model, placement, scaler=scaler, bucket_size_mb=1.0, check_steps=0)
    engine.attach([make_updater(each, engine) for each in (optimizer, *others)])
    return Session(model, engine, optimizer, engine.updaters[0])


def train(session: Session, device: torch.device, steps: int = 4) -> list[Tensor]:
    """Weights, masters and state after some steps of two micro-batches, clipped by turns."""
    for step, micro in enumerate(models.make_batches(steps, 2, 1)):
        session.engine.zero_grad(session.model.parameters())
        for index, (batch,) in enumerate(micro, start=1):
            with session.engine.forward_context():
                loss = models.next_token_loss(session.model, batch.to(device))
            driver.backward(session.engine, loss, last=index == 2)
        session.engine.clip_grad_norm_(session.optimizer, [0.01, 1e9][step % 2])
        for updater in session.engine.updaters:
            updater.optimizer.step()
    left = []
    for bucket in session.engine.buckets:
        bucket.await_update()
        left += [bucket.master.read(0, bucket.layout.shard_numel), bucket.shard.read(0, bucket.shard.numel)]
        state = session.updater.state_of(bucket)
        left += [session.updater.read_flat(bucket, *found, 0, bucket.shard.numel) for found in state.dtypes.items()]
    with session.engine.gathered(session.model.parameters()):
        left += [parameter.detach() for parameter in session.model.parameters()]
        return [tensor.cpu().clone() for tensor in left]


@pytest.mark.device("lazy")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_the_bits_are_those_of_fp32_masters(device: torch.device, stage: int, state_dtype: str) -> None:
    """Tile by tile, in whatever order copies and jobs end."""
    executor = (Late if device.type == sim.DEVICE else StreamExecutor)(device, SMALL, SMALL)
    options = {"state_dtype": state_dtype, "known": stage > 1}
    whole = train(start(device, InlineExecutor(), stage, master_layout="fp32", **options), device)
    session = start(device, executor, stage, **options)
    split = train(session, device)
    assert max(bucket.shard.numel for bucket in session.engine.buckets) > 2 * staged_tile(executor, torch.bfloat16)
    assert all(isinstance(b.master, SplitMaster) and b.master.in_shard for b in session.engine.buckets)
    assert [bits(values) for values in split] == [bits(values) for values in whole]


@pytest.mark.device("lazy", "random2")
@pytest.mark.parametrize(("precision", "shared"), [(FP16, False), (BF16, True)], ids=["fp16", "two optimizers"])
def test_the_bits_are_those_of_high_halves_on_the_host(
    device: torch.device, precision: MixedPrecisionPolicy, shared: bool
) -> None:
    """As a disk has them; with steps that overflow, in which nothing changes, or beside torch's own code."""
    executor = (Late if device.type == sim.DEVICE else StreamExecutor)(device, SMALL, SMALL)
    options: dict[str, Any] = {"precision": precision, "overflow": precision is FP16, "shared": shared}
    apart = MasterForm(torch.float32, torch.device("cpu"), (torch.int16, precision.param_dtype or torch.float32))
    with mock.patch.object(BucketPlacement, "split_master", return_value=apart):
        session = start(device, InlineExecutor(), **options)
        expected = train(session, device, 6)
        assert not any(bucket.master.in_shard for bucket in session.engine.buckets)
    session = start(device, executor, **options)
    assert [bits(values) for values in train(session, device, 6)] == [bits(values) for values in expected]
    assert all(bucket.master.in_shard for bucket in session.engine.buckets)


@pytest.mark.device("lazy")
def test_torchs_adamw_has_the_bits_of_cpu_adamw(device: torch.device) -> None:
    expected = train(start(device, InlineExecutor(), weight_decay=1e-2), device)
    session = start(
        device, (Late if device.type == sim.DEVICE else StreamExecutor)(device, SMALL, SMALL), of_torch=True
    )
    assert [bits(values) for values in train(session, device)] == [bits(values) for values in expected]
    assert all(bucket.master.in_shard for bucket in session.engine.buckets)


@pytest.mark.device("lazy")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_host_holds_12_bytes_a_parameter(device: torch.device, stage: int) -> None:
    """Remainder, two moments and a gradient, beside a few tiles; the plan says the same."""
    executor = StreamExecutor(device, staging_bytes=SMALL)
    with memory.only_new_objects():
        session = start(device, executor, stage, depth=8)
        for _ in range(2):
            session.optimizer.zero_grad()
            backward(session, device)
            session.optimizer.step()
        session.engine.settle()
        there_is = sum(s.nbytes() for s in memory.storages().values() if s.device.type == "cpu")
    numel = sum(bucket.layout.shard_numel for bucket in session.engine.buckets)
    held = held_by(session.engine)
    assert sum(part.host for name, part in held.items() if name != "staging") == 12 * numel
    planned = planned_parts(plan(session.model, session.engine.placement, [session.optimizer], bucket_size_mb=1.0))
    assert {name: part for name, part in held.items() if name != "staging"} == {
        name: part for name, part in planned.items() if name != "staging"
    }
    assert there_is == pytest.approx(12 * numel + held["staging"].host, rel=0.01)
    assert 0 < held["staging"].host <= planned["staging"].host <= SMALL + 512


@pytest.mark.device("lazy")
def test_an_average_comes_before_edits_of_what_it_reads(device: torch.device) -> None:
    """An edit of the parameter is one of its master's high half."""
    executor = Held(device)
    session = start(device, executor)
    shadow, parameter = session.engine.make_shadow(), session.model.positions.weight
    backward(session, device)
    session.optimizer.step()
    updated = session.engine.full_param(parameter).cpu().clone()
    executor.word = "the second values"
    threading.Timer(0.2, executor.gate.set).start()
    shadow.update(lambda second, live: live)
    with torch.no_grad():
        parameter.fill_(4)
    torch.accelerator.current_stream(device).synchronize()
    bucket = session.engine.bucket_of(parameter)
    assert bucket is not None
    averages = shadow.shards[session.engine.buckets.index(bucket)]
    assert torch.equal(bucket.view(averages, bucket.index[id(parameter)]), updated)
    torch.testing.assert_close(
        session.engine.full_param(parameter).cpu(), torch.full_like(updated, 4), rtol=2e-2, atol=0
    )


@pytest.mark.device("lazy")
@pytest.mark.parametrize("late", [False, True])
def test_full_values_are_read_and_written_to_the_last_digit(device: torch.device, late: bool) -> None:
    executor = (
        Late(device, SMALL, SMALL) if late and device.type == sim.DEVICE else StreamExecutor(device, SMALL, SMALL)
    )
    session = start(device, executor)
    backward(session, device)
    session.optimizer.step()
    parameter = session.model.blocks[1].down.weight
    wanted = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
    with session.engine.gathered([parameter], full_precision=True), torch.no_grad():
        parameter.copy_(wanted)
    assert torch.equal(session.engine.full_param(parameter).cpu(), wanted)
    assert torch.equal(parameter.detach().cpu(), wanted.bfloat16())
    before = session.engine.full_param(parameter).cpu().clone()
    with torch.no_grad():
        parameter.data.copy_(parameter.detach().clone())  # as somebody who swaps weights and swaps them back
    assert torch.equal(session.engine.full_param(parameter).cpu(), before)


# ----------------------------------------------------------------------------------------------------------------- fits


class Weighed(Callback):
    """Bytes of host memory per element at the end, but for staging memory: held, planned, and all that there are."""

    held = planned = there_are = 0.0

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ZeroStrategy)
        assert strategy.memory is not None
        strategy.engine.settle()
        numel = sum(bucket.layout.shard_numel for bucket in strategy.engine.buckets)
        held, planned = held_by(strategy.engine), planned_parts(strategy.memory.plan)
        storages = sum(s.nbytes() for s in memory.storages().values() if s.device.type == "cpu")
        self.held, self.planned = (
            sum(part.host for name, part in parts.items() if name != "staging") / numel for parts in (held, planned)
        )
        self.there_are = (storages - held["staging"].host) / numel


def weigh(accelerator: str) -> tuple[float, float, float]:
    weighed, options = Weighed(), STRATEGIES["zero2_offload"] | {"master_layout": "split"}
    flags: dict[str, Any] = {"accelerator": accelerator, "precision": "bf16-true", "callbacks": [weighed]}
    with memory.only_new_objects():
        make_trainer(ZeroStrategy(**options), **flags).fit(Deep())
    return weighed.held, weighed.planned, weighed.there_are


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_zero2_offload_in_bf16_holds_12_bytes_a_parameter_on_the_host(device_pool2: DevicePool) -> None:
    for held, planned, there_are in device_pool2.run(weigh, device_pool2.where.accelerator):
        assert held == planned == 12
        assert there_are == pytest.approx(12, rel=0.01)


RECIPE = dataclasses.replace(test_cpu_optimizers.RECIPE, micro=1, options={"lr": 0.05, "master_layout": "split"})
STAGES = ({"stage": 2}, {"stage": 1}, {"stage": 3})  # with parameters on the device


def fit_each(accelerator: str, precision: str, path: str, options: Sequence[dict[str, Any]]) -> list[Digests]:
    """What a fit leaves that saves in its middle, and what others leave that go on from there in other schedules."""
    left = []
    for seed, each in enumerate(options):
        schedule = sim.scheduled(Schedule("random", seed)) if accelerator == sim.DEVICE else contextlib.nullcontext()
        strategy = {"offload_optimizer": "cpu", "bucket_size_mb": 0.001} | each
        middle: dict[str, Any] = {"resume": path} if seed else {"save": (4, path)}
        recipe = dataclasses.replace(RECIPE, seed=7 if seed else 0)
        scaler = DynamicLossScaler(init_scale=2.0**10) if precision.startswith("16") else None
        flags = {"accelerator": accelerator, "plugins": [ZeroPrecision(precision, scaler=scaler)]}  # type: ignore[arg-type]
        with schedule:
            fitted = run(strategy, recipe, test_cpu_optimizers.Lit, steps=6, gradient_clip_val=0.05, **middle, **flags)
        assert fitted.steps == 6
        left.append(digests(fitted))
    return left


@pytest.mark.simulated
@pytest.mark.device
@pytest.mark.parametrize("precision", ["bf16-true", pytest.param("16-true", marks=pytest.mark.slow)])
def test_fits_are_those_of_cpu_ranks_and_resume_at_other_stages(
    device_pool2: DevicePool, precision: str, tmp_path: Path
) -> None:
    """Whose parameters are host memory; with clipping and a scheduler, to the bit."""
    accelerator, path = device_pool2.where.accelerator, str(tmp_path / "middle.ckpt")
    found = device_pool2.run(fit_each, accelerator, precision, path, STAGES)
    for fits in found:
        assert fits == fits[:1] * len(STAGES)
    for fits, (expected,) in zip(found, device_pool2.run(fit_each, "cpu", precision, path, STAGES[:1]), strict=True):
        assert fits[0] == expected
