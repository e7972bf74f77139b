"""Overlapped training has the bits of inline training, whatever is trained, in whatever order things happen.

Each seed draws what is trained, the order in which streams and threads run, and what user code does meanwhile: reads,
edits, saves, forwards and backwards that fail, and what it does then. A longer run, of 200 seeds from 1000 on, with 50
steps each, on two ranks (one where nothing is said):
`PYTHONPATH=tests python -P -m device.test_adversarial 1000 200 50 2`.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device import sim, where
from device.test_overlap import BF16, FP16, FP32, LIMITS, Case, Late, User, bits, left_by, start
from device.where import DevicePool
from engine import driver
from engine.driver import Session
from helpers import models
from helpers.ranks import ForkServer, RankError, RankPool
from torch import Tensor, nn

from lightning_zero.checkpoint.state import (
    load_module_state_dict,
    load_optimizer_state_dict,
    module_state_dict,
    optimizer_state_dict,
)
from lightning_zero.engine import ActivationLimits
from lightning_zero.sharding import Mesh
from lightning_zero.storage import Executor, InlineExecutor, StreamExecutor
from lightning_zero.update import DynamicLossScaler

pytestmark = pytest.mark.simulated

SEEDS, STEPS = {1: 40, 2: 16}, 5  # seeds by the number of ranks
LEAST_RATE = 1e-3
WINDOW = 3  # steps without an overflow, after which the loss scale grows: long runs would end at the smallest one
PRECISIONS = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
CLIPPED = (0.0, 0.01, 0.5, 1.0)  # of the steps
LIVE = (None, 0, 400, 800)  # elements of unsharded units: a block has 349 or 391, the rest of a model 174
POINTS = 20  # of a backward, that hooks see: more than there are


class SurpriseError(Exception):
    """User code fails, and goes on."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Settings that a seed draws."""

    case: Case
    clipped: float
    overflows: float  # of the steps, by a gradient that is not finite
    fails: float  # of the micro-batches, in a forward
    alternates: bool  # optimizers step by turns, as those of a GAN do, with the other's parameters frozen
    breaks: float  # of the micro-batches, in a backward
    shards: int  # ranks that share a shard group
    reads: bool  # user code reads parameters after steps; otherwise several ranks gather them when they are needed
    activations: ActivationLimits | None  # that rest in host memory, where work overlaps
    max_live_numel: int | None

    @classmethod
    def by(cls, seed: int, ranks: int = 1) -> Drawn:
        draw = random.Random(seed)
        stage, name = draw.choice([0, 1, 2, 2, 3, 3]), draw.choice([*PRECISIONS])
        host = stage > 0 and draw.random() < 0.8
        native = "auto" if draw.random() < 0.7 else "off"
        optimizers = draw.choice([1, 2])
        case = Case(
            stage,
            micro=draw.choice([1, 3]),
            precision=PRECISIONS[name],
            native=native,  # type: ignore[arg-type]
            split=host and name != "fp32" and native == "auto" and draw.random() < 0.5,
            host=host,
            seed=seed,
            overflow=name == "fp16",
            model=draw.choice(["transformer", "optional"]),
            prefetch_mb=draw.choice([0.0, 1.0]),
            optimizers=optimizers,
            fraction=draw.choice([0.3, 0.6, 1.0]) if host else 1.0,
        )
        if case.split and name == "fp16":  # a part of it is refused
            case = dataclasses.replace(case, fraction=1.0)
        clipped, overflows, fails = draw.choice(CLIPPED), draw.choice([0.0, 0.2]), draw.choice([0.0, 0.1])
        alternates, breaks = optimizers > 1 and draw.random() < 0.5, draw.choice([0.0, 0.15, 0.3])
        shards = draw.choice([1, 2, 2]) if stage > 0 and ranks > 1 else 1
        reads = draw.random() < 0.5
        sums, host_params = host and draw.random() < 0.3, stage == 3 and not host and draw.random() < 0.5
        case = dataclasses.replace(case, sums=sums, host_params=host_params)
        activations = draw.choice([None, ActivationLimits(0, 0), ActivationLimits(200, 2000)])
        live = draw.choice(LIVE) if stage == 3 else None
        return cls(case, clipped, overflows, fails, alternates, breaks, shards, reads, activations, live)

    def flagged(self, step: int, micro: int, rank: int) -> bool:
        """Where backwards fail, they do so on all ranks alike."""
        return models.by_turns(step, micro, 0 if self.breaks else rank)


class Fragile(torch.autograd.Function):
    """Passes values on; its backward may fail."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, user: Adversary) -> Tensor:
        ctx.user = user
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.user.in_backward("function")
        return gradient, None


class Adversary(User):
    """Reads a weight in the middle of a forward, and fails there and in backward, too; clips as often as was drawn."""

    def __init__(self, drawn: Drawn, session: Session) -> None:
        super().__init__(drawn.case, session)
        self._drawn = drawn
        self.did: Counter[str] = Counter()
        self._failing = False
        self._points = -1  # of a backward, before the one that fails; negative: none does
        self.join(session)

    def join(self, session: Session) -> None:
        """Goes on with another one."""
        self._session = session
        # Inside a unit: outside it stage 3 has freed the parameters.
        for block in [module for module in session.model.modules() if type(module) is models.Block]:
            for module in (block.qkv, block.up):
                module.register_forward_pre_hook(self._in_forward)
                module.register_forward_hook(self._in_forward)
            block.project.register_forward_hook(lambda module, args, output: Fragile.apply(output, self))
            block.down.register_forward_hook(self._hook)
        parameters = [*session.model.parameters()]
        for parameter in parameters[::4]:
            parameter.register_hook(self._at_parameter)  # type: ignore[arg-type]
        for parameter in parameters[1::4]:
            parameter.register_post_accumulate_grad_hook(self._at_parameter)

    def __deepcopy__(self, memo: object) -> Adversary:
        return self  # of the hooks of a module that is copied

    def _in_forward(self, module: nn.Module, *_: Any) -> None:
        if self._failing and self._random.random() < 0.3:
            self._failing = False
            self.did["failed"] += 1
            raise SurpriseError
        self._perhaps(lambda: self._read(module), 0.1)

    def _read(self, module: nn.Module) -> None:
        self.did["read"] += 1
        self.saw.append(next(module.parameters()).detach().clone())

    def _hook(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self.in_backward("tensor"))  # type: ignore[arg-type,return-value]

    def _at_parameter(self, _: Tensor) -> None:
        self.in_backward("parameter")

    def in_backward(self, where: str) -> None:
        """A point at which a backward may fail."""
        self._points -= self._points >= 0
        if self._points == 0:
            self._points = -1
            self.did[f"broke in a {where}"] += 1
            raise SurpriseError

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Goes on after a failure of its own."""
        self._failing = self._random.random() < self._drawn.fails
        with suppress(SurpriseError):
            yield
        self._failing = False

    def breaks(self) -> bool:
        """Whether a backward, which comes next, may fail."""
        if breaks := self._random.random() < self._drawn.breaks:
            self._points = self._random.randrange(1, POINTS)
        return breaks

    def calm(self) -> None:
        """No backward fails until another one may."""
        self._points = -1

    def recover(self) -> str:
        """What it does after a backward that has failed."""
        does = self._random.choice(["clears", "clears", "goes on", "resumes"])
        self.did[does] += 1
        return does

    def clip(self, optimizer: torch.optim.Optimizer) -> None:
        bound = 1e-3 if self._random.random() < self._drawn.clipped else 1e9
        norm = self._session.engine.clip_grad_norm_(optimizer, bound)
        self.did["clipped"] += norm > bound
        self.saw.append(torch.tensor(norm))

    def overflow(self) -> None:
        """Spoils a gradient."""
        if self._random.random() < self._drawn.overflows:
            self.did["overflowed"] += 1
            gradients = [p.grad for p in self._session.model.parameters() if p.grad is not None]
            if gradients:
                self._random.choice(gradients).mul_(float("inf"))

    def after_step(self) -> None:
        self._session.engine.end_step(self._drawn.reads)
        # What only collective calls may read.
        self._sharded = self._drawn.case.stage == 3 or (self._drawn.shards > 1 and not self._drawn.reads)
        super().after_step()
        for group in self._session.optimizer.param_groups:  # else long runs would end with weights that stand still
            group["lr"] = max(group["lr"], LEAST_RATE)

    def _edit(self) -> None:
        engine, parameter = self._session.engine, next(self._session.model.parameters())
        factor, full_precision = self._random.choice([0.8, 1.25]), self._random.random() < 0.5
        with engine.gathered([parameter], full_precision=full_precision), torch.no_grad():
            parameter.mul_(factor).clamp_(-2, 2)

    def saves(self) -> bool:
        """Whether it keeps all that a checkpoint holds."""
        if saves := self._random.random() < 0.15:
            self.did["saved"] += 1
            self.saw += left_after(self._session)
        return saves


def left_after(session: Session) -> list[Tensor]:
    """Masters, state and parameters, as a checkpoint reads them: after all updates."""
    session.engine.await_updates()
    return left_by(session)


class Training:
    """One training, by an executor; user code may end it, and resume from what was saved last."""

    def __init__(self, drawn: Drawn, executor: Executor, device: torch.device, **options: Any) -> None:
        self._drawn, self._executor, self._device, self._options = drawn, executor, device, options
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._saved: dict[str, Any] = {}
        self._begin()
        self.user = Adversary(drawn, self.session)
        self._save()

    def _begin(self) -> None:
        case = self._drawn.case
        # One of its own, as each fit has: ranks tell engines by their numbers among those of a mesh.
        self._mesh = Mesh.create(self._drawn.shards) if self._ranks > 1 else Mesh.single()
        self._scaler = DynamicLossScaler(init_scale=2.0**17, window=WINDOW) if case.overflow else None
        options = {"mesh": self._mesh, "scaler": self._scaler, "max_live_numel": self._drawn.max_live_numel}
        options |= {"activations": self._drawn.activations if self._executor.overlaps else None, **self._options}
        self.session = start(case, self._executor, self._device, **options)

    def _save(self) -> None:
        engine = self.session.engine
        self._saved = copy.deepcopy({
            "weights": module_state_dict(engine),
            "optimizers": [optimizer_state_dict(engine, updater) for updater in engine.updaters],
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
        })  # fmt: skip

    def _resume(self) -> None:
        self._begin()
        self._load()
        self.user.join(self.session)

    def _load(self) -> None:
        engine = self.session.engine
        load_module_state_dict(engine, self._saved["weights"])
        for updater, state in zip(engine.updaters, self._saved["optimizers"], strict=True):
            load_optimizer_state_dict(engine, updater, state)
        if self._scaler is not None:
            self._scaler.load_state_dict(self._saved["scaler"])

    def step(self, number: int, micro: list[list[Tensor]]) -> None:
        """One step; it is left out where it resumes in it."""
        user, optimizers = self.user, [updater.optimizer for updater in self.session.engine.updaters]
        turn = optimizers[number % 2 :][:1] if self._drawn.alternates else optimizers
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.requires_grad_(optimizer in turn)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for index, batches in enumerate(micro, start=1):
            batch, last = batches[self._mesh.world.rank].to(self._device), index == len(micro)
            with user.surviving():
                self._forward(batch)  # a failing one is done again
            if user.breaks() and not self._survives_backward(batch, last):
                does = user.recover()
                if does == "resumes":
                    self._resume()
                    return
                for optimizer in optimizers if does == "clears" else ():
                    optimizer.zero_grad()
            driver.backward(self.session.engine, self._forward(batch), last=last)
        user.saw.append(torch.tensor(self.session.engine.loss_scale))
        user.overflow()
        for optimizer in turn:
            user.clip(optimizer)
            optimizer.step()
        if user.saves():
            self._save()
        user.after_step()

    def _forward(self, batch: Tensor) -> Tensor:
        with self.session.engine.forward_context():
            return models.next_token_loss(self.session.model, batch)

    def _survives_backward(self, batch: Tensor, last: bool) -> bool:
        try:
            driver.backward(self.session.engine, self._forward(batch), last=last)
        except SurpriseError:
            return False
        finally:
            self.user.calm()
        return True


Left = tuple[list[Tensor], Counter[str]]


def train(drawn: Drawn, executor: Executor, device: torch.device, steps: int) -> Left:
    """All that training leaves, and what user code has seen and done."""
    return left_of(Training(drawn, executor, device), drawn, steps)


def left_of(training: Training, drawn: Drawn, steps: int) -> Left:
    case = drawn.case
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for step, micro in enumerate(models.make_batches(steps, case.micro, ranks, case.seed, flagged=drawn.flagged)):
        training.step(step, micro)
    user = training.user
    user.did["steps"] += steps
    return [*(seen.cpu() for seen in user.saw), *left_after(training.session)], user.did


def compare(seed: int, steps: int, kind: str) -> Counter[str]:
    """Trains twice; the second time in the order that the seed draws, another one on each rank."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return compare_drawn(seed, Drawn.by(seed, ranks), steps, kind, train, train)


def compare_drawn(
    seed: int, drawn: Drawn, steps: int, kind: str, first: Callable[..., Left], second: Callable[..., Left]
) -> Counter[str]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    device, simulated = torch.device(kind, rank), kind == sim.DEVICE
    torch.accelerator.set_device_index(rank)
    if simulated:
        torch.accelerator.synchronize()
        sim.install().schedule("eager", 0)
    expected, did = first(drawn, InlineExecutor(), device, steps)
    if simulated:
        torch.accelerator.synchronize()
        sim.install().schedule(*(("random", seed + rank) if seed % 4 else ("lazy", 0)))
    limits = LIMITS[seed % len(LIMITS)]
    late = simulated and random.Random(seed).random() < 0.7
    actual, did_too = second(drawn, (Late if late else StreamExecutor)(device, *limits), device, steps)
    assert did == did_too, f"seed {seed}: {drawn}"
    assert len(actual) == len(expected), f"seed {seed}: {drawn}"
    pairs = zip(actual, expected, strict=True)
    differing = [number for number, (one, other) in enumerate(pairs) if bits(one) != bits(other)]
    assert not differing, f"seed {seed}: tensors {differing[:5]} of {len(actual)} differ; {drawn}"
    return did


BROKEN = ("broke in a function", "broke in a tensor", "broke in a parameter", "clears", "goes on", "resumes")


@pytest.mark.slow
@pytest.mark.device("lazy")
def test_overlapped_is_inline_whatever_happens(device_pool1: DevicePool, device_pool2: DevicePool) -> None:
    for pool in (device_pool1, device_pool2):
        did, settings = Counter[str](), Counter[str]()
        for seed in range(SEEDS[pool.world_size]):
            did += pool.run(compare, seed, STEPS, pool.where.type)[0]
            drawn = Drawn.by(seed, pool.world_size)
            settings.update([f"zero{drawn.case.stage}", "alternates" if drawn.alternates else "", drawn.case.model])
            settings.update(["activations"] if drawn.activations else [])
            settings.update([] if drawn.max_live_numel is None else ["max_live_numel"])
        print(dict(did), dict(settings))
        for what in ("failed", "read", "clipped", "overflowed", "saved", *BROKEN):  # all of it has happened
            assert did[what], (pool.world_size, what)
        drawn_all = ("zero0", "zero1", "zero2", "zero3", "alternates", "optional", "activations", "max_live_numel")
        assert all(settings[what] for what in drawn_all)


def run_longer(
    first: int, seeds: int, steps: int, ranks: int = 1, compare: Callable[[int, int, str], Counter[str]] = compare
) -> None:
    """Goes on after a seed that fails, and names it."""
    server = ForkServer()
    pool = RankPool(ranks, server, timeout=60.0 + 2.0 * steps * ranks, **where.rank_options(sim.DEVICE, ranks))
    simulated = DevicePool(pool, where.Where(sim.DEVICE))
    for seed in range(first, first + seeds):
        began = time.monotonic()
        try:
            found = str(dict(simulated.run(compare, seed, steps, sim.DEVICE)[0]))
        except RankError as error:
            found = f"FAILED: {error}"
        print(f"{seed}: {time.monotonic() - began:.1f} s, {found}", flush=True)
    pool.close()
    server.close()


if __name__ == "__main__":
    from device import test_adversarial  # ranks know its functions by this name

    test_adversarial.run_longer(*map(int, sys.argv[1:]))
