"""Several ranks: gradients are reduced, and shards from host memory gathered, beside what the device computes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from device import sim
from device.test_overlap import BF16, FP16, Case, Late, bits, left_by, start, train
from device.test_update_under_forward import arrived_within_first_unit
from device.where import DevicePool, device_of_rank
from engine import driver
from helpers import models
from torch import Tensor

from lightning_zero.sharding import Mesh
from lightning_zero.storage import DONE, Executor, InlineExecutor, StreamExecutor

pytestmark = pytest.mark.simulated

MIB = 2**20
# At stage 0, and where a seed says so, each rank is a shard group of its own.
CASES = [
    Case(0, micro=2, host=False),
    Case(2, micro=3, host=False, seed=1),
    Case(2, micro=3, precision=BF16, host=False, seed=1),
    Case(0, precision=BF16, host=False, edits=False),
    Case(0, micro=2, precision=BF16, edits=False),
    Case(1, micro=2, precision=BF16, host=False),
    Case(2, micro=3, host=False),
    Case(2, micro=2, precision=FP16, host=False, overflow=True),
    Case(2, micro=2, precision=BF16),
    Case(2, micro=3, precision=BF16, sums=True),
    Case(2, micro=2, precision=BF16, fraction=0.5),
    Case(2, micro=2, model="optional", host=False),
    Case(3, micro=2, precision=BF16, host=False),
    Case(3, micro=2, precision=BF16, prefetch_mb=1.0),
    Case(3, micro=2, host=False, host_params=True),
]


def train_on_ranks(
    case: Case, shard_size: int | None, limits: tuple[int, int] | None, late: bool = False
) -> list[Tensor]:
    """With the executor that finishes everything at once, or with these limits of memory."""
    device, made = device_of_rank(sim.DEVICE), Late if late else StreamExecutor
    executor: Executor = InlineExecutor() if limits is None else made(device, *limits)
    return train(case, executor, device, Mesh.create(shard_size))


@pytest.mark.device("lazy", "random3")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_reduced_beside_backward_has_the_same_bits(device_pool2: DevicePool, case: Case) -> None:
    """Also in what user code sees, and whatever part of it may be under way."""
    shard_size = 1 if case.stage == 0 or case.seed else None
    expected = device_pool2.run(train_on_ranks, case, shard_size, None)
    for limits in ((64 * MIB, 64 * MIB), (0, 2000)):
        actual = device_pool2.run(train_on_ranks, case, shard_size, limits, case.sums)
        for left, wanted in zip(actual, expected, strict=True):
            assert len(left) == len(wanted)
            assert all(bits(one) == bits(other) for one, other in zip(left, wanted, strict=True))


def updated_in_backward(in_flight: int | None) -> list[Tensor]:
    device = device_of_rank(sim.DEVICE)
    executor: Executor = InlineExecutor() if in_flight is None else StreamExecutor(device, in_flight)
    options = {"update_in_backward": True, "skip_nonfinite": False}
    session = start(Case(2, host=False), executor, device, mesh=Mesh.create(), **options)
    begun = []
    for (batches,) in models.make_batches(2, 1, 2):

        def closure(batches: list[Tensor] = batches) -> Tensor:
            session.optimizer.zero_grad()
            with session.engine.forward_context():
                loss = models.next_token_loss(
                    session.model, batches[session.engine.placement.mesh.world.rank].to(device)
                )
            driver.backward(session.engine, loss, last=True)
            begun.append(len(session.engine.in_backward._begun))
            return loss

        session.optimizer.step(closure)
    assert min(begun) > 0
    return left_by(session)


@pytest.mark.device("lazy")
def test_an_update_in_backward_waits_for_the_reduction(device_pool2: DevicePool) -> None:
    expected, actual = (device_pool2.run(updated_in_backward, in_flight) for in_flight in (None, 64 * MIB))
    for left, wanted in zip(actual, expected, strict=True):
        assert all(map(torch.equal, left, wanted))


def changed_between_micro_batches(overlap: bool) -> list[Tensor]:
    device = device_of_rank(sim.DEVICE)
    executor: Executor = StreamExecutor(device) if overlap else InlineExecutor()
    session = start(Case(2, sums=True), executor, device, mesh=Mesh.create())
    ((first, second),) = models.make_batches(1, 2, 2)
    for batches, last in ((first, False), (second, True)):
        with session.engine.forward_context():
            loss = models.next_token_loss(session.model, batches[dist.get_rank()].to(device))
        driver.backward(session.engine, loss, last=last)
        if not last:
            for bucket in session.engine.buckets[1::2]:
                session.engine.zero_grad(bucket.parameters[:1])  # of several
            torch.accelerator.current_stream().synchronize()  # so that a reduction that is not waited for is later
            for bucket in session.engine.buckets[::2]:
                session.engine.gradients_of(bucket).scale(0.5)
            torch.accelerator.current_stream().synchronize()
    session.optimizer.step()
    return left_by(session)


@pytest.mark.device("lazy")
def test_slices_on_the_device_change_after_their_reduction(device_pool2: DevicePool) -> None:
    """Those that are summed there before they leave: they are scaled, and some of them cleared."""
    expected, actual = (device_pool2.run(changed_between_micro_batches, overlap) for overlap in (False, True))
    for left, wanted in zip(actual, expected, strict=True):
        assert all(map(torch.equal, left, wanted))


def reduced_after_backward(in_flight: int) -> list[bool]:
    """By bucket, in the order of reductions, whether it is reduced when all else that backward asks for is done."""
    device = device_of_rank(sim.DEVICE)
    executor = StreamExecutor(device, in_flight)
    session = start(Case(2, host=False), executor, device, models.TinyTransformer(depth=4), Mesh.create())
    ((batch, _),), *_ = models.make_batches(1, 1, 2)
    with session.engine.forward_context():
        loss = models.next_token_loss(session.model, batch.to(device))
    session.engine.begin_backward()
    loss.backward()
    torch.accelerator.current_stream().synchronize()
    reduced = [session.engine.gradients_of(bucket).sharded.reduced for bucket in reversed(session.engine.buckets)]
    done = [work.done() for work in reduced if work is not DONE]
    session.engine.flush()
    return done


@pytest.mark.device("lazy")
def test_the_stream_that_computes_does_not_wait_for_reductions(device_pool2: DevicePool) -> None:
    """Unless more would be under way than may be, and never for the last."""
    for in_flight in (64 * MIB, 0):
        for done in device_pool2.run(reduced_after_backward, in_flight):
            assert len(done) > 4
            assert done == [in_flight == 0] * (len(done) - 1) + [False]


def arrived_on_ranks() -> list[bool]:
    return arrived_within_first_unit(device_of_rank(sim.DEVICE), Mesh.create())


@pytest.mark.device("lazy")
def test_a_unit_waits_for_no_parameters_of_the_next(device_pool2: DevicePool) -> None:
    """Those that stage 3 copies from the host, and gathers, arrive while it computes."""
    assert device_pool2.run(arrived_on_ranks) == [[False], [False]]
