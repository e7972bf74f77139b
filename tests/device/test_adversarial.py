"""Overlapped training has the bits of inline training, whatever is trained, in whatever order things happen.

Each seed draws what is trained, the order in which streams and threads run, and what user code does meanwhile. A longer
run, of 200 seeds from 1000 on, with 50 steps each: `PYTHONPATH=tests python -P -m device.test_adversarial 1000 200 50`.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from device import sim, where
from device.test_overlap import BF16, FP16, FP32, LIMITS, Case, Late, User, bits, left_by, start
from device.where import DevicePool
from engine import driver
from engine.driver import Session
from helpers import models
from torch import Tensor, nn

from lightning_zero.storage import Executor, InlineExecutor, StreamExecutor

SEEDS, STEPS = 60, 5
LEAST_RATE = 1e-3
PRECISIONS = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
CLIPPED = (0.0, 0.01, 0.5, 1.0)  # of the steps


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

    @classmethod
    def by(cls, seed: int) -> Drawn:
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
        return cls(case, clipped, overflows, fails, optimizers > 1 and draw.random() < 0.5)


class Adversary(User):
    """Reads a weight in the middle of a forward, and fails there, too; clips as often as was drawn."""

    def __init__(self, drawn: Drawn, session: Session) -> None:
        super().__init__(drawn.case, session)
        self._drawn = drawn
        self.did: Counter[str] = Counter()
        self._failing = False
        # Inside a unit: outside it stage 3 has freed the parameters.
        for block in [module for module in session.model.modules() if type(module) is models.Block]:
            for module in (block.qkv, block.up):
                module.register_forward_pre_hook(self._in_forward)
                module.register_forward_hook(self._in_forward)

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

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Goes on after a failure of its own."""
        self._failing = self._random.random() < self._drawn.fails
        with suppress(SurpriseError):
            yield
        self._failing = False

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
        super().after_step()
        for group in self._session.optimizer.param_groups:  # else long runs would end with weights that stand still
            group["lr"] = max(group["lr"], LEAST_RATE)

    def _edit(self) -> None:
        engine, parameter = self._session.engine, next(self._session.model.parameters())
        factor, full_precision = self._random.choice([0.8, 1.25]), self._random.random() < 0.5
        with engine.gathered([parameter], full_precision=full_precision), torch.no_grad():
            parameter.mul_(factor).clamp_(-2, 2)

    def save(self) -> None:
        """Keeps all that a checkpoint holds."""
        if self._random.random() < 0.15:
            self.did["saved"] += 1
            self.saw += left_after(self._session)


def left_after(session: Session) -> list[Tensor]:
    """Masters, state and parameters, as a checkpoint reads them: after all updates."""
    session.engine.await_updates()
    return left_by(session)


def train(drawn: Drawn, executor: Executor, device: torch.device, steps: int) -> tuple[list[Tensor], Counter[str]]:
    """All that training leaves, and what user code has seen and done."""
    case = drawn.case
    session = start(case, executor, device)
    user = Adversary(drawn, session)
    engine, optimizers = session.engine, [updater.optimizer for updater in session.engine.updaters]
    owners = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
    for step, micro in enumerate(models.make_batches(steps, case.micro, 1, case.seed, flagged=models.by_turns)):
        turn = optimizers[step % 2 :][:1] if drawn.alternates else optimizers
        for optimizer, parameters in zip(optimizers, owners, strict=True):
            for parameter in parameters:
                parameter.requires_grad_(optimizer in turn)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for index, (batch,) in enumerate(micro, start=1):
            with user.surviving(), engine.forward_context():
                models.next_token_loss(session.model, batch.to(device))  # a failing one is done again
            with engine.forward_context():
                loss = models.next_token_loss(session.model, batch.to(device))
            driver.backward(engine, loss, last=index == len(micro))
        user.saw.append(torch.tensor(engine.loss_scale))
        user.overflow()
        for optimizer in turn:
            user.clip(optimizer)
            optimizer.step()
        user.save()
        user.after_step()
    user.did["steps"] += steps
    return [*(seen.cpu() for seen in user.saw), *left_after(session)], user.did


def compare(seed: int, steps: int, kind: str) -> Counter[str]:
    """Trains twice; the second time in the order that the seed draws."""
    drawn, device, simulated = Drawn.by(seed), torch.device(kind, 0), kind == sim.DEVICE
    if simulated:
        torch.accelerator.synchronize()
        sim.install().schedule("eager", 0)
    expected, did = train(drawn, InlineExecutor(), device, steps)
    if simulated:
        torch.accelerator.synchronize()
        sim.install().schedule(*(("random", seed) if seed % 4 else ("lazy", 0)))
    limits = LIMITS[seed % len(LIMITS)]
    late = simulated and random.Random(seed).random() < 0.7
    actual, did_too = train(drawn, (Late if late else StreamExecutor)(device, *limits), device, steps)
    assert did == did_too, f"seed {seed}: {drawn}"
    assert len(actual) == len(expected), f"seed {seed}: {drawn}"
    pairs = zip(actual, expected, strict=True)
    differing = [number for number, (one, other) in enumerate(pairs) if bits(one) != bits(other)]
    assert not differing, f"seed {seed}: tensors {differing[:5]} of {len(actual)} differ; {drawn}"
    return did


@pytest.mark.slow
@pytest.mark.device("lazy")
def test_overlapped_is_inline_whatever_happens(device_pool1: DevicePool) -> None:
    did, settings = Counter[str](), Counter[str]()
    for seed in range(SEEDS):
        did += device_pool1.run(compare, seed, STEPS, device_pool1.where.type)[0]
        drawn = Drawn.by(seed)
        settings.update([f"zero{drawn.case.stage}", "alternates" if drawn.alternates else "", drawn.case.model])
    print(dict(did), dict(settings))
    assert all(did[what] for what in ("failed", "read", "clipped", "overflowed", "saved"))  # all of it has happened
    assert all(settings[what] for what in ("zero0", "zero1", "zero2", "zero3", "alternates", "optional"))


def run_longer(first: int, seeds: int, steps: int) -> None:
    """Goes on after a seed that fails, and names it."""
    where.prepare_rank()
    for seed in range(first, first + seeds):
        began = time.process_time()
        with sim.scheduled(sim.LAZY):
            try:
                found = str(dict(compare(seed, steps, sim.DEVICE)))
            except Exception as error:  # noqa: BLE001  (it is printed, and the next seed follows)
                found = f"FAILED: {type(error).__name__}: {error}"
        print(f"{seed}: {time.process_time() - began:.1f} s, {found}", flush=True)


if __name__ == "__main__":
    run_longer(*map(int, sys.argv[1:]))
