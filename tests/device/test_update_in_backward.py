"""Updates that begin in backward: on a device too they change no bit, and what the next forward needs first is last.

A longer run of random trainings, of 200 seeds from 1000 on, with 50 steps each, on two ranks (one by default):
`PYTHONPATH=tests python -P -m device.test_update_in_backward 1000 200 50 2`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device import sim
from device.test_adversarial import Drawn, Left, SurpriseError, Training, compare_drawn, left_of, run_longer
from device.test_overlap import BF16, FP32, STEPS, Case, Late, bits, left_by, start
from device.where import DevicePool
from engine import driver
from helpers import models
from torch import Tensor

from lightning_zero.storage import Executor, InlineExecutor, Lane, StreamExecutor, Ticket

CASES = [
    Case(1, micro=3, precision=BF16),
    Case(2, precision=BF16),
    Case(2, precision=BF16, native="off"),
    Case(2, micro=2, precision=BF16, split=True),
    Case(2, micro=2, precision=BF16, model="optional"),
    Case(2, precision=BF16, fraction=0.5),
    Case(2, host=False),
    Case(3, precision=BF16, prefetch_mb=1.0),
    Case(3, micro=2, precision=BF16, split=True),
    Case(3, host=False),
]


def train(case: Case, executor: Executor, device: torch.device, in_backward: bool) -> tuple[list[Tensor], int]:
    """What training leaves, and how many updates began in backward."""
    session = start(case, executor, device, skip_nonfinite=False, update_in_backward=in_backward)
    engine, begun = session.engine, 0
    for micro in models.make_batches(STEPS, case.micro, 1, flagged=models.by_turns):

        def closure(micro: list[list[Tensor]] = micro) -> Tensor:  # type: ignore[assignment]
            nonlocal begun
            session.optimizer.zero_grad()
            for index, (batch,) in enumerate(micro, start=1):
                with engine.forward_context():
                    loss = models.next_token_loss(session.model, batch.to(device))
                driver.backward(engine, loss, last=index == len(micro))
            begun += len(engine.in_backward._begun)
            return loss

        session.optimizer.step(closure)
        engine.end_step(reads=False)
    engine.settle()
    return left_by(session), begun


def assert_no_bit_changes(case: Case, device: torch.device, seed: int) -> None:
    expected, none = train(case, InlineExecutor(), device, in_backward=False)
    limits = [(64 << 20, 64 << 20), (500, 2000), (0, 0)][(seed + CASES.index(case)) % 3]
    executor = Late(device, *limits) if device.type == sim.DEVICE else StreamExecutor(device, *limits)
    actual, some = train(case, executor, device, in_backward=True)
    assert (none, some > 0) == (0, True)
    assert [bits(values) for values in actual] == [bits(values) for values in expected]


@pytest.mark.device("lazy")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_updates_in_backward_have_the_bits_of_the_ordinary_step(device: torch.device, case: Case) -> None:
    assert_no_bit_changes(case, device, 0)


@pytest.mark.slow
@pytest.mark.device("lazy")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_so_they_have_in_every_schedule(device: torch.device, case: Case) -> None:
    for seed in range(4):
        if device.type == sim.DEVICE:
            torch.accelerator.synchronize()
            sim.install().schedule("random", seed)
        assert_no_bit_changes(case, device, seed)


@pytest.mark.device("lazy")
def test_a_part_of_the_work_is_left_to_the_next_forward_and_comes_in_its_order(device: torch.device) -> None:
    """A quarter, spread over the model: there is work beside all of forward, and before it."""
    order: list[str] = []

    class Noting(StreamExecutor):
        def submit(self, job: Callable[[], object], lane: Lane, what: str, after: Sequence[Ticket] = ()) -> Ticket:
            if what.startswith("the update of"):
                order.append(what.removeprefix("the update of "))
            return super().submit(job, lane, what, after)

    model, options = models.TinyTransformer(depth=8), {"skip_nonfinite": False, "update_in_backward": True}
    session = start(CASES[1], Noting(device), device, model, **options)
    ((batch,),), *_ = models.make_batches(1, 1, 1)

    def closure() -> Tensor:
        with session.engine.forward_context():
            loss = models.next_token_loss(session.model, batch.to(device))
        driver.backward(session.engine, loss)
        order.append("the step")
        return loss

    session.optimizer.step(closure)
    names = [bucket.name for bucket in session.engine.buckets]
    early, late = order[: order.index("the step")], order[order.index("the step") + 1 :]
    assert sorted([*early, *late]) == sorted(names)
    assert early == [name for name in reversed(names) if name not in late]
    assert late == [name for name in names if name in late]
    assert late[0] == names[0]
    numbers = [names.index(name) for name in late]
    assert all(2 <= after - before <= 5 for before, after in pairwise(numbers))
    assert len(names) - numbers[-1] <= 5


# ------------------------------------------------------------------------------------------------- whatever happens


class Closing(Training):
    """Backward runs in the closure of the step. After one that fails user code loads what was saved last."""

    def step(self, number: int, micro: list[list[Tensor]]) -> None:
        user, session = self.user, self.session

        def closure() -> Tensor:
            session.optimizer.zero_grad()
            for index, batches in enumerate(micro, start=1):
                batch = batches[self._mesh.world.rank].to(self._device)
                with user.surviving():
                    self._forward(batch)
                loss = self._forward(batch)
                user.breaks()
                driver.backward(session.engine, loss, last=index == len(micro))
                user.calm()
            user.did["began early"] += len(session.engine.in_backward._begun)
            return loss

        try:
            session.optimizer.step(closure)
        except SurpriseError:
            user.calm()
            self._recover()
            return
        user.saw.append(torch.tensor(session.engine.outcomes.last(session.optimizer).grad_norm))  # type: ignore[union-attr]
        if user.saves():
            self._save()
        user.after_step()

    def _recover(self) -> None:
        """By another engine, or by the same one."""
        if self.user._random.random() < 0.5:
            self.user.did["resumes"] += 1
            self._resume()
        else:
            self.user.did["loads"] += 1
            self._load()


def train_in_closures(early: bool, drawn: Drawn, executor: Executor, device: torch.device, steps: int) -> Left:
    options = {"skip_nonfinite": False, "update_in_backward": early}
    return left_of(Closing(drawn, executor, device, **options), drawn, steps)


def compare(seed: int, steps: int, kind: str) -> Counter[str]:
    """Updates in backward, in the order that the seed draws, against those of the ordinary step."""
    drawn = Drawn.by(seed, dist.get_world_size() if dist.is_initialized() else 1)
    precision = FP32 if drawn.case.overflow else drawn.case.precision
    split = drawn.case.split and not drawn.case.overflow
    case = dataclasses.replace(drawn.case, precision=precision, overflow=False, split=split, optimizers=1)
    drawn = dataclasses.replace(drawn, case=case, alternates=False)
    early: list[Counter[str]] = []

    def train_early(*args: Any) -> Left:
        left, did = train_in_closures(True, *args)
        early.append(Counter({"began early": did.pop("began early", 0)}))
        return left, did

    did = compare_drawn(seed, drawn, steps, kind, without_early, train_early)
    return did + early[0]


def without_early(*args: Any) -> Left:
    left, did = train_in_closures(False, *args)
    assert not did.pop("began early", 0)
    return left, did


@pytest.mark.simulated
@pytest.mark.slow
@pytest.mark.device("lazy")
def test_updates_in_backward_are_those_of_the_step_whatever_happens(
    device_pool1: DevicePool, device_pool2: DevicePool
) -> None:
    for pool, seeds in ((device_pool1, 24), (device_pool2, 12)):
        did = Counter[str]()
        for seed in range(seeds):
            did += pool.run(compare, seed, STEPS, pool.where.type)[0]
        for what in ("began early", "failed", "read", "saved", "resumes", "loads"):  # all of it has happened
            assert did[what], (pool.world_size, what, did)


if __name__ == "__main__":
    from device import test_update_in_backward  # ranks know its functions by this name

    run_longer(*map(int, sys.argv[1:]), compare=test_update_in_backward.compare)
