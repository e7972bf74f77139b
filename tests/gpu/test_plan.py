"""The plan on a GPU: its peak, and no wait of the host per bucket."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engine import driver
from engine.driver import Session
from helpers.ranks import RankPool, ranks
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.planning import plan
from lightning_zero.sharding import BucketPlacement, Mesh, MixedPrecisionPolicy, ShardingPolicy
from lightning_zero.storage import DeviceStore, HostStore
from lightning_zero.update import make_updater

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
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


def make_placement(stage: int, offload: bool, precision: MixedPrecisionPolicy) -> BucketPlacement:
    store = HostStore(pin_for=CUDA) if offload else DeviceStore(CUDA)
    policy = ShardingPolicy.from_stage(stage)
    return BucketPlacement(Mesh.single(), policy, precision, CUDA, store, store if stage == 3 else DeviceStore(CUDA))


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
    return torch.ones(1, WIDTH, device=CUDA, dtype=placement.precision.param_dtype or torch.float32)


def measure(stage: int, offload: bool, precision: str) -> dict[str, Any]:
    """Bytes on the device at rest and at the worst moment of two steps, without what was there before."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.ones(1, WIDTH, device=CUDA) @ torch.ones(WIDTH, 1, device=CUDA)  # workspaces of cuBLAS
    placement = make_placement(stage, offload, PRECISIONS[precision])
    with torch.device("meta"):
        outline = Deep()
    optimizers = [torch.optim.AdamW(outline.parameters())]
    planned = plan(outline, placement, optimizers, bucket_size_mb=BUCKET_SIZE_MB, micro_batches=2)
    before = torch.cuda.memory_allocated()
    session = start(placement)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        driver.run_step(session, [batch_of(placement)] * 2, loss_of)
    session.optimizer.zero_grad()
    return {
        "held": torch.cuda.memory_allocated() - before,
        "peak": torch.cuda.max_memory_allocated() - before,
        "planned held": planned.held.device,
        "planned peak": planned.peak.device,
    }


@ranks(1)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_device_memory_follows_the_plan(pool: RankPool, stage: int, offload: bool, precision: str) -> None:
    (figures,) = pool.run(measure, stage, offload, precision)
    print(figures)
    slack = 1 << 20  # activations
    assert figures["held"] <= figures["planned held"] * (1 + ROUNDING) + slack
    assert figures["held"] >= figures["planned held"] * 0.99
    assert 0.75 * figures["planned peak"] <= figures["peak"] <= figures["planned peak"] * (1 + ROUNDING) + slack


@contextmanager
def no_waiting() -> Iterator[None]:
    """The host must not wait for the device inside."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def backward_without_waiting(stage: int) -> None:
    session = start(make_placement(stage, False, driver.UNCHANGED))
    engine, batch = session.engine, batch_of(session.engine.placement)
    driver.run_step(session, [batch, batch], loss_of)
    engine.settle()
    session.optimizer.zero_grad()
    torch.cuda.synchronize()
    with no_waiting():
        loss = loss_of(session.model, batch)
        driver.backward(engine, loss, last=False)
        loss = loss_of(session.model, batch)
        driver.backward(engine, loss, last=True)
    # The result of the step's one small all-reduce is read on the host: this does wait.
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():
        engine.stats(session.optimizer)
    session.optimizer.step()


@ranks(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_forward_and_backward_never_wait_for_the_device(pool: RankPool, stage: int) -> None:
    pool.run(backward_without_waiting, stage)
