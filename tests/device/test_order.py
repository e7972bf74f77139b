"""What waits for what, where overlapping work would seldom show that it does not: failures, other layouts, groups."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device import sim
from device.test_overlap import BF16, Case, Late, left_by, start
from device.test_update_under_forward import Held, backward
from device.where import DevicePool, device_of_rank
from engine.driver import Session
from helpers import models
from storage.test_executor import Deferred
from torch import Tensor

import lightning_zero
from lightning_zero.checkpoint.state import load_module_state_dict, module_state_dict
from lightning_zero.sharding import BucketState, Group, Mesh
from lightning_zero.storage import InlineExecutor, Lane, StreamExecutor, Ticket
from lightning_zero.update import make_updater
from lightning_zero.update.native import MasterLayout


@torch.no_grad()
def evaluate(session: Session, device: torch.device) -> Tensor:
    with session.engine.forward_context():
        seen: Tensor = session.model(torch.zeros(2, 4, dtype=torch.long, device=device))
    return seen


def load_all(session: Session, first: float = -1.0, last: float = 1.0) -> None:
    for bucket in session.engine.buckets:
        for index, parameter in enumerate(bucket.parameters):
            bucket.load({index: torch.linspace(first, last, parameter.numel()).view(parameter.shape)})


@pytest.mark.device("lazy")
def test_what_is_loaded_does_not_change_what_is_still_being_fetched(device: torch.device) -> None:
    """By a lane, which waits for updates."""
    shown = []
    for executor in (InlineExecutor(), Late(device)):
        session = start(Case(3), executor, device)
        backward(session, device)
        session.optimizer.step()
        seen = evaluate(session, device)  # by the device, some time
        load_all(session)
        shown.append(seen.cpu())
    assert torch.equal(*shown)


def step(session: Session) -> None:
    session.optimizer.step()


def fail(*_: Any) -> None:
    raise ArithmeticError


@pytest.mark.device("lazy", "eager")
@pytest.mark.parametrize("act", [step, load_all])
def test_a_gather_that_has_begun_ends_before_its_shard_changes(
    device: torch.device, act: Callable[[Session], object]
) -> None:
    """That of a unit which was to come after one whose forward has failed."""
    left = []
    for make, fails in ((InlineExecutor, False), (InlineExecutor, True), (partial(Late, device), True)):
        torch.manual_seed(0)
        session = start(Case(3), make(), device, models.TinyTransformer(depth=4))
        backward(session, device)
        if fails:
            handle = session.model.blocks[0].register_forward_hook(fail)
            with pytest.raises(ArithmeticError), session.engine.forward_context():
                session.model(torch.zeros(2, 4, dtype=torch.long, device=device))
            handle.remove()
            assert BucketState.GATHERING in {bucket.state for bucket in session.engine.buckets}
        act(session)
        left.append([evaluate(session, device), *left_by(session)])
    for other in left[1:]:
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(other, left[0], strict=True))


@pytest.mark.device("lazy")
@pytest.mark.parametrize("layout", ["fp32", "split"])
def test_masters_get_another_layout_after_the_update_and_are_seen_at_once(
    device: torch.device, layout: MasterLayout
) -> None:
    """Where a parameter joins an optimizer that needs one; halves are rounded otherwise in it."""
    left, half = [], 1 + 2.0**-8
    for executor in (InlineExecutor(), Late(device)):
        session = start(Case(2, precision=BF16), executor, device)
        engine, (first, joins, *_), last = session.engine, session.model.parameters(), session.model.blocks[1].down.bias
        assert engine.bucket_of(first) is engine.bucket_of(joins) is not engine.bucket_of(last)
        load_all(session, half, half)
        other = lightning_zero.CPUAdamW([last], lr=1e-2, master_layout=layout)
        optimizers = [torch.optim.AdamW([first, joins], lr=1e-2), other]
        engine.attach([make_updater(optimizer, engine) for optimizer in optimizers])
        assert last.detach().clone().cpu().eq(half + 2.0**-8).all()
        backward(session, device)
        optimizers[0].step()
        assert all(bucket.updating for bucket in engine.buckets[:1]) == engine.placement.executor.overlaps
        other.add_param_group({"params": [joins]})
        assert last.grad is not None
        last.grad.mul_(2)  # so that all of them are looked at again
        other.step()
        engine.settle()
        left.append([*left_by(session), *(p.detach().cpu() for p in session.model.parameters())])
    assert all(map(torch.equal, *left))


@pytest.mark.device("lazy")
def test_a_gradient_that_is_not_finite_is_named_when_it_has_come(device: torch.device) -> None:
    session = start(Case(2), StreamExecutor(device), device)
    session.model.positions.weight.register_hook(lambda gradient: gradient * torch.inf)
    backward(session, device)
    with pytest.warns(UserWarning, match=r"in the gradient of positions\.weight \("):
        session.optimizer.step()


# -------------------------------------------------------------------------------------------------------- several ranks


class Noting(Deferred):
    """Copies between host memory and the device as late as it may, and notes lanes and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[tuple[Lane, tuple[int, ...]]] = []

    def fetch(self, target: Tensor, source: Tensor, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        self.moved.append((Lane.H2D, tuple(source.shape)))
        return super().fetch(target, source, what, after)

    def commit(self, target: Tensor, source: Tensor, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        self.moved.append((Lane.D2H, tuple(source.shape)))
        return super().commit(target, source, what, after)


@pytest.mark.device("lazy")
def test_what_user_code_moves_goes_through_the_executor(device: torch.device) -> None:
    executor = Noting()
    session = start(Case(2), executor, device)
    parameter = session.model.blocks[0].up.weight
    shape, twice = tuple(parameter.shape), torch.full(parameter.shape, 2.0, device=device)
    executor.moved.clear()
    parameter.grad = torch.ones(shape)  # on the host, and its place is on the device until it is reduced
    assert executor.moved == [(Lane.H2D, shape)]
    backward(session, device)
    before = lightning_zero.full_grad(parameter)
    executor.moved.clear()
    parameter.grad.mul_(twice).mul_(twice[0, 0])
    assert executor.moved == [(Lane.D2H, (parameter.numel(),)), (Lane.D2H, ())]
    assert torch.equal(lightning_zero.full_grad(parameter), before * 4)
    kept = parameter.grad.clone()
    session.optimizer.step()
    executor.moved.clear()
    state = lightning_zero.full_optimizer_state(parameter)
    assert executor.moved.count((Lane.H2D, shape)) == 2
    torch.testing.assert_close(state["exp_avg"], before * 0.4)
    # User code may keep a gradient, which does not keep the executor.
    session.engine.release()
    gone = weakref.ref(executor)
    del session, executor, parameter
    gc.collect()
    assert gone() is None
    assert kept.mul(twice).sum().item() == 2 * kept.sum().item()


def ask_in_turn() -> list[tuple[str, list[str]]]:
    device = device_of_rank(sim.DEVICE)
    groups = [Group.create([[0, 1]]) for _ in range(3)]
    mesh, executor, found = Mesh(*groups), StreamExecutor(device), []
    asks: dict[str, Callable[[Group], object]] = {
        "objects": lambda group: group.all_gather_object(1, "objects"),
        "an object": lambda group: group.broadcast_object(1, "an object"),
        "tensors": lambda group: group.all_reduce_(torch.ones(2, device=device), "tensors"),
        "the digests": lambda group: mesh.digests(),
    }
    for name, ask in asks.items():
        for group in groups:
            order = list[str]()

            def job(order: list[str] = order) -> None:
                time.sleep(0.05)
                order.append("lane")

            mesh.submit(executor, job, Lane.COMM, "a")
            ask(group)
            order.append("training")
            found.append((name, order))
    return found


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_whatever_a_group_is_asked_for_comes_after_what_a_lane_asks_of_any(device_pool2: DevicePool) -> None:
    for found in device_pool2.run(ask_in_turn):
        assert len(found) == 12
        assert all(order == ["lane", "training"] for _, order in found), found


def write_back_while_one_rank_updates() -> list[Tensor]:
    """Of two that hold all of it: what rank 0 has not updated must not become that of rank 1."""
    device, rank = device_of_rank(sim.DEVICE), dist.get_rank()
    executor = Held(device)
    session = start(Case(1), executor, device, mesh=Mesh.create(1))
    with session.engine.gathered(session.model.parameters(), writeback=True):
        backward(session, device)
        executor.word = "the update of" if rank == 0 else "nothing"
        session.optimizer.step()
        if rank == 0:
            threading.Timer(0.3, executor.gate.set).start()
        else:
            for bucket in session.engine.buckets:
                bucket.moving.synchronize()  # which the bucket does not know
    session.engine.settle()
    return [*(p.detach().clone().cpu() for p in session.model.parameters()), *left_by(session)]


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_what_is_written_back_has_been_updated(device_pool2: DevicePool) -> None:
    first, second = device_pool2.run(write_back_while_one_rank_updates)
    assert all(map(torch.equal, first, second))


def load_and_read_alone() -> tuple[list[Tensor], list[Tensor]]:
    """Parameters as they were saved, when they were stale, and as each rank reads them after a load."""
    device = device_of_rank(sim.DEVICE)
    session = start(Case(2, precision=BF16), StreamExecutor(device), device, mesh=Mesh.create())
    engine, steps = session.engine, 2
    for number in range(steps):
        backward(session, device)
        session.optimizer.step()
        engine.end_step(reads=False)
        assert any(bucket.deferred for bucket in engine.buckets)
        if number == 0:
            saved = copy.deepcopy(module_state_dict(engine))
    load_module_state_dict(engine, saved)
    names = [name for name, _ in session.model.named_parameters()]
    loaded = [parameter.detach().clone() for parameter in session.model.parameters()]
    return [saved[name].bfloat16() for name in names], [values.cpu() for values in loaded]


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_what_is_loaded_can_be_read_by_one_rank_alone(device_pool2: DevicePool) -> None:
    for saved, loaded in device_pool2.run(load_and_read_alone):
        assert all(map(torch.equal, saved, loaded))
