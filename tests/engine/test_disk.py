"""State that rests on a disk: the bits of state that rests in host memory, and no more reads and writes than needed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from engine import driver
from engine.driver import Setup, assert_equal
from helpers.ranks import RankPool
from helpers.slow_disk import SlowDisk, counting_copies
from helpers.whole import Ruled
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_zero import CPUSGD, CPUAdamW, DynamicLossScaler, Muon, ops
from lightning_zero.checkpoint.state import (
    load_module_state_dict,
    load_optimizer_state_dict,
    module_state_dict,
    optimizer_state_dict,
)
from lightning_zero.engine import shadow
from lightning_zero.planning import Plan, plan
from lightning_zero.planning.estimate import disk_bytes
from lightning_zero.planning.memory import held_by, planned_parts
from lightning_zero.sharding import BucketPlacement, Mesh, MixedPrecisionPolicy, ShardedGradient, ShardingPolicy
from lightning_zero.storage import DeviceStore, DiskError, DiskStore, Executor
from lightning_zero.storage.disk_file import DiskFile, aligned
from lightning_zero.storage.disk_speed import RINGS, THREADS
from lightning_zero.storage.nvme import DiskTensor
from lightning_zero.storage.rested import nbytes_of
from lightning_zero.storage.run_folder import RunFolder
from lightning_zero.update import updaters, whole
from lightning_zero.update.shell import run_step
from lightning_zero.update.updaters import NativeOptimizer

WIDTH, INPUT, STEPS = 96, 16, 4
PURE_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, keep_norms=False)
PURE_FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, keep_norms=False)
BF16_GRADIENTS = MixedPrecisionPolicy(grad_dtype=torch.bfloat16)
# Several buckets at stages 1 and 2, each of several tiles also on two ranks.
SETUP = Setup(2, offload=True, native="auto", bucket_size_mb=0.08)


STAGE3 = dataclasses.replace(SETUP, stage=3, units=("blocks.*",), disk_params=True)


class Blocks(nn.Module):
    """Parameters longer and shorter than a tile; one block is left out of some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, INPUT)

    def forward(self, x: Tensor, last: bool) -> Tensor:
        x = self.embed(x)
        for block in [*self.blocks][: 3 if last else 2]:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Of a batch whose first element is negative the last block computes nothing; above 1, the loss is infinite."""
    dtype = model.get_parameter("head.weight").dtype
    factor = torch.inf if batch[0, 0] > 1 else 1.0
    return model(batch.to(dtype), last=bool(batch[0, 0] >= 0)).float().square().mean() * factor


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Runs that end inside of tiles."""
    named = dict(model.named_parameters())
    return [
        {"params": [p for name, p in named.items() if "bias" not in name]},
        {"params": [p for name, p in named.items() if "bias" in name], "lr": 0.02},
    ]


class Exchanges(Ruled):
    """The last two gradients change places; a scale is of the whole parameter."""

    def rule(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state |= {"last": torch.zeros_like(parameter), "older": torch.zeros_like(parameter)}
        state["last"], state["older"] = gradient.clone(), state["last"]
        if "turn" in state:
            state["turn"], state["other"] = state["other"], state["turn"]
            state["turn"].add_(gradient)
        else:
            state |= {"turn": gradient.clone(), "other": gradient * 2}
        update = state["last"] + state["older"] / 2 + state["turn"] / 4
        parameter.add_(update, alpha=-group["lr"] * float(parameter.norm()))


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(two_groups(m), lr=0.01, amsgrad=True),
    "sgd": lambda m: torch.optim.SGD(two_groups(m), lr=0.1, momentum=0.9),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01, initial_accumulator_value=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(two_groups(m), lr=0.01),
    "fused": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, fused=True),
    "split": lambda m: CPUAdamW(two_groups(m), lr=0.01, master_layout="split", state_dtype=torch.bfloat16),
    "split_fp32": lambda m: CPUAdamW(two_groups(m), lr=0.01, master_layout="split"),
    "bf16_state": lambda m: CPUAdamW(two_groups(m), lr=0.01, state_dtype=torch.bfloat16),
    "blocks": lambda m: CPUAdamW(two_groups(m), lr=0.01, master_layout="split", state_dtype=torch.int8),
    "muon": lambda m: Muon(Muon.groups_of(m), lr=0.02),
    "muon_on_host": lambda m: Muon(Muon.groups_of(m), lr=0.02, on_device=False),
    "exchanges": lambda m: Exchanges(m.parameters()),
    "copy": lambda m: CPUSGD(m.parameters(), lr=0.1, momentum=0.9, state_dtype=torch.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class Case:
    setup: Setup
    optimizer: str = "adamw"
    micro: int = 1
    clip: float | None = None
    overflow: bool = False  # in one of the steps

    def on_disk(self, folder: str, **changes: Any) -> Case:
        return dataclasses.replace(self, setup=dataclasses.replace(self.setup, disk=folder, **changes))


CASES = (
    Case(dataclasses.replace(SETUP, stage=1), micro=2, clip=0.1),
    Case(SETUP, "sgd", micro=2),
    Case(dataclasses.replace(SETUP, precision=PURE_BF16), "split", clip=0.1),
    Case(dataclasses.replace(SETUP, precision=PURE_FP16), "split", overflow=True),
    Case(dataclasses.replace(SETUP, stage=1, precision=PURE_BF16), "copy"),
    Case(dataclasses.replace(SETUP, stage=3, units=("blocks.*",)), "adagrad", clip=0.1),
    Case(dataclasses.replace(SETUP, stage=3, units=("blocks.*",), precision=PURE_FP16), overflow=True),
    Case(dataclasses.replace(SETUP, stage=3, offload_params=False, units=("blocks.*",)), "rmsprop", micro=2),
    Case(dataclasses.replace(SETUP, native="off"), "rmsprop"),
    Case(dataclasses.replace(SETUP, native="off", precision=PURE_BF16), "sgd"),
    Case(SETUP, "fused"),
    Case(STAGE3, "adamw", micro=2, clip=0.1),
    Case(dataclasses.replace(STAGE3, precision=PURE_BF16), "split", overflow=True),
    Case(dataclasses.replace(STAGE3, precision=PURE_BF16), "copy"),
    Case(dataclasses.replace(STAGE3, native="off", precision=PURE_FP16), "adamw", overflow=True),
    Case(dataclasses.replace(STAGE3, persistence_numel=200), "sgd"),
    Case(dataclasses.replace(SETUP, precision=PURE_BF16), "blocks", micro=2),
    Case(STAGE3, "muon", micro=2, clip=0.1),
    Case(dataclasses.replace(STAGE3, precision=PURE_BF16), "muon", clip=0.1),
    Case(SETUP, "exchanges", micro=2),
    Case(dataclasses.replace(SETUP, precision=BF16_GRADIENTS), "sgd", clip=0.1),
    Case(dataclasses.replace(STAGE3, precision=PURE_BF16), "split_fp32", micro=2, clip=0.1),
    Case(SETUP, "bf16_state"),
    Case(dataclasses.replace(STAGE3, precision=PURE_BF16), "blocks", clip=0.1),
)
# Inline or overlapped, by threads or rings, with O_DIRECT or not. Gradients rest on the disk, too, but for one way, in
# which they stay in host memory.
WAYS = (
    {"overlap": True, "way": RINGS[0], "disk_gradients": True},
    {"overlap": False, "direct": False, "way": THREADS[0], "disk_gradients": True},
    {"overlap": False, "way": RINGS[0], "disk_gradients": True},
    {"overlap": True, "way": THREADS[0], "disk_gradients": True},
    {"overlap": True, "direct": False, "way": RINGS[0]},
)


def start(case: Case, mesh: Mesh, seed: int = 0) -> driver.Session:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = Blocks()
    scaler = DynamicLossScaler(2.0**8, hysteresis=1) if case.overflow else None
    return driver.start(model, OPTIMIZERS[case.optimizer], case.setup, mesh, scaler=scaler)


def run_steps(session: driver.Session, case: Case, steps: Sequence[int]) -> None:
    generator = torch.Generator()
    for step in steps:
        generator.manual_seed(step * 8 + session.engine.placement.mesh.world.rank)
        batches = [torch.randn(4, INPUT, generator=generator) for _ in range(case.micro)]
        for batch in batches:
            batch[0, 0] = -1.0 if step == 1 else 1.0
        if case.overflow and step == 2:
            batches[0][0, 0] = 2.0
        driver.run_step(session, batches, loss_of, clip_norm=case.clip)


def await_writes(session: driver.Session) -> None:
    """Until a step has written what it has changed."""
    session.engine.await_updates()
    store = session.engine.placement.optimizer_store
    assert isinstance(store, DiskStore)
    store.settle()


def train(case: Case, mesh: Mesh) -> driver.RankResult:
    session = start(case, mesh)
    run_steps(session, case, range(STEPS))
    if case.overflow:
        assert session.engine.skipped_steps >= 1
    return driver.finish(session)


def tensors_of(result: driver.RankResult) -> dict[str, Tensor]:
    """All optimizer state with several elements; that of whole parameters is among what others have as scalars."""
    state = [(piece.name, {**piece.elements, **piece.scalars}) for piece in result.pieces]
    return {f"{name} {k}": v for name, own in state for k, v in own.items() if isinstance(v, Tensor) and v.numel() > 1}


def compare(cases: Sequence[Case], folder: str, each: int) -> list[str]:
    """Lines for cases whose bits the disk changes, in ``each`` of :data:`WAYS`, which take turns."""
    meshes, wrong, ways = driver.Meshes(), [], itertools.cycle(WAYS)
    for case in cases:
        mesh = meshes.of(case.setup)
        expected = train(case, mesh)
        for way in itertools.islice(ways, each):
            actual = train(case.on_disk(folder, **way), mesh)
            try:
                assert_equal(actual.weights, expected.weights)
                assert_equal(actual.seen, expected.seen)
                pieces = [tensors_of(result) for result in (actual, expected)]
                assert_equal(*pieces)
                assert pieces[0]
            except AssertionError as error:
                wrong.append(f"{case} {way}: {str(error)[:300]}")
    return wrong


@pytest.mark.parametrize(
    ("pool", "cases", "each"),
    [
        pytest.param(2, [*CASES[:4], CASES[12], CASES[-1]], 1, id="2ranks"),
        pytest.param(1, [*CASES[5:8:2], CASES[11], *CASES[-6:-3]], 1, id="1rank"),
        pytest.param(2, CASES, 2, id="2ranks-all", marks=pytest.mark.slow),
        pytest.param(1, CASES, 1, id="1rank-all", marks=pytest.mark.slow),
        pytest.param(4, CASES[::3], 1, id="4ranks", marks=pytest.mark.slow),
    ],
    indirect=["pool"],
)
def test_the_disk_gives_the_bits_of_host_memory(
    pool: RankPool, cases: Sequence[Case], each: int, tmp_path: Path
) -> None:
    """Where io_uring is refused, threads move what rings would; `tests/storage/test_nvme.py` is skipped then."""
    found = [*itertools.chain(*pool.run(compare, cases, str(tmp_path), each))]
    assert not found, "\n".join(found)
    assert not [*tmp_path.iterdir()], "folders are left over"


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that files are asked for from here on, by direction and what they are."""
    touched: Counter[str] = Counter()
    for name in ("read", "write"):

        def noted(file: DiskFile, memory: Tensor, offset: int, what: str, do: Any, name: str) -> None:
            touched[f"{name} {what}"] += memory.nbytes
            do(file, memory, offset, what)

        monkeypatch.setattr(
            DiskFile,
            name,
            functools.partialmethod(noted, do=getattr(DiskFile, name), name=name),  # type: ignore[arg-type]
        )
    return touched


def test_what_does_not_change_is_neither_read_nor_written(tmp_path: Path, touched: Counter[str]) -> None:
    setup = dataclasses.replace(SETUP, stage=3, offload_params=False, units=("blocks.*",), disk_gradients=True)
    case = Case(setup, overflow=True)
    session = start(case.on_disk(str(tmp_path), overlap=False), Mesh.single())
    run_steps(session, case, [0])
    buckets = session.engine.buckets
    everything = {f"{kind} of {b.name}" for b in buckets for kind in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
    for step, unused in ((0, 0), (1, 1), (2, len(buckets))):  # of blocks, and of all in a step that is skipped
        touched.clear()
        with pytest.warns(UserWarning, match="overflowed") if step == 2 else contextlib.nullcontext():
            run_steps(session, case, [step])
        idle = {key for key in everything if not touched[f"write {key}"]}
        assert idle == {key for key in everything if not touched[f"read {key}"]}
        assert len(idle) == unused * 3
        gradients = {b.name for b in buckets if touched[f"write the gradients of {b.name}"]}
        assert len(gradients) == len(buckets) - (step == 1)
        assert gradients == {b.name for b in buckets if touched[f"read the gradients of {b.name}"]} or step == 2
    # An update reads and writes each tile once; those of gradients are written before.
    touched.clear()
    run_steps(session, case, [0])
    rested = [tensor for b in buckets for tensor in (*b.master.rested, *session.updater.state_of(b).flat.values())]
    names = itertools.product(("write", "read"), rested)
    expected = {f"{name} {tensor.what}": aligned(nbytes_of(tensor)) for name, tensor in names}
    for bucket in buckets:
        nbytes = aligned(session.engine.gradients_of(bucket).sharded.nbytes)
        expected |= {
            f"write the gradients of {bucket.name}": nbytes,
            f"read the gradients of {bucket.name}": nbytes,
        }
    assert touched == expected


@pytest.mark.parametrize(
    ("setup", "optimizer"),
    [(SETUP, "sgd"), (dataclasses.replace(STAGE3, precision=PURE_BF16), "split"), (STAGE3, "sgd")],
    ids=["fp32", "split", "parameters"],
)
def test_an_average_reads_and_writes_each_tile_once(
    tmp_path: Path, touched: Counter[str], monkeypatch: pytest.MonkeyPatch, setup: Setup, optimizer: str
) -> None:
    """Though it is computed in smaller pieces, and with the bits of masters in host memory."""
    monkeypatch.setattr(shadow, "_HOST_PIECE", 1 << 9)
    case, found = Case(setup, optimizer), []
    for place in (case, case.on_disk(str(tmp_path))):
        session = start(place, Mesh.single())
        second = session.engine.make_shadow()
        run_steps(session, case, [0])
        session.engine.await_updates()
        if on_disk := place is not case:
            await_writes(session)
        touched.clear()
        second.update(lambda average, live: average.lerp_(live, 0.25))
        values = [shard.clone() for shard in second.shards]
        assert touched == (once(session, "read") if on_disk else {})
        touched.clear()
        second.swap()
        if on_disk:
            await_writes(session)
        assert touched == (once(session, "read") | once(session, "write") if on_disk else {})
        values += [shard.clone() for shard in second.shards]
        found.append({str(n): v for n, v in enumerate(values)} | driver.finish(session).weights)
    assert_equal(*found)


def once(session: driver.Session, way: Literal["read", "write"]) -> dict[str, int]:
    """The traffic of masters that are moved once; what is written is the parameters, too, where they rest on a disk."""
    moved: list[DiskTensor] = []
    for bucket in session.engine.buckets:
        with_shard = way == "write" or bucket.master.in_shard
        rested = *getattr(bucket.master, "rested", ()), *([bucket.shard] if with_shard else ())
        moved += [tensor for tensor in rested if isinstance(tensor, DiskTensor)]
    return {f"{way} {tensor.what}": aligned(nbytes_of(tensor)) for tensor in moved}


def planned_for(case: Case, placement: BucketPlacement) -> Plan:
    return plan(
        model := Blocks(),
        placement,
        [OPTIMIZERS[case.optimizer](model)],
        bucket_size_mb=case.setup.bucket_size_mb,
        units=case.setup.units,
        micro_batches=case.micro,
    )


@pytest.mark.parametrize(("stage", "micro"), [(1, 2), (2, 1), (2, 3)])
def test_a_plan_knows_the_traffic_of_gradients(tmp_path: Path, touched: Counter[str], stage: int, micro: int) -> None:
    """Each micro-batch after the first of a step reads and writes them once more, but where it is summed before.

    The norm never reads them.
    """
    setup = dataclasses.replace(SETUP, stage=stage, disk_gradients=True, precision=PURE_BF16)
    case = Case(setup, "split", micro).on_disk(str(tmp_path))
    session = start(case, Mesh.single())
    for _ in range(2):
        touched.clear()
        run_steps(session, case, [0])
        await_writes(session)
    planned, pages = planned_for(case, session.engine.placement), 4096 * 2 * (micro + 1) * len(session.engine.buckets)
    moved = sum(nbytes for what, nbytes in touched.items() if "the gradients of" in what)
    assert planned.summed <= moved <= planned.summed + pages
    assert held_by(session.engine)["sharded_gradient"] == planned_parts(planned)["sharded_gradient"]
    passes = 2 * micro if stage == 2 else 2
    assert planned.summed == passes * planned_parts(planned)["sharded_gradient"].disk


def test_the_norm_of_gradients_that_were_changed_on_the_disk(tmp_path: Path) -> None:
    """Is not that of what has arrived there."""
    norms = []
    for case in (Case(SETUP), Case(dataclasses.replace(SETUP, disk_gradients=True)).on_disk(str(tmp_path))):
        session = start(case, Mesh.single())
        driver.backward(session.engine, loss_of(session.model, torch.ones(4, INPUT)))
        first = session.engine.clip_grad_norm_(session.optimizer, 1e9)
        session.engine.clip_grad_value_(session.optimizer, first / 1000)
        norms.append((first, session.engine.clip_grad_norm_(session.optimizer, 1e9)))
        session.engine.release()
    assert norms[0] == norms[1]
    assert norms[0][0] > norms[0][1] > 0


def test_squares_are_of_all_tiles_of_a_sum_however_slow_the_disk_is(tmp_path: Path) -> None:
    """Each tile's are added after those of the tile before, and of what its sum has become."""
    cpu, executor, numel = torch.device("cpu"), SlowDisk(), 6 * 4096 + 5
    store = DiskStore.in_folder(RunFolder(tmp_path, "run", 0), executor, driver.DISK_BUFFER)
    policy, parameters = ShardingPolicy.from_stage(2), DeviceStore(cpu)
    placement = BucketPlacement(
        Mesh.single(), policy, MixedPrecisionPolicy(), cpu, store, parameters, executor, gradients_rest=True
    )
    values = torch.linspace(-1, 1, numel)
    gradient = ShardedGradient("a", numel, placement, [])
    for times in (1, 2):
        gradient.squares_of(0, numel)  # of the next values
        gradient.add(values)
        assert gradient.squares_of(0, numel) == ops.sum_of_squares(times * values)


def test_gradients_rest_on_the_disk_where_they_do_not_fit_the_buffer(tmp_path: Path) -> None:
    case = Case(dataclasses.replace(SETUP, disk_gradients=None)).on_disk(str(tmp_path))
    placement = driver.make_placement(case.setup, Mesh.single())
    for shards, memory in ((1, "disk"), (2, "host")):
        planned = planned_for(case, placement._replace(mesh=Mesh.imagined(shards, 1, 0)))
        gradients = planned_parts(planned)["sharded_gradient"]
        assert (gradients.total + gradients.disk > driver.DISK_BUFFER) == (memory == "disk")
        assert getattr(gradients, memory) == gradients.total + gradients.disk


def test_a_gradient_that_a_disk_has_changed_is_an_error(tmp_path: Path) -> None:
    case = Case(dataclasses.replace(SETUP, disk_gradients=True)).on_disk(str(tmp_path), overlap=False)
    session = start(case, Mesh.single())
    driver.backward(session.engine, loss_of(session.model, torch.ones(4, INPUT)))
    (bucket, *_) = session.engine.buckets
    tensor = session.engine.gradients_of(bucket).sharded._values
    assert isinstance(tensor, DiskTensor)
    with session.engine.placement.optimizer_store.opened.path.open("r+b") as file:  # type: ignore[attr-defined]
        file.seek(tensor.offset_of(1) + 100)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(DiskError, match=rf"the gradients of {re.escape(bucket.name)} in .*is not what was written"):
        session.optimizer.step()


def test_the_next_bucket_comes_while_the_last_tiles_of_one_are_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none that will not be updated."""
    session = start(Case(SETUP).on_disk(str(tmp_path), overlap=False), Mesh.single())
    run_steps(session, Case(SETUP), [0])
    order, load, keep = list[tuple[str, str, int]](), DiskStore._load, DiskStore._keep

    def loaded(store: DiskStore, tensor: DiskTensor, first: int, memory: Tensor) -> None:
        order.append(("load", tensor.what, first))
        load(store, tensor, first, memory)

    def kept(store: DiskStore, tensor: DiskTensor, first: int, memory: Tensor) -> None:
        order.append(("keep", tensor.what, first))
        keep(store, tensor, first, memory)

    monkeypatch.setattr(DiskStore, "_load", loaded)
    monkeypatch.setattr(DiskStore, "_keep", kept)
    for step in (0, 1):
        order.clear()
        run_steps(session, Case(SETUP), [step])
        masters = [name for kind, name, first in order if kind == "keep" and first == 0 and "master" in name]
        assert len(masters) >= 2
        for before, name in itertools.pairwise(masters):
            last = max(number for number, (kind, what, _) in enumerate(order) if (kind, what) == ("keep", before))
            assert order.index(("load", name, 0)) < last - 3, f"{name} comes after {before}"
        assert {name for kind, name, _ in order if kind == "load"} == {
            name for kind, name, _ in order if kind == "keep"
        }


@pytest.mark.parametrize(
    ("precision", "optimizer", "updates"),
    [
        (None, "adamw", 1),
        (PURE_BF16, "copy", 0),
        (PURE_BF16, "split", 1),
        (PURE_BF16, "sgd", 0),
        (None, "muon_on_host", 1),
        (PURE_BF16, "muon_on_host", 0),
    ],
)
def test_parameters_are_read_by_each_pass_and_their_update(
    tmp_path: Path, touched: Counter[str], precision: MixedPrecisionPolicy | None, optimizer: str, updates: int
) -> None:
    """What is fetched ahead of its unit is fetched once; units are freed after forward, the rest is not.

    An update that only writes them, from masters, reads none. What is changed is read and written once, as planned,
    also where parameters lie whole, and end inside of tiles.
    """
    setup = STAGE3 if precision is None else dataclasses.replace(STAGE3, precision=precision)
    case = Case(setup, optimizer)
    session = start(case.on_disk(str(tmp_path)), Mesh.single())
    for _ in range(2):
        touched.clear()
        run_steps(session, case, [0])
        await_writes(session)
    read_by_passes = 0
    for bucket in session.engine.buckets:
        what, nbytes = f"the parameters of {bucket.name}", aligned(nbytes_of(bucket.shard))
        reads = updates + (2 if bucket.name.startswith("blocks") else 1)
        assert (touched[f"read {what}"], touched[f"write {what}"]) == (reads * nbytes, nbytes), what
        read_by_passes += (reads - updates) * nbytes
    moved = sum(touched.values()) - read_by_passes
    pages = 4096 * 2 * 8 * len(session.engine.buckets)
    planned = disk_bytes(planned_for(case, session.engine.placement))
    assert planned <= moved <= planned + pages


@pytest.mark.parametrize(("optimizer", "native"), [("sgd", "auto"), ("fused", "off")])
def test_parameters_that_an_update_leaves_out_stay(tmp_path: Path, optimizer: str, native: NativeOptimizer) -> None:
    """In a bucket of which others are updated, and in tiles that are updated one parameter after the other."""
    case, seen = Case(dataclasses.replace(STAGE3, precision=PURE_BF16, native=native), optimizer), []
    for place in (case, case.on_disk(str(tmp_path))):
        session = start(place, Mesh.single())
        run_steps(session, case, [0])
        session.optimizer.zero_grad()
        with session.engine.forward_context():  # without the head, which is in the bucket of the embedding
            loss = session.model.embed(torch.ones(4, INPUT, dtype=torch.bfloat16)).float().square().mean()
        driver.backward(session.engine, loss)
        session.optimizer.step()
        seen.append(driver.finish(session).seen)
    assert_equal(*seen)


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_parameters_of_an_update_that_fails_are_of_before_or_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """Where they would have been overwritten, they are not what memory has had in their place."""
    case = Case(dataclasses.replace(STAGE3, precision=PURE_BF16, native="off", disk=str(tmp_path)), optimizer)
    seen, left = list[dict[str, Tensor]](), [0]

    def fail_in_time(*args: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("no step")
        return run_step(*args)

    for module in (updaters, whole):
        monkeypatch.setattr(module, "run_step", fail_in_time)
    for calls in (0, 1, 2, 3, 4):
        session = start(case, Mesh.single())
        left[0] = 0
        run_steps(session, case, [0])
        seen += [] if calls else [driver.copy_of_parameters(session.engine)]
        left[0] = calls
        with pytest.raises(RuntimeError, match="no step") if calls else contextlib.nullcontext():
            run_steps(session, case, [0])
        seen += [] if calls else [driver.copy_of_parameters(session.engine)]
        for name, now in driver.copy_of_parameters(session.engine).items():
            assert (now.eq(seen[0][name]) | now.eq(seen[1][name])).all(), (calls, name)
        session.engine.release()


def test_gradients_of_a_bucket_of_two_optimizers_are_not_read_for_its_norms(
    tmp_path: Path, touched: Counter[str]
) -> None:
    """From the second step on, when it is known which ranges they have."""
    found = []
    for place in (SETUP, dataclasses.replace(SETUP, disk=str(tmp_path), disk_gradients=True, overlap=False)):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model = Blocks()
        named = dict(model.named_parameters())
        optimizers = [
            torch.optim.SGD([p for name, p in named.items() if ("bias" in name) == biases], lr=0.1)
            for biases in (False, True)
        ]
        engine = driver.make_engine(model, place, Mesh.single(), optimizers=optimizers)
        engine.attach([driver.make_updater(optimizer, engine, "auto") for optimizer in optimizers])
        norms = []
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            touched.clear()
            driver.backward(engine, loss_of(model, torch.ones(4, INPUT)))
            norms += [engine.clip_grad_norm_(optimizer, 0.1) for optimizer in optimizers]
            read = sum(nbytes for what, nbytes in touched.items() if what.startswith("read the gradients"))
            assert (read > 0) == (place.disk is not None and len(norms) == 2)
            for optimizer in optimizers:
                optimizer.step()
        engine.settle()
        found.append((norms, driver.copy_of_parameters(engine)))
        engine.release()
    assert found[0][0] == found[1][0]
    assert_equal(found[0][1], found[1][1])


def test_a_plan_knows_state_in_blocks(tmp_path: Path) -> None:
    """Whose scales stay in memory."""
    case = Case(dataclasses.replace(SETUP, precision=PURE_BF16), "blocks").on_disk(str(tmp_path))
    model = Blocks()
    expected = plan(
        model,
        driver.make_placement(case.setup, Mesh.single()),
        [OPTIMIZERS["blocks"](model)],
        bucket_size_mb=case.setup.bucket_size_mb,
    )
    session = start(case, Mesh.single())
    run_steps(session, case, [0])
    held, planned = held_by(session.engine)["optimizer_state"], planned_parts(expected)["optimizer_state"]
    assert held == planned
    assert 0 < held.host < held.disk / 200


def test_state_of_whole_parameters_rests_on_the_disk(tmp_path: Path) -> None:
    case = Case(SETUP, "muon").on_disk(str(tmp_path))
    session = start(case, Mesh.single())
    run_steps(session, case, [0])
    held, size = held_by(session.engine), session.engine.placement.optimizer_store.opened.nbytes  # type: ignore[attr-defined]
    model = Blocks()
    planned = plan(model, session.engine.placement, [OPTIMIZERS["muon"](model)])
    assert held["optimizer_state"].disk == sum(bucket.optimizer_state.disk for bucket in planned.buckets)
    assert held["optimizer_state"].host == 0
    run_steps(session, case, [0, 0])
    assert session.engine.placement.optimizer_store.opened.nbytes == size  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "case",
    [
        Case(dataclasses.replace(SETUP, disk_gradients=True), micro=2),
        Case(dataclasses.replace(STAGE3, disk_gradients=True), "muon"),
        Case(dataclasses.replace(STAGE3, precision=PURE_BF16), "copy"),
    ],
    ids=["stage2", "muon", "stage3"],
)
def test_tiles_take_what_is_planned_however_slow_the_disk_is(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer, whatever its size: but no more than what rests on the disk, and no less than two tiles at work.

    The bits are those of state and gradients in host memory.
    """
    in_memory = start(case, Mesh.single())
    run_steps(in_memory, case, [0, 0])
    expected = driver.finish(in_memory).weights
    for number, buffer in enumerate((1, 12 * 2**14, 25 * 2**14, 2**24)):

        def slow_store(
            setup: Setup, rank: int, executor: Executor, buffer: int = buffer, number: int = number
        ) -> DiskStore:
            return DiskStore.in_folder(RunFolder(tmp_path, f"run{number}", rank), executor, buffer)

        monkeypatch.setattr(driver, "make_executor", lambda *_: SlowDisk())
        monkeypatch.setattr(driver, "make_disk_store", slow_store)
        session = start(case.on_disk(str(tmp_path)), Mesh.single())
        store = session.engine.placement.optimizer_store
        assert isinstance(store, DiskStore)
        assert store.tile is not None
        planned = planned_for(case, session.engine.placement)
        run_steps(session, case, [0, 0])
        staged, bound = store.staged_bytes, planned.staging.host
        assert bound <= max(buffer, planned.held.disk), buffer
        assert staged <= bound, (buffer, bound)
        if bound == buffer and case.optimizer != "muon":  # whose state is read where it is updated, after its writes
            assert staged > bound - 4 * store.tile, "some room is never used"
        assert_equal(driver.finish(session).weights, expected)


@pytest.mark.parametrize(("buffer", "windows"), [(2**24, 3), (12 * 2**14, 1)], ids=["ahead", "alone"])
def test_state_of_whole_parameters_takes_what_is_planned_however_slow_the_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer: int, windows: int
) -> None:
    """That of parameters which are updated together, up to three times where as much fits the buffer."""
    taken = Counter[str]()
    monkeypatch.setattr(driver, "make_executor", lambda *_: SlowDisk())
    monkeypatch.setattr(
        driver,
        "make_disk_store",
        lambda setup, rank, executor: DiskStore.in_folder(RunFolder(tmp_path, "run", rank), executor, buffer),
    )
    monkeypatch.setattr(DiskStore, "copy_for", counting_copies(taken))
    case = Case(STAGE3, "muon_on_host").on_disk(str(tmp_path))
    session = start(case, Mesh.single())
    run_steps(session, case, [0])  # makes the state
    for _ in range(2):
        taken["most"] = 0
        run_steps(session, case, [0])
        largest = 2 * WIDTH**2 * torch.float32.itemsize
        beside = 2 * aligned(4 * WIDTH * INPUT)  # of the first bucket, whose state is small
        assert min(windows, 2) * largest <= taken["most"] <= windows * largest + beside


def state_dicts(session: driver.Session) -> tuple[dict[str, Any], dict[str, Any]]:
    weights, state = module_state_dict(session.engine), optimizer_state_dict(session.engine, session.updater)
    return tree_map(values_of, weights), tree_map(values_of, state)


def values_of(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def resume(case: Case, first: Case) -> list[dict[str, Tensor]]:
    """Weights after four steps, of which the first two ran in another place."""
    mesh = driver.Meshes().of(case.setup)
    straight, before, after = start(case, mesh), start(first, mesh), start(case, mesh, seed=1)
    run_steps(straight, case, range(STEPS))
    run_steps(before, first, range(2))
    weights, state = state_dicts(before)
    load_module_state_dict(after.engine, weights)
    load_optimizer_state_dict(after.engine, after.updater, state)
    run_steps(after, case, range(2, STEPS))
    return [driver.finish(session).weights for session in (straight, after)]


def resume_both_ways(folder: str, precision: MixedPrecisionPolicy | None, optimizer: str) -> None:
    host = Case(SETUP if precision is None else dataclasses.replace(SETUP, precision=precision), optimizer)
    disk = host.on_disk(folder)
    assert_equal(*resume(host, disk))
    assert_equal(*resume(disk, host))


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        (PURE_BF16, "split"),
        pytest.param(None, "adamw", marks=pytest.mark.slow),
        pytest.param(PURE_BF16, "blocks", marks=pytest.mark.slow),
        pytest.param(None, "muon", marks=pytest.mark.slow),
    ],
)
def test_state_moves_between_a_disk_and_host_memory(
    pool2: RankPool, tmp_path: Path, precision: MixedPrecisionPolicy | None, optimizer: str
) -> None:
    pool2.run(resume_both_ways, str(tmp_path), precision, optimizer)
