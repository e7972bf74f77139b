"""A shadow: what it holds, what it sends (nothing), and that a swap and another one change no bit."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from engine import driver, memory
from engine.cases import make_model
from engine.driver import Meshes, Session, Setup, assert_equal
from helpers import models
from helpers.ranks import RankPool, ranks, slow_unless
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_zero import CPUAdamW
from lightning_zero.checkpoint import load_shadow_state_dict, module_state_dict
from lightning_zero.engine import Engine
from lightning_zero.engine.shadow import Shadow
from lightning_zero.sharding import Mesh, MixedPrecisionPolicy
from lightning_zero.storage import DeviceStore
from lightning_zero.update.native import MasterLayout

Weights = dict[str, Tensor]


def average(second: Tensor, live: Tensor) -> Tensor:
    return 0.75 * second + 0.25 * live


def weights_of(engine: Engine) -> Weights:
    """Whole masters by name, frozen ones too, and buffers."""
    named = dict(engine.module.named_parameters())
    return {name: engine.full_param(p) for name, p in named.items()} | {
        name: b.clone() for name, b in engine.module.named_buffers()
    }


def seen_by(engine: Engine) -> Weights:
    with engine.gathered(engine.module.parameters()):
        return {name: value.clone() for name, value in engine.module.state_dict().items()}


def second_of(engine: Engine, shadow: Shadow) -> Weights:
    """The second values, seen in the place of the weights for a moment."""
    shadow.swap()
    engine.settle()
    values = weights_of(engine)
    shadow.swap()
    engine.settle()
    return values


def train(session: Session, mesh: Mesh, step: int) -> None:
    micro = [batch[mesh.world.rank] for batch in models.make_batches(step + 1, 1, mesh.world.size)[step]]
    driver.run_step(session, micro)
    session.model.count += 1


class Followed(NamedTuple):
    average: Weights
    expected: Weights
    calls: Counter[str]  # collectives of updates and swaps
    held: int  # bytes
    shards: int  # bytes


def follow(setup: Setup) -> Followed:
    """Averages three steps of a model with frozen and tied parameters and a buffer."""
    mesh = Meshes().of(setup)
    model = make_model("frozen", seed=0)
    model.register_buffer("count", torch.tensor([1.0, 2.0]))
    session = driver.start(model, models.optimizer_factory("momentum"), setup, mesh)
    engine = session.engine
    with memory.only_new_objects():
        shadow = engine.make_shadow()
        assert shadow.shards  # the copies have been made
        held = memory.storage_bytes()
    expected, calls = weights_of(engine), Counter[str]()
    groups = list({id(group): group for group in (mesh.world, mesh.shard, mesh.replica)}.values())
    for step in range(3):
        train(session, mesh, step)
        engine.settle()
        for group in groups:
            group.reset_counters()
        shadow.update(average)
        shadow.swap()
        shadow.swap()
        calls += sum((group.calls for group in groups), Counter())
        engine.settle()
        expected = {name: average(expected[name], value) for name, value in weights_of(engine).items()}
    with torch.inference_mode():  # as in a validation of Lightning's
        model.count = model.count.clone()
    before, seen = weights_of(engine), seen_by(engine)
    actual = second_of(engine, shadow)
    assert not any(torch.equal(actual[name], before[name]) for name in ("tokens.weight", "count"))
    assert_equal(weights_of(engine), before)
    assert_equal(seen_by(engine), seen)
    shards = sum(bucket.layout.shard_numel * bucket.master.dtype.itemsize for bucket in engine.buckets)
    return Followed(actual, expected, calls, held, shards + model.count.nbytes)


SETUPS = {
    "0": Setup(0),
    "1": Setup(1),
    "2-offload": Setup(2, offload=True),
    "3": Setup(3),
    "3-offload": Setup(3, offload=True),
    "3-persistent": Setup(3, persistence_numel=10),
}


def check(results: list[Followed]) -> None:
    for result in results:
        assert_equal(result.average, result.expected)
        assert_equal(result.average, results[0].average)
        assert not result.calls
        assert result.held == result.shards


@ranks(2, slow=[4])
@pytest.mark.parametrize("name", slow_unless(["2-offload", "3"], SETUPS))
def test_an_average_of_shards(pool: RankPool, name: str) -> None:
    check(pool.run(follow, SETUPS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_an_average_of_shards_of_replicas(pool4: RankPool, stage: int) -> None:
    check(pool4.run(follow, Setup(stage, shard_size=2)))


def bits(*tensors: Tensor) -> list[bytes]:
    return [tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes() for tensor in tensors]


PURE = {dtype: MixedPrecisionPolicy(param_dtype=dtype, keep_norms=False) for dtype in (torch.bfloat16, torch.float16)}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        (driver.UNCHANGED, None),
        (PURE[torch.bfloat16], "fp32"),
        (PURE[torch.bfloat16], "split"),
        (PURE[torch.float16], "split"),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16, keep_norms=False, master_weights=False), None),
    ],
    ids=["fp32", "bf16", "bf16-split", "fp16-split", "bf16-alone"],
)
def test_two_swaps_change_no_bit(stage: int, precision: MixedPrecisionPolicy, layout: MasterLayout | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 5))
    if layout is None:
        optimizer: Optimizer = SGD(model.parameters())
    else:
        optimizer = CPUAdamW(model.parameters(), master_layout=layout)
    setup = Setup(stage, offload=True, native="auto", precision=precision)
    engine = driver.start(model, lambda _: optimizer, setup, Mesh.single()).engine
    shadow = engine.make_shadow()

    def masters() -> list[Tensor]:
        return [bucket.master.read(0, bucket.layout.shard_numel).clone() for bucket in engine.buckets]

    before, shards = bits(*masters()), bits(*(bucket.shard.read(0, bucket.shard.numel) for bucket in engine.buckets))
    shadow.update(lambda second, live: live * (1 + 1e-2 * torch.rand_like(live)))  # within fp16's normal numbers
    values = bits(*shadow.shards)
    shadow.swap()
    assert shadow.swapped
    assert bits(*shadow.shards) == before
    assert bits(*masters()) == values != before
    assert bits(*(bucket.shard.read(0, bucket.shard.numel) for bucket in engine.buckets)) != shards
    shadow.swap()
    assert not shadow.swapped
    assert bits(*shadow.shards) == values
    assert bits(*masters()) == before
    assert bits(*(bucket.shard.read(0, bucket.shard.numel) for bucket in engine.buckets)) == shards


def test_frozen_16_bit_weights_have_an_fp32_average() -> None:
    """They have no master yet; what an optimizer takes later has one, and an average beside it."""
    model = make_model("mlp").to(torch.bfloat16)
    frozen = model.layers[0].weight.requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = driver.make_engine(model, Setup(2, precision=PURE[torch.bfloat16]), Mesh.single(), optimizers=[optimizer])
    bucket = engine.bucket_of(frozen)
    assert bucket is not None
    assert bucket.master.dtype == torch.bfloat16
    shadow = engine.make_shadow()
    for _ in range(100):
        shadow.update(lambda second, live: 0.9 * second + 0.1 * live)
    shard = shadow.shards[engine.buckets.index(bucket)]
    assert shard.dtype == torch.float32
    torch.testing.assert_close(shard, bucket.shard.read(0, bucket.shard.numel).float(), rtol=1e-5, atol=0.0)


def alone(setup: Setup) -> Session:
    return driver.start(make_model("mlp"), models.optimizer_factory("sgd"), setup, Mesh.single())


def test_it_rests_where_it_is_told() -> None:
    store = DeviceStore(torch.device("meta"))
    shadow = alone(Setup(2)).engine.make_shadow(store)
    assert {shard.device for shard in shadow.shards} == {store.device}


@pytest.mark.parametrize("stage", [2, 3])
def test_edits_of_user_code_are_averaged(stage: int) -> None:
    """Those that no forward has seen yet."""
    session = alone(Setup(stage, precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
    shadow = session.engine.make_shadow()
    parameter = session.model.layers[0].weight
    with session.engine.gathered([parameter]), torch.no_grad():
        parameter.fill_(2.0)
    shadow.update(average)
    with session.engine.gathered([parameter]), torch.no_grad():
        parameter.fill_(-2.0)
        shadow.swap()  # inside: what is whole is out of date until the engine settles
        session.engine.settle()
        assert parameter.float().mean().item() == pytest.approx(0.5, abs=0.1)
    shadow.swap()
    session.engine.settle()
    assert (session.engine.full_param(parameter) == -2.0).all()


def test_a_released_engine_frees_it() -> None:
    session = alone(Setup(2))
    shadow = session.engine.make_shadow()
    session.engine.release()
    assert not shadow.shards
    assert not shadow.buffers


def test_an_average_loads_strictly_unless_it_need_not() -> None:
    model = nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 5))
    engine = driver.start(model, lambda module: SGD(module.parameters()), Setup(3), Mesh.single()).engine
    shadow = engine.make_shadow()
    saved = {name: value + 1 for name, value in module_state_dict(engine, shadow).items() if name != "1.bias"}
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "1\.bias"'):
        load_shadow_state_dict(engine, shadow, saved)
    load_shadow_state_dict(engine, shadow, saved, strict=False)
    loaded = module_state_dict(engine, shadow)
    assert_equal({name: loaded[name] for name in saved}, saved)
