"""The plan against what is measured: memory held, the peak of a step, bytes sent."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import cases, driver, memory
from engine.driver import Meshes, Setup
from helpers import models, place
from helpers.ranks import RankPool, ranks
from torch import Tensor, nn

from lightning_zero.engine import Engine
from lightning_zero.planning import Bytes, Plan, plan
from lightning_zero.planning.account import Account
from lightning_zero.planning.memory import held_by, planned_parts
from lightning_zero.planning.tracing import trace
from lightning_zero.sharding import BucketGradients, Mesh, MixedPrecisionPolicy
from lightning_zero.sharding.partition import MAX_IMBALANCE
from lightning_zero.sharding.prefetch import Prefetcher
from lightning_zero.sharding.reducer import Reducer
from lightning_zero.storage import DeviceStore, HostStore, TensorStore
from lightning_zero.update import CPUAdamW, Muon, make_updater

STAGES = (0, 1, 2, 3)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
PRECISIONS = {"fp32": driver.UNCHANGED, "bf16": BF16}
BUCKET_SIZE_MB = 0.5
WIDTH = 208
INPUT = 16
ACTIVATIONS = 32 << 10  # bytes, with one example; a hundredth of the smallest peak


class Deep(nn.Module):
    """Half a million parameters, and activations of a few KB."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(blocks)
        )
        self.head = nn.Linear(WIDTH, INPUT)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x) * self.scale
        return self.head(x)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    low = model.get_parameter("head.weight").dtype != torch.float32
    with torch.autocast(place.device().type, dtype=torch.bfloat16, enabled=low):
        return model(batch).float().square().mean()


def planned(
    model: nn.Module, setup: Setup, mesh: Mesh, optimizers: Sequence[torch.optim.Optimizer], **options: Any
) -> Plan:
    placement = driver.make_placement(setup, mesh)
    same = ("units", "bucket_size_mb", "persistence_numel", "max_live_numel", "prefetch_mb")
    options = {name: getattr(setup, name) for name in same} | options
    return plan(model, placement, optimizers, native_optimizer=setup.native, **options)


# ----------------------------------------------------------------------------------------------------------- memory


@dataclasses.dataclass(frozen=True)
class Memory:
    """One case, in bytes of one rank."""

    case: str
    planned: Plan
    device: int
    host: int
    peak: int  # of both together
    host_peak: int
    staged: int = 0  # of what is on the host


def measure(setup: Setup, optimizer: str, micro_batches: int, mesh: Mesh) -> Memory:
    batches = [torch.ones(1, INPUT)] * micro_batches
    make = models.optimizer_factory(optimizer)
    model = Deep()
    expected = planned(model, setup, mesh, [make(model)], micro_batches=micro_batches)
    del model
    gc.collect()  # earlier cases
    with memory.counted_mappings() as mappings:
        session = driver.start(Deep(), make, setup, mesh)
        with memory.peak(mappings) as peak:
            for _ in range(2):
                driver.run_step(session, batches, loss_of)
            session.optimizer.zero_grad()
        memory.await_release(1.009 * expected.held.total)
        return Memory(
            f"{cases.describe(setup)} {optimizer} x{micro_batches}",
            expected,
            memory.storage_bytes() - mappings.live,
            mappings.live,
            peak.nbytes,
            mappings.most,
            session.engine.placement.executor.staged_bytes,
        )


def measure_all(setup: Setup, optimizers: Sequence[tuple[str, int]]) -> list[Memory]:
    """Each with so many micro-batches, on every rank, and a mesh, which keeps what a collective still waits for."""
    with memory.only_new_objects():
        return [measure(setup, name, k, Meshes().of(setup)) for name, k in optimizers]


ELEMENT_WISE = (("adamw", 2), ("momentum", 1), ("sgd", 2))
WHOLE = (("muon_and_adamw", 2), ("adafactor", 1))


# Ranks, stage, precision, whether state rests on the host: a stage in either precision, and in either place.
FAST = [(2, 1, "bf16", False), (2, 2, "fp32", True), (2, 3, "bf16", True)]
SLOW = [
    *((2, 0, "fp32", False), (2, 0, "bf16", True), (2, 1, "fp32", True), (2, 2, "bf16", False), (2, 3, "fp32", False)),
    *((4, 2, "fp32", True), (4, 3, "bf16", True)),
]


@pytest.mark.parametrize(
    ("pool", "stage", "precision", "offload"),
    [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
    indirect=["pool"],
)
def test_memory_follows_the_plan(pool: RankPool, stage: int, precision: str, offload: bool) -> None:
    native: driver.NativeOptimizer = "auto" if offload else "off"
    setup = Setup(stage, offload, native=native, precision=PRECISIONS[precision], bucket_size_mb=BUCKET_SIZE_MB)
    wrong = []
    # What an optimizer makes of a whole parameter on the host is in no mapping: nothing tells it from the device's.
    whole = WHOLE if precision == "fp32" and not offload and pool.world_size == 2 else ()
    for result in itertools.chain(*pool.run(measure_all, setup, (*ELEMENT_WISE, *whole))):
        held, peak, staging = result.planned.held, result.planned.peak, result.planned.staging
        # Buffers are made where none can be used again. One may still be waited for that has been copied.
        unplanned = result.staged - staging.host
        assert unplanned <= 0.01 * staging.host
        held_on_host = held.host + unplanned
        figures = {
            # Scalar state and checksums are some bytes per parameter: nothing, beside 1% of the whole.
            "device": 1 + (result.device - held.device) / held.total,
            "host": 1 + (result.host - held_on_host) / held.total,
            "peak": (result.peak - ACTIVATIONS) / peak.total,
            "host peak": (result.host_peak - max(0, unplanned)) / peak.host if peak.host else 1.0,
        }
        print(result.case, {name: round(figure, 3) for name, figure in figures.items()})
        exact = all(abs(figures[name] - 1) < 0.01 for name in ("device", "host"))
        if not (exact and 0.8 <= figures["peak"] <= 1.0 and figures["host peak"] <= 1.0):
            wrong.append((result.case, figures))
    assert not wrong


def evaluate(setup: Setup, mesh: Mesh) -> tuple[Memory, Counter[str], Plan]:
    """Two passes without gradients of an engine that does not train, and what the second one sent."""
    placement = driver.make_placement(setup, mesh)._replace(trains=False)
    expected = plan(Deep(), placement, bucket_size_mb=setup.bucket_size_mb)
    gc.collect()
    with memory.counted_mappings() as mappings, torch.no_grad():
        model = Deep()
        engine = Engine(model, placement, bucket_size_mb=setup.bucket_size_mb, check_steps=0)
        memory.await_release(1.01 * expected.held.total)
        with memory.peak(mappings) as peak:
            for _ in range(2):
                mesh.shard.reset_counters()
                with engine.forward_context():
                    loss_of(model, torch.ones(1, INPUT))
        device = memory.storage_bytes() - mappings.live
        case = Memory(cases.describe(setup), expected, device, mappings.live, peak.nbytes, mappings.most)
    return case, Counter(mesh.shard.sent), expected


def evaluate_all(setups: Sequence[Setup]) -> list[tuple[Memory, Counter[str], Plan]]:
    meshes = Meshes()
    with memory.only_new_objects():
        return [evaluate(setup, meshes.of(setup)) for setup in setups]


def test_evaluation_follows_its_plan(pool2: RankPool) -> None:
    """Parameters in their computing dtype are held and gathered, and nothing else."""
    made = [(1, False), (2, True), (3, False), (3, True)]
    setups = [Setup(stage, offload, precision=BF16, bucket_size_mb=BUCKET_SIZE_MB) for stage, offload in made]
    for found, sent, expected in itertools.chain(*pool2.run(evaluate_all, setups)):
        held, peak = expected.held, expected.peak
        assert (found.device, found.host) == (pytest.approx(held.device, rel=0.01), held.host), found.case
        assert 0.8 * peak.total <= found.peak - ACTIVATIONS <= peak.total, found.case
        assert sent == expected.sent, found.case
        parts = ("masters", "optimizer_state", "sharded_gradient", "gradients", "reduce_buffer")
        assert not any(getattr(bucket, part).total for bucket in expected.buckets for part in parts)


@pytest.mark.parametrize("stage", STAGES)
def test_full_gradients_are_gone_once_their_bucket_is_reduced(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(stage, bucket_size_mb=BUCKET_SIZE_MB)
    session = driver.start(Deep(), models.optimizer_factory("adamw"), setup, Mesh.single())
    reduced: list[tuple[int, int]] = []  # gradients before, and those alive after
    reduce = BucketGradients.reduce

    def observed(held: BucketGradients, last: bool) -> None:
        gradients = [weakref.ref(p.grad.untyped_storage()) for p in held.bucket.parameters if p.grad is not None]
        reduce(held, last)
        reduced.append((len(gradients), sum(reference() is not None for reference in gradients)))

    monkeypatch.setattr(BucketGradients, "reduce", observed)
    driver.backward(session.engine, loss_of(session.model, torch.ones(1, INPUT)))
    assert len(reduced) == len(session.engine.buckets) > 2
    assert all(before and not after for before, after in reduced)


def test_a_split_master_and_16_bit_state_are_planned() -> None:
    pure = MixedPrecisionPolicy(param_dtype=torch.bfloat16, keep_norms=False)
    setup = Setup(2, offload=True, precision=pure, bucket_size_mb=BUCKET_SIZE_MB)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(4)))
    optimizer = CPUAdamW(model.parameters(), master_layout="split", state_dtype=torch.bfloat16)
    expected = planned(model, setup, Mesh.single(), [optimizer])
    with memory.counted_mappings() as mappings:
        session = driver.start(model, lambda _: optimizer, setup, Mesh.single())
        driver.run_step(session, [torch.ones(1, WIDTH, dtype=torch.bfloat16)], lambda m, x: m(x).square().mean())
        session.engine.await_updates()
        assert mappings.live == expected.held.host
    numel = sum(b.padded_numel for b in expected.buckets)
    assert expected.held.host - expected.staging.host == numel * (2 + 2 * 2 + 2)


def test_optimizers_that_share_a_bucket_keep_state_of_their_own() -> None:
    setup, model = Setup(2, bucket_size_mb=25.0), Deep()
    halves = [model.blocks, nn.ModuleList([model.embed, model.head])]
    optimizers = [torch.optim.AdamW(half.parameters()) for half in halves]
    expected = planned(model, setup, Mesh.single(), optimizers)
    engine = driver.make_engine(model, setup, Mesh.single(), optimizers=optimizers)
    engine.attach([make_updater(optimizer, engine) for optimizer in optimizers])
    driver.backward(engine, loss_of(model, torch.ones(1, INPUT)))
    for optimizer in optimizers:
        optimizer.step()
    (bucket,) = engine.buckets
    held = sum(updater.state_of(bucket).nbytes for updater in engine.updaters)
    assert held == expected.buckets[0].optimizer_state.device


def test_a_module_on_the_meta_device_has_the_same_plan() -> None:
    with torch.device("meta"):
        empty = Deep()
    setup, mesh = Setup(3, offload=True, precision=BF16), Mesh.imagined(4, 2)
    plans = [planned(m, setup, mesh, [torch.optim.AdamW(m.parameters())]) for m in (empty, Deep())]
    assert plans[0] == plans[1]
    assert plans[0].sent["all_gather"] > plans[0].sent["reduce_scatter"] > plans[0].sent["all_reduce"] > 0
    assert str(plans[0]).splitlines()[-1].startswith("sent in a step")


def test_a_device_that_is_not_there() -> None:
    """A GPU collects gradients in a buffer, a CPU reduces them from where they lie; what is held is the same."""
    meta = torch.device("meta")
    placement = driver.make_placement(Setup(2), Mesh.imagined(4))
    absent = placement._replace(device=meta, optimizer_store=DeviceStore(meta), param_store=DeviceStore(meta))
    model = Deep()
    optimizers = [torch.optim.AdamW(model.parameters())]
    here, there = (plan(model, where, optimizers) for where in (placement, absent))
    assert here.held == there.held
    assert here.held.device < here.peak.device < there.peak.device
    assert here.buckets[0].reduce_buffer.device < there.buckets[0].reduce_buffer.device


def test_sizes_of_a_model_that_fits_no_machine() -> None:
    """7 billion parameters on 64 ranks: 16 bytes each without sharding (https://arxiv.org/abs/1910.02054)."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(14900, 14900)) for _ in range(32)))
    setup, mesh = Setup(3, precision=BF16, bucket_size_mb=25.0), Mesh.imagined(64)
    numel = sum(p.numel() for p in model.parameters())
    held = planned(model, setup, mesh, [torch.optim.AdamW(model.parameters())]).held
    assert held.device == pytest.approx(numel * (2 + 4 + 8 + 2) / 64, rel=1e-4)


def test_what_cannot_be_planned() -> None:
    model = Deep(1)
    placement = driver.make_placement(Setup(), Mesh.single())
    with pytest.raises(ValueError, match="micro_batches=0 must be at least 1"):
        plan(model, placement, micro_batches=0)
    with pytest.raises(ValueError, match=r"bucket_size_mb=0\.0 must be greater than 0"):
        plan(model, placement, bucket_size_mb=0.0)


# ----------------------------------------------------------------------------------------------- the runtime's order


def wide_blocks() -> nn.Module:
    """Blocks of one size, each a bucket, and a small root."""
    return Deep(8)


def test_the_plan_reduces_in_the_order_of_the_reducer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched in forward order, all buckets would wait for the first one, which is complete at the end of backward."""
    model, setup = wide_blocks(), Setup(2, bucket_size_mb=0.1, overlap=False)
    options = (model, setup, Mesh.imagined(2), [torch.optim.SGD(model.parameters())])
    expected, begin = planned(*options), Reducer.begin

    def begin_in_forward_order(reducer: Reducer, eager: bool) -> None:
        begin(reducer, eager)
        reducer._pending.reverse()

    monkeypatch.setattr(Reducer, "begin", begin_in_forward_order)
    other = planned(*options)
    # The largest bucket, the root's, is complete last. In its reduction all other gradients are there now; none was.
    root, *others = expected.buckets
    assert root.reduce_buffer.device > max(row.reduce_buffer.device for row in others)
    assert other.peak.device - expected.peak.device == sum(row.gradients.device for row in others) > 0
    assert (other.sent, other.calls, other.held) == (expected.sent, expected.calls, expected.held)


def test_the_plan_gathers_what_the_prefetcher_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model, setup = wide_blocks(), Setup(3, overlap=False)
    options = (model, setup, Mesh.imagined(2), [torch.optim.SGD(model.parameters())])
    expected = planned(*options)
    unit = expected.buckets[-1].parameters.device
    for ahead in (1, 2):
        other = planned(*options, prefetch_mb=(ahead + 0.5) * unit / 2**20)
        assert other.peak.device - expected.peak.device == (ahead - 1) * unit
        assert (other.sent, other.calls) == (expected.sent, expected.calls)
    monkeypatch.setattr(Prefetcher, "_begin_next", lambda _: None)
    other = planned(*options)
    assert expected.peak.device - other.peak.device == expected.buckets[-1].parameters.device
    assert planned(*options, max_live_numel=0).peak == other.peak


def test_a_plan_leaves_the_groups_of_an_engine_alone() -> None:
    model, mesh = Deep(1), Mesh.imagined(2)
    assert planned(model, Setup(3), mesh, [torch.optim.SGD(model.parameters())]).sent
    assert not mesh.world.sent
    assert not mesh.shard.calls


def test_what_is_recorded_is_held_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps on paper leave what the plan says is held."""
    seen: list[Bytes] = []
    give = Account.give

    def noted(account: Account, amount: Bytes) -> None:
        give(account, amount)
        seen.append(account.now)

    monkeypatch.setattr(Account, "give", noted)
    for stage, precision, k in itertools.product(STAGES, PRECISIONS.values(), (1, 2)):
        model, setup = Deep(1), Setup(stage, offload=True, precision=precision)
        mesh = Mesh.imagined(1 if stage == 0 else 2, 2)
        result = planned(model, setup, mesh, [torch.optim.AdamW(model.parameters())], micro_batches=k)
        assert seen[-1] == result.held


# ---------------------------------------------------------------------------------------------------------- traffic


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One case on one rank: what was sent in a step after the first, and what should be."""

    case: str
    planned: Plan
    sent: Counter[str]
    calls: Counter[str]


def traffic(setup: Setup, micro_batches: int, model: str, mesh: Mesh) -> Traffic:
    module = cases.make_model(model)
    # Frozen parameters an optimizer may have or not: nothing is sent for them.
    trained = [p for p in module.parameters() if p.requires_grad or micro_batches > 1]
    loss_fn = models.next_token_loss if setup.precision.param_dtype is None else cases.autocast_loss
    batch = models.make_batches(1, 1, dist.get_world_size())[0][0][dist.get_rank()]
    recomputes = model == "reentrant"  # only a trace knows that
    traced = trace(module, lambda twin: loss_fn(twin, torch.zeros_like(batch))) if recomputes else None
    optimizers = [torch.optim.AdamW(trained)]
    expected = planned(module, setup, mesh, optimizers, micro_batches=micro_batches, trace=traced)
    session = driver.start(module, lambda _: torch.optim.AdamW(trained), setup, mesh)
    driver.run_step(session, [batch] * micro_batches, loss_fn)
    groups = list({id(group): group for group in (mesh.world, mesh.shard, mesh.replica)}.values())
    for group in groups:
        group.reset_counters()
    driver.run_step(session, [batch] * micro_batches, loss_fn)
    name = f"{cases.describe(setup)} {model} x{micro_batches}"
    sent, calls = (sum((getattr(g, what) for g in groups), Counter()) for what in ("sent", "calls"))
    return Traffic(name, expected, sent, calls)


def all_traffic(settings: Sequence[tuple[Setup, int, str]]) -> list[Traffic]:
    meshes = Meshes()
    return [traffic(setup, k, model, meshes.of(setup)) for setup, k, model in settings]


def check_traffic(pool: RankPool, settings: Sequence[tuple[Setup, int, str]]) -> list[Traffic]:
    """The cases of rank 0."""
    results = pool.run(all_traffic, settings)
    wrong = [
        (r.case, r.planned.sent, r.sent, r.planned.calls, r.calls)
        for r in itertools.chain(*results)
        if (r.planned.sent, r.planned.calls) != (r.sent, r.calls)
    ]
    assert not wrong
    return results[0]


def summed(numbers: int, ranks: int) -> int:
    """How many an all-reduce sums up: in host memory each rank has an equal part of them."""
    return -(-numbers // ranks) * ranks if place.device().type == "cpu" else numbers


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_sends_what_the_table_says(pool: RankPool, stage: int) -> None:
    counts = (1, 2, 3)
    for k, result in zip(counts, check_traffic(pool, [(Setup(stage), k, "transformer") for k in counts]), strict=True):
        size, buckets = pool.world_size, result.planned.buckets
        whole = 4 * sum(b.padded_numel for b in buckets)
        root = 4 * sum(b.padded_numel for b in buckets if "(root)" in b.name)
        # 2, (k + 1) and 3k times the model; the root stays whole from forward to backward.
        table = {0: 2 * whole, 1: 2 * whole, 2: (k + 1) * whole, 3: 3 * k * whole - k * root}[stage]
        # Two digests a rank, a norm, a flag for buffers and for each parameter and bucket.
        numbers = 2 * size + 2 + len(list(cases.make_model("transformer").parameters())) + len(buckets)
        small = 2 * 8 * summed(numbers, size)
        assert sum(result.sent.values()) == (table + small) * (size - 1) // size


@pytest.mark.slow
@ranks(4)
def test_replicas_are_summed_once_a_step(pool: RankPool) -> None:
    settings = [
        (Setup(stage, shard_size=2, precision=PRECISIONS[precision]), k, "transformer")
        for stage, precision, k in itertools.product((1, 2, 3), PRECISIONS, (1, 3))
    ]
    for (setup, k, _), result in zip(settings, check_traffic(pool, settings), strict=True):
        if setup.precision is driver.UNCHANGED:
            shard = 4 * sum(b.padded_numel for b in result.planned.buckets) // 2
            numbers = 8 + 2 + len(list(cases.make_model("transformer").parameters())) + len(result.planned.buckets)
            assert result.sent["all_reduce"] == 2 * shard // 2 + 2 * 8 * summed(numbers, 4) * 3 // 4, k


@ranks(2)
def test_16_bit_gradients_are_sent_in_16_bits(pool: RankPool) -> None:
    """But those that were added up whole, in fp32."""
    counts = (1, 2)
    settings = [(Setup(stage, precision=BF16), k, "transformer") for stage in STAGES for k in counts]
    for (setup, k, _), result in zip(settings, check_traffic(pool, settings), strict=True):
        summed = k > 1 and setup.stage in (0, 1)
        sizes = [b.padded_numel * (4 if summed else b.dtype.itemsize) for b in result.planned.buckets]
        name = "all_reduce" if setup.stage == 0 else "reduce_scatter"
        times = k if setup.stage >= 2 else 1
        small = 2 * 8 * 64
        assert 0 <= result.sent[name] - times * sum(sizes) // (1 if setup.stage == 0 else 2) <= small


@ranks(2)
@pytest.mark.parametrize("model", ["frozen", "checkpointed", "reentrant"])
def test_frozen_parts_and_recomputation(pool: RankPool, model: str) -> None:
    """What is not trained is gathered at stage 3 only, whether an optimizer has it or not.

    Only reentrant checkpointing gathers once more.
    """
    stages = STAGES if model != "looped" else (0,)
    check_traffic(pool, [(Setup(stage), k, model) for stage in stages for k in (1, 2)])


# ---------------------------------------------------------------------------------------------------- whole parameters


MORE_WHOLE = ("muon_and_adamw", "lamb")  # the first has parameters of both layouts


def held_and_sent(stage: int, optimizer: str) -> list[tuple[str, Any, Any]]:
    """What is planned and what is: state, masters and shards, and bytes by collective."""
    setup = Setup(stage, offload=stage == 2, native="auto", bucket_size_mb=BUCKET_SIZE_MB)
    mesh, make = Meshes().of(setup), models.optimizer_factory(optimizer)
    model = Deep()
    expected = planned(model, setup, mesh, [make(model)])
    session = driver.start(model, make, setup, mesh)
    for _ in range(3):
        mesh.shard.reset_counters()
        driver.run_step(session, [torch.ones(1, INPUT)], loss_of)
    sent = {name: mesh.shard.sent[name] for name in ("reduce_scatter", "all_gather")}
    held, parts = held_by(session.engine), planned_parts(expected)
    found = [(name, parts[name], held[name]) for name in ("param_shards", "masters", "optimizer_state")]
    return [
        *found,
        ("sent", {name: expected.sent[name] for name in sent}, sent),
        ("imbalance", [b.imbalance for b in expected.buckets], [b.layout.imbalance for b in session.engine.buckets]),
    ]


@ranks(2)
@pytest.mark.parametrize(
    ("stage", "optimizer"),
    [
        *((2, "muon_and_adamw"), (3, "adafactor")),  # offloaded, the first has AdamW by the kernel
        *(pytest.param(3, name, marks=pytest.mark.slow) for name in MORE_WHOLE),
        pytest.param(2, "adafactor", marks=pytest.mark.slow),
    ],
)
def test_state_and_traffic_of_whole_parameters_follow_the_plan(pool: RankPool, stage: int, optimizer: str) -> None:
    for rank in pool.run(held_and_sent, stage, optimizer):
        for name, expected, found in rank:
            assert expected == found, name


def test_a_plan_says_how_unevenly_whole_parameters_lie() -> None:
    model, setup = Deep(1), Setup(3, bucket_size_mb=BUCKET_SIZE_MB)
    plans = [
        planned(model, setup, Mesh.imagined(8), [make(model.parameters())])
        for make in (torch.optim.Adafactor, torch.optim.AdamW)
    ]
    assert plans[0].imbalance > MAX_IMBALANCE > plans[1].imbalance == 0
    assert "hold" in str(plans[0])
    assert "hold" not in str(plans[1])


@pytest.mark.parametrize("stage", [2, 3])
def test_an_embedding_that_muon_leaves_to_adamw_is_cut_and_unbalances_nothing(stage: int) -> None:
    with torch.device("meta"):
        blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(8)))
        model = nn.ModuleDict({"tokens": nn.Embedding(50_000, 64), "blocks": blocks})
    setup, mesh = Setup(stage, bucket_size_mb=BUCKET_SIZE_MB), Mesh.imagined(4)
    by_use, by_shape = (
        planned(model, setup, mesh, [Muon(given)]) for given in (Muon.groups_of(model), model.parameters())
    )
    assert by_use.imbalance < MAX_IMBALANCE < by_shape.imbalance
    assert 4 * sum(row.optimizer_state.device for row in by_use.buckets) < 1.1 * 8 * 50_000 * 64


@pytest.mark.parametrize("wanted", [False, True])
def test_slices_are_collected_where_that_spares_copies(wanted: bool) -> None:
    """Between a device and where gradients rest; not where they rest on it, and not on CPU ranks."""

    def collects(device: str, store: TensorStore) -> bool:
        placement = driver.make_placement(driver.Setup(2), Mesh.single())
        changes = {"device": torch.device(device), "optimizer_store": store, "accumulate_on_device": wanted}
        return placement._replace(**changes).collects_slices

    assert collects("meta", HostStore()) is wanted
    assert not collects("meta", DeviceStore(torch.device("meta")))
    assert not collects("cpu", HostStore())
