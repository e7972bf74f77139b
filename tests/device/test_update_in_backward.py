"""Updates that begin in backward: on a device too they change no bit, and what the next forward needs first is last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from device import sim
from device.test_overlap import BF16, STEPS, Case, Late, bits, left_by, start
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
    for seed in range(20):
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
