"""What overlaps with the training changes no bit: a device's streams against the executor that finishes at once."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from device import sim
from engine import driver
from engine.driver import Session
from helpers import models
from torch import Tensor, nn

import lightning_zero
from lightning_zero import ops
from lightning_zero.engine import Engine
from lightning_zero.sharding import BucketPlacement, Mesh, MixedPrecisionPolicy, ShardedGradient, ShardingPolicy
from lightning_zero.sharding.layout import runs
from lightning_zero.storage import (
    DeviceStore,
    DiskStore,
    Executor,
    HostStore,
    InlineExecutor,
    Lane,
    StreamExecutor,
    TensorStore,
    Ticket,
)
from lightning_zero.storage.run_folder import RunFolder
from lightning_zero.storage.streams import _Work
from lightning_zero.update import DynamicLossScaler, make_updater
from lightning_zero.update.updaters import NativeOptimizer

FP32 = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(torch.bfloat16, keep_norms=False)
FP16 = MixedPrecisionPolicy(torch.float16, keep_norms=False)
STEPS = 4
RUNS = itertools.count()
LIMITS = [(64 << 20, 64 << 20), (500, 2000), (0, 0)]  # bytes in flight and of staging memory


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained, and what user code does meanwhile."""

    stage: int
    micro: int = 1
    precision: MixedPrecisionPolicy = FP32
    native: NativeOptimizer = "auto"
    split: bool = False  # the layout of masters
    host: bool = True  # where optimizer state rests, and at stage 3 parameters
    host_params: bool = False  # where these alone rest at stage 3
    seed: int = 0  # of what user code does
    overflow: bool = False
    model: str = "transformer"
    prefetch_mb: float = 0.0
    optimizers: int = 1  # each has a part of the parameters; they step one after another
    fraction: float = 1.0  # that is offloaded
    sums: bool = False  # whether micro-batches are summed on the device
    edits: bool = True  # whether user code changes 16-bit parameters in place
    disk: Path | None = None  # a folder in which state and gradients rest, and at stage 3 parameters

    def __str__(self) -> str:
        dtype = str(self.precision.param_dtype or torch.float32).removeprefix("torch.")
        chosen = {"split": self.split, "overflow": self.overflow, "sums": self.sums, "host-params": self.host_params}
        options = [self.native, *(name for name, is_so in chosen.items() if is_so)]
        options += [self.model] if self.model != "transformer" else []
        options += [f"{self.optimizers}-optimizers"] if self.optimizers > 1 else []
        return "-".join([f"zero{self.stage}", f"{self.micro}", dtype, *options])


CASES = [
    Case(1, micro=3, precision=BF16),
    Case(2, precision=BF16),
    Case(2, micro=3),
    Case(2, micro=2, precision=BF16, native="off"),
    Case(2, micro=3, precision=BF16, sums=True),
    Case(2, micro=2, precision=BF16, split=True),
    Case(2, precision=FP16, overflow=True),
    Case(3, micro=2, precision=BF16, prefetch_mb=1.0),
    Case(3, native="off"),
    Case(3, host=False),
    Case(3, micro=2, precision=BF16, host=False, host_params=True),
    Case(2, micro=2, precision=BF16, model="optional"),
    Case(2, micro=2, optimizers=2),
    Case(3, precision=BF16, native="off", optimizers=2),
    Case(1, precision=FP16, split=True, overflow=True, optimizers=2),
    Case(3, micro=2, precision=BF16, split=True, host=True),
]


class Gate:
    """A ticket that a job comes after, before it waits for anything else: the job begins when it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def done(self) -> bool:
        return self._open.is_set()

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        assert self._open.wait(120)


class LateWork(_Work):
    """Lets jobs begin when somebody waits for them."""

    gates: list[Gate]

    def marks(self) -> list[Any]:
        for gate in self.gates:
            gate.open()
        return super().marks()


class Late(StreamExecutor):
    """Its threads are as late as the simulated device's streams, whose schedule does not know them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gates: list[Gate] = []

    def _in_thread(self, lane: Lane, job: Callable[[], object], what: str, after: Sequence[Ticket]) -> LateWork:
        gate = Gate()
        self.gates.append(gate)  # that of a job opens with those before it
        work = super()._in_thread(lane, job, what, (gate, *after))
        made = LateWork(self, lane, what, work._ended)
        made.gates = list(self.gates)
        return made


def start(
    case: Case,
    executor: Executor,
    device: torch.device,
    model: nn.Module | None = None,
    mesh: Mesh | None = None,
    **options: Any,
) -> Session:
    on_device = DeviceStore(device)
    store: TensorStore = HostStore(pin_for=device) if case.host else on_device
    if case.disk is not None:
        store = DiskStore.in_folder(RunFolder(case.disk, f"run{next(RUNS)}", 0), executor, 1, pin_for=device)
    params = store if case.stage == 3 else on_device
    if case.host_params:
        params = HostStore(pin_for=device)
    policy = ShardingPolicy.from_stage(case.stage)
    placement = BucketPlacement(
        mesh or Mesh.single(),
        policy,
        case.precision,
        device,
        store,
        params,
        executor,
        offload_fraction=case.fraction,
        gradients_rest=case.disk is not None,
        accumulate_on_device=case.sums,
    )
    model = model or models.make_model(case.model)
    make = lightning_zero.CPUAdamW if case.split else torch.optim.AdamW
    layout = {"master_layout": "split"} if case.split else {}
    parameters = [*model.parameters()]
    parts = [parameters[number :: case.optimizers] for number in range(case.optimizers)]  # of the same buckets
    optimizers = [make(part, lr=1e-2, **layout) for part in parts]
    scaler = DynamicLossScaler(init_scale=2.0**17) if case.overflow else None
    options = {"bucket_size_mb": 0.0003, "check_steps": 0, "prefetch_mb": case.prefetch_mb, "scaler": scaler} | options
    engine = Engine(model, placement, **options)
    engine.attach([make_updater(optimizer, engine, case.native) for optimizer in optimizers])
    return Session(model, engine, optimizers[0], engine.updaters[0])


class User:
    """User code, which reads and changes at moments that the seed draws what it may."""

    def __init__(self, case: Case, session: Session) -> None:
        self._random = random.Random(case.seed)
        self._session = session
        self._sharded = case.stage == 3
        self._edits = case.edits
        self.saw: list[Tensor] = []

    def _perhaps(self, act: Callable[[], object], chance: float = 0.3) -> None:
        if self._random.random() < chance:
            act()

    def after_backward(self, last: bool) -> None:
        """Between micro-batches it forgets them; after the last one it reads, changes and clips gradients."""
        if not last:
            self._perhaps(self._session.optimizer.zero_grad, 0.5)
            return
        first, *_, other = self._session.model.parameters()
        self._perhaps(lambda: self.saw.append(self._session.engine.full_grad(first).cpu()))
        self._perhaps(lambda: None if other.grad is None else other.grad.mul_(0.5))
        self._perhaps(lambda: self._session.engine.clip_grad_value_(self._session.optimizer, 1e-3))
        norm = self._session.engine.clip_grad_norm_(self._session.optimizer, self._random.choice([0.01, 1e9]))
        self.saw.append(torch.tensor(norm))

    def after_step(self) -> None:
        """It changes a rate, and reads and writes gradients and weights."""
        engine, parameters = self._session.engine, [*self._session.model.parameters()]
        self._session.optimizer.param_groups[0]["lr"] *= 0.9
        self._perhaps(lambda: self.saw.extend(g for g in (engine.full_grad(parameters[1]),) if g is not None))
        self._perhaps(lambda: None if parameters[2].grad is None else parameters[2].grad.mul_(0.5))
        self._perhaps(lambda: engine.zero_grad(parameters[:1]))
        if not self._sharded:
            self._perhaps(lambda: self.saw.append(parameters[-1].detach().clone()))  # it is read later
            self._perhaps(lambda: self.saw.extend(copy.deepcopy(self._session.model).state_dict().values()))
            self._perhaps(self._write if self._edits else lambda: None)
            self._perhaps(self._load)
        self._perhaps(engine.settle)
        self._perhaps(self._edit)
        self._perhaps(lambda: self.saw.append(engine.full_param(parameters[-1])))

    @torch.no_grad()
    def _write(self) -> None:
        next(self._session.model.parameters()).clamp_(-0.5, 0.5)

    def _load(self) -> None:
        bucket, values = self._session.engine.buckets[0], next(self._session.model.parameters())
        bucket.load({bucket.index[id(values)]: torch.full(values.shape, 0.25)})

    def _edit(self) -> None:
        engine, parameter = self._session.engine, next(self._session.model.parameters())
        full_precision = self._random.random() < 0.5 or not self._edits
        with engine.gathered([parameter], full_precision=full_precision), torch.no_grad():
            parameter.mul_(1.25)


def train(case: Case, executor: Executor, device: torch.device, mesh: Mesh | None = None) -> list[Tensor]:
    """All that training leaves, and what user code has seen."""
    mesh = mesh or Mesh.single()
    session = start(case, executor, device, mesh=mesh)
    user = User(case, session)
    shadow = session.engine.make_shadow(DeviceStore(device) if case.stage == 1 else None)
    draw, optimizers = random.Random(case.seed), [updater.optimizer for updater in session.engine.updaters]
    for micro in models.make_batches(STEPS, case.micro, mesh.world.size, flagged=models.by_turns):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for index, batches in enumerate(micro, start=1):
            with session.engine.forward_context():
                loss = models.next_token_loss(session.model, batches[mesh.world.rank].to(device))
            driver.backward(session.engine, loss, last=index == len(micro))
            user.after_backward(index == len(micro))
        for optimizer in optimizers:
            optimizer.step()
        if draw.random() < 0.5:
            shadow.update(lambda second, live: second.lerp(live, 0.25))
        user.after_step()
    for _ in range(2):
        shadow.swap()
        with session.engine.gathered(session.model.parameters()):
            user.saw += [parameter.detach().clone() for parameter in session.model.parameters()]
    return [*(seen.cpu() for seen in user.saw), *left_by(session), *(shard.cpu() for shard in shadow.shards)]


def left_by(session: Session) -> list[Tensor]:
    left = []
    for bucket in session.engine.buckets:
        left += [bucket.master.read(0, bucket.layout.shard_numel), bucket.shard.read(0, bucket.shard.numel)]
        for updater in session.engine.updaters:
            left += [flat.read(0, flat.numel) for flat in updater.state_of(bucket).flat.values()]
    with session.engine.gathered(session.model.parameters()):
        left += [parameter.detach() for parameter in session.model.parameters()]
        return [tensor.cpu().clone() for tensor in left]


def assert_overlapped_is_inline(case: Case, device: torch.device, limits: tuple[int, int] | None = None) -> None:
    expected = train(case, InlineExecutor(), device)
    limits = limits or LIMITS[(case.seed + CASES.index(dataclasses.replace(case, seed=0))) % len(LIMITS)]
    executor = Late(device, *limits) if device.type == sim.DEVICE else StreamExecutor(device, *limits)
    actual = train(case, executor, device)
    assert len(actual) == len(expected)
    differing = [n for n, pair in enumerate(zip(actual, expected, strict=True)) if bits(pair[0]) != bits(pair[1])]
    assert not differing


def bits(values: Tensor) -> list[int]:
    """Of NaN, which has many, those of torch's: which one comes out of a sum depends on the order of its terms."""
    if values.is_floating_point():
        values = values.masked_fill(values.isnan(), math.nan)
    return values.contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.device("lazy")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_overlapped_is_inline(device: torch.device, case: Case) -> None:
    assert_overlapped_is_inline(case, device)


@pytest.mark.slow
@pytest.mark.device("lazy")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_overlapped_is_inline_in_every_schedule(device: torch.device, case: Case) -> None:
    for seed in range(len(LIMITS)):  # `test_adversarial.py` draws more, with the cases
        if device.type == sim.DEVICE:
            torch.accelerator.synchronize()
            sim.install().schedule("random", seed)
        assert_overlapped_is_inline(dataclasses.replace(case, seed=seed), device)


@pytest.mark.device("lazy")
def test_a_norm_that_was_known_early_follows_what_becomes_of_gradients(device: torch.device) -> None:
    session = start(Case(2), StreamExecutor(device), device)
    engine, optimizer = session.engine, session.optimizer
    ((batch,),), *_ = models.make_batches(1, 1, 1)

    def norm_of(micro: int) -> float:
        for number in range(1, micro + 1):
            with engine.forward_context():
                loss = models.next_token_loss(session.model, batch.to(device))
            driver.backward(engine, loss, last=number == micro)
        return engine.grad_norm(optimizer)

    norm = norm_of(1)
    optimizer.zero_grad()
    assert engine.grad_norm(optimizer) == 0
    assert norm_of(2) == pytest.approx(2 * norm)
    for parameter in session.model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2)
    assert engine.grad_norm(optimizer) == pytest.approx(4 * norm)
    optimizer.zero_grad()
    assert norm_of(1) == norm
    for parameter in session.model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2)
    assert engine.grad_norm(optimizer) == pytest.approx(2 * norm)


@pytest.mark.device("lazy")
@pytest.mark.parametrize("overflow", [False, True])
def test_the_norm_of_several_micro_batches_reads_no_gradient(device: torch.device, overflow: bool) -> None:
    """Nor do an overflow in the first one, and clipping; the norm has the bits of one that reads them."""
    session = start(Case(2, micro=2, precision=BF16), StreamExecutor(device), device)
    engine, optimizer, squares = session.engine, session.optimizer, 0.0
    (one, other), *_ = models.make_batches(1, 2, 1)
    with mock.patch.object(ShardedGradient, "read", side_effect=AssertionError("a gradient is read")):
        for (batch,), last in ((one, False), (other, True)):
            with engine.forward_context():
                loss = models.next_token_loss(session.model, batch.to(device))
            driver.backward(engine, loss * math.inf if overflow and not last else loss, last=last)
        norm = engine.clip_grad_norm_(optimizer, 1e-3)
        clipped = engine.grad_norm(optimizer)
    for bucket in engine.buckets:
        for run in runs(bucket.segments, lambda _: True, gap=bucket.layout.align - 1):
            squares += ops.sum_of_squares(engine.gradients_of(bucket).sharded.read(run.start, run.stop))
    assert math.isfinite(squares) == math.isfinite(norm) == (not overflow)
    if not overflow:
        assert norm == math.sqrt(squares) > 1e-3
        assert clipped == pytest.approx(1e-3, rel=1e-4)
