"""The update goes on under the next forward: who waits for it, who does not, and what becomes of one that fails."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from device import sim
from device.test_overlap import BF16, Case, Late, left_by, start
from device.where import DevicePool
from engine import driver
from engine.driver import Session
from helpers import models
from storage.test_executor import Deferred
from strategy.fits import Lit, Recipe, make_trainer
from strategy.test_manual import Manual
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.shards import masters
from lightning_zero.checkpoint.state import load_optimizer_state_dict, module_state_dict, optimizer_state_dict
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.sharding import BucketState, Mesh
from lightning_zero.sharding.bucket import GATHERS
from lightning_zero.sharding.freed import MarkedParameter
from lightning_zero.sharding.pending import PendingParameter
from lightning_zero.storage import DeviceStore, Executor, HostStore, InlineExecutor, Lane, StreamExecutor, Ticket
from lightning_zero.update import Updater
from lightning_zero.update.view import UpdateView


class Held(StreamExecutor):
    """Jobs whose names contain a word, and those behind them, wait for a gate."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.word, self.gate = "nothing", threading.Event()

    def _in_thread(self, lane: Lane, job: Callable[[], object], what: str, after: Sequence[Ticket]) -> Any:
        def held() -> None:
            if self.word in what:
                assert self.gate.wait(120)
            job()

        return super()._in_thread(lane, held, what, after)


def backward(session: Session, device: torch.device) -> None:
    ((batch,),), *_ = models.make_batches(1, 1, 1)
    with session.engine.forward_context():
        loss = models.next_token_loss(session.model, batch.to(device))
    driver.backward(session.engine, loss, last=True)


@pytest.mark.device("lazy", "eager")
@pytest.mark.parametrize(("stage", "persistent"), [(1, 0), (2, 0), (3, 0), (3, 50)])
def test_a_unit_waits_for_no_later_update(device: torch.device, stage: int, persistent: int) -> None:
    """Nor for that of the next unit, which stage 3 begins to gather, nor do small parameters that stay unsharded."""
    executor, options = Held(device), {"persistence_numel": persistent}
    session = start(Case(stage, precision=BF16), executor, device, models.TinyTransformer(depth=4), **options)
    backward(session, device)
    weight = session.model.blocks[1].down.weight
    later = session.engine.bucket_of(weight)
    assert later is not None
    executor.word = f"the update of {later.name}"
    session.optimizer.step()
    seen, used = [], []

    def after_first_unit(*_: Any) -> None:
        seen.append(later.updating)
        time.sleep(0.1)  # in which nobody may gather what is not updated
        executor.gate.set()

    handles = [
        session.model.blocks[0].register_forward_hook(after_first_unit),
        session.model.blocks[1].register_forward_pre_hook(lambda *_: used.append(weight.detach().clone())),
    ]
    backward(session, device)
    for handle in handles:
        handle.remove()
    assert seen == [True]
    assert torch.equal(used[0], session.engine.full_param(weight).to(used[0].dtype))
    assert not any(bucket.updating for bucket in session.engine.buckets)


def arrived_within_first_unit(device: torch.device, mesh: Mesh | None = None) -> list[bool]:
    """Whether the parameters of the second unit, which stage 3 copies from the host, are there when the first ends."""
    model = models.TinyTransformer(depth=4)
    session = start(Case(3, precision=BF16), StreamExecutor(device), device, model, mesh)
    following = session.engine.bucket_of(model.blocks[1].down.weight)
    assert following is not None
    arrived = []

    def within_first_unit(*_: Any) -> None:
        torch.accelerator.current_stream().synchronize()
        arrived.append(following.moving.done())

    model.blocks[0].down.register_forward_hook(within_first_unit)
    with session.engine.forward_context():
        model(torch.zeros(2, 4, dtype=torch.long, device=device))
    assert following.state is BucketState.SHARDED  # it was gathered, and freed
    return arrived


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_a_unit_waits_for_no_parameters_of_the_next(device: torch.device) -> None:
    """Those that are copied ahead arrive while it computes."""
    assert arrived_within_first_unit(device) == [False]


class Filled(StreamExecutor):
    """Notes the elements that are rounded on the host for the device, by piece."""

    def __init__(self, device: torch.device, staging_bytes: int) -> None:
        super().__init__(device, staging_bytes=staging_bytes)
        self.pieces: list[int] = []

    def filling(self, target: Tensor, what: str) -> AbstractContextManager[Tensor]:
        self.pieces.append(target.numel())
        return super().filling(target, what)


@pytest.mark.device("lazy")
def test_updated_parameters_leave_in_pieces_of_the_memory_in_passing(device: torch.device) -> None:
    """So that the next piece is updated while one is copied, in a bucket that is larger than that memory."""
    executor = Filled(device, staging_bytes=4 * 256 * 2)
    session = start(Case(2, precision=BF16), executor, device, bucket_size_mb=1.0)
    backward(session, device)
    session.optimizer.step()
    session.engine.await_updates()
    assert max(executor.pieces) == 256
    assert sum(executor.pieces) == sum(bucket.shard.numel for bucket in session.engine.buckets) > 4 * 256
    assert executor.staged_bytes <= executor.staging_bytes


@pytest.mark.device("lazy")
@pytest.mark.parametrize("stage", [2, 3])
def test_an_average_waits_for_the_update_and_nobody_for_the_average(device: torch.device, stage: int) -> None:
    """Until the average is asked for, or what it is made of is changed."""
    executor = Held(device)
    session = start(Case(stage), executor, device)
    engine, first = session.engine, session.engine.buckets[0]
    shadow = engine.make_shadow()
    backward(session, device)
    executor.word = first.name
    session.optimizer.step()
    shadow.update(lambda second, live: second.lerp_(live, 0.5))
    assert first.updating
    executor.word = "the second values"  # these wait for the next opening
    executor.gate.set()
    first.await_update()
    updated = first.master.read(0, first.layout.shard_numel).clone()
    assert not torch.equal(shadow.shards[0], updated)
    executor.gate.clear()
    shadow.update(lambda second, live: second.copy_(live))
    index = first.segments[0].param
    threading.Timer(0.2, executor.gate.set).start()
    first.load({index: torch.zeros(first.parameters[index].shape)})
    assert torch.equal(shadow.shards[0], updated)


def full(parameter: nn.Parameter) -> Tensor:
    return parameter.detach().clone()


READS: dict[str, Callable[[nn.Module, nn.Parameter], Any]] = {
    "an operator": lambda model, p: p * 2,
    "a list": lambda model, p: torch.stack(torch._foreach_mul([p, p], 2)),
    "detach": lambda model, p: p.detach(),
    "data": lambda model, p: p.data,
    "to": lambda model, p: p.to("cpu"),
    "state_dict": lambda model, p: next(iter(model.state_dict().values())),
    "deepcopy of the module": lambda model, p: next(copy.deepcopy(model).parameters()),
    "deepcopy": lambda model, p: copy.deepcopy(p),
    "pickle": lambda model, p: pickle.loads(pickle.dumps(p.cpu() if p.is_cpu else nn.Parameter(p.cpu()))),
    "save": lambda model, p: saved(p),
    "in place": lambda model, p: in_place(p),
    "assigned": lambda model, p: assigned(p),
    "repr": lambda model, p: torch.tensor(len(repr(p))),
    "a call of a part": lambda model, p: model.tokens(torch.arange(4, device=p.device)),
    "a functional call": lambda model, p: torch.func.functional_call(
        model.tokens, dict(model.tokens.named_parameters()), (torch.arange(4, device=p.device),)
    ),
    "tolist": lambda model, p: torch.tensor(p.tolist()),
    "item": lambda model, p: torch.tensor(p[0, 0].item()),
    "numpy": lambda model, p: torch.from_numpy(p.detach().cpu().numpy()),
}


def saved(parameter: nn.Parameter) -> Tensor:
    file = io.BytesIO()
    torch.save(parameter, file)
    loaded: Tensor = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    return loaded


@torch.no_grad()
def in_place(parameter: nn.Parameter) -> Tensor:
    return parameter.add_(1).clone()


def assigned(parameter: nn.Parameter) -> Tensor:
    parameter.data = parameter.data + 1
    return parameter.detach().clone()


@pytest.mark.device("lazy")
def test_whoever_reads_a_parameter_waits_for_its_update(device: torch.device) -> None:
    """And finds an ordinary parameter; whoever reads metadata does not wait."""
    wrong = []
    for name, read in READS.items():
        shown = []
        for executor in (InlineExecutor(), Late(device)):
            session = start(Case(2), executor, device)
            backward(session, device)
            session.optimizer.step()
            parameter = next(session.model.parameters())
            before = type(parameter), parameter.shape, parameter.dtype, parameter.requires_grad, parameter.is_leaf
            assert isinstance(parameter, PendingParameter) == isinstance(executor, Late)
            assert parameter.grad is not None
            shown.append([full(read(session.model, parameter)).cpu(), *before[1:]])
            assert not isinstance(parameter, MarkedParameter)
            assert not vars(parameter)
            session.engine.settle()
            shown[-1] += [full(p).cpu() for p in session.model.parameters()]
        expected, actual = shown
        same = [torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(actual, expected, strict=True)]
        wrong += [] if all(same) else [name]
    assert not wrong


def left_by_zeros(case: Case, executor: Executor, device: torch.device) -> list[Tensor]:
    """Of a step, when other gradients have come before anybody has waited for it."""
    session = start(case, executor, device)
    backward(session, device)
    session.optimizer.step()
    session.optimizer.zero_grad()
    session.engine.flush()  # of what has no gradient: zeros
    torch.accelerator.synchronize()  # they have come, whatever the host does
    session.engine.await_updates()
    return left_by(session)


@pytest.mark.device("lazy")
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_that_an_update_reads_are_not_overwritten(device: torch.device, stage: int) -> None:
    """Nor by a backward of which no forward has waited for the update."""
    left = [left_by_zeros(Case(stage), executor, device) for executor in (InlineExecutor(), Late(device))]
    assert all(map(torch.equal, *left))


@pytest.mark.device("lazy")
def test_an_update_does_not_change_what_is_still_being_fetched(device: torch.device) -> None:
    session = start(Case(3), StreamExecutor(device), device)
    backward(session, device)
    parameters = [*session.model.parameters()]
    before = [session.engine.full_param(parameter).cpu() for parameter in parameters]
    with session.engine.gathered(parameters):
        seen = [parameter.detach().clone() for parameter in parameters]  # by the device, some time
    session.optimizer.step()
    session.engine.await_updates()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(seen, before, strict=True))


def read_state(session: Session) -> list[Tensor]:
    states = session.updater.gather_state(session.engine.buckets[0])
    return [values for state in states.values() for values in state.values()]


def load_state(session: Session) -> list[Tensor]:
    bucket = session.engine.buckets[0]
    for index, parameter in enumerate(bucket.parameters):
        average = torch.full(parameter.shape, 0.5)
        session.updater.load(bucket, index, {"step": torch.tensor(7.0), "exp_avg": average, "exp_avg_sq": average})
    return []


def clear_state(session: Session) -> list[Tensor]:
    session.optimizer.state.clear()
    session.engine.adopt_state(session.optimizer)
    return []


def load_no_state(session: Session) -> list[Tensor]:
    """As before the first step."""
    before = torch.optim.AdamW(models.make_model("transformer").parameters(), lr=1e-2).state_dict()
    load_optimizer_state_dict(session.engine, session.updater, before)
    return []


def make_average(session: Session) -> list[Tensor]:
    return [second.clone() for second in session.engine.make_shadow().shards]


def swap_average(session: Session) -> list[Tensor]:
    shadow = session.engine.make_shadow()
    shadow.swap()
    return [second.clone() for second in shadow.shards]


def load_after_averages(session: Session) -> list[Tensor]:
    """Of which the second one does not work in the lane of the host."""
    device = session.engine.placement.device
    shadows = session.engine.make_shadow(), session.engine.make_shadow(DeviceStore(device))
    bucket = session.engine.buckets[0]
    bucket.load({0: torch.zeros(bucket.parameters[0].shape)})
    return [second.clone() for shadow in shadows for second in shadow.shards]


def load_average(session: Session) -> list[Tensor]:
    shadow, bucket = session.engine.make_shadow(), session.engine.buckets[0]
    shadow.load(bucket, 0, torch.zeros(bucket.parameters[0].shape))
    return [second.clone() for second in shadow.shards]


def edit(session: Session) -> list[Tensor]:
    """A parameter, in place."""
    first = next(session.model.parameters())
    with session.engine.gathered([first]), torch.no_grad():
        first.mul_(2)
    return []


def read_lazily(session: Session) -> list[Tensor]:
    """What was made before another step, and gathers values when they are read."""
    engine = session.engine
    states = module_state_dict(engine), optimizer_state_dict(engine, session.updater)
    backward(session, engine.placement.device)
    session.optimizer.step()
    pieces = [values.gather_piece(0) for values in masters(engine, None)]
    return [*pieces, *(leaf for leaf in tree_leaves(copy.deepcopy(states)) if isinstance(leaf, Tensor))]


ACTS = [
    read_state,
    load_state,
    load_no_state,
    clear_state,
    make_average,
    swap_average,
    load_average,
    load_after_averages,
    edit,
    read_lazily,
]


@pytest.mark.device("lazy")
@pytest.mark.parametrize(("act", "stage"), [*((act, 2) for act in ACTS), (edit, 3), (read_lazily, 3)])
def test_what_is_done_with_state_and_masters_comes_after_the_update(
    device: torch.device, act: Callable[[Session], list[Tensor]], stage: int
) -> None:
    left = []
    for executor in (InlineExecutor(), Late(device)):
        session = start(Case(stage), executor, device)
        backward(session, device)
        session.optimizer.step()
        seen = act(session)
        session.engine.settle()
        left.append([*seen, *read_state(session), *left_by(session)])
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*left, strict=True))


@pytest.mark.device("lazy")
@pytest.mark.parametrize(("buffers", "late_copies"), [(False, False), (True, False), (True, True)])
def test_an_average_in_host_memory_is_of_what_the_device_had(
    device: torch.device, buffers: bool, late_copies: bool
) -> None:
    """And changes places with it. An executor may copy when somebody waits, also to memory that is not pinned."""
    model = nn.Sequential(nn.Linear(4, 4), *([nn.BatchNorm1d(4)] if buffers else []))
    executor = Deferred() if late_copies else Late(device)
    session = start(Case(2, host=False), executor, device, model.to(device))
    shadow = session.engine.make_shadow(HostStore(pin_for=device))
    if isinstance(executor, Late):  # it copies all buffers twice; the second values are not pinned
        assert executor.blocked["a buffer"] == 2 * sum(buffer.nbytes for buffer in model.buffers())
    held = [model[0].weight, *(model[1].running_mean for _ in range(buffers))]
    for value in (3, 4):
        for tensor in held:
            tensor.data.fill_(value)
        shadow.update(lambda second, live: live)
    for tensor in held:
        tensor.data.fill_(5)
    for value in (4, 5):
        assert all(shadow.buffers[id(mean)].eq(value).all() for mean in held[1:])
        assert sum(int(second.eq(value).sum()) for second in shadow.shards) == 16
        shadow.swap()
        assert all(tensor.eq(value).all() for tensor in held)


@pytest.mark.device("lazy")
def test_an_update_is_no_edit_through_data(device: torch.device) -> None:
    session = start(Case(2, precision=BF16), Late(device), device, detect_data_edits=True)
    backward(session, device)
    session.optimizer.step()
    session.engine.await_updates()
    assert [bool(bucket.hidden_edit()) for bucket in session.engine.buckets] == [False] * len(session.engine.buckets)


@pytest.mark.device("lazy")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_failed_update_surfaces_where_it_is_waited_for(
    device: torch.device, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own traceback and the bucket's name, at every wait; others go on."""
    session = start(Case(stage), StreamExecutor(device), device)
    backward(session, device)
    first, *_, last = session.engine.buckets
    update = type(session.updater).update

    def fail(updater: Updater, view: UpdateView) -> None:
        if view.parameters is first.parameters:
            raise ArithmeticError("no more digits")
        update(updater, view)

    monkeypatch.setattr(type(session.updater), "update", fail)
    session.optimizer.step()
    for wait in (first.await_update, first.unshard, session.engine.settle, session.engine.await_updates):
        with pytest.raises(ArithmeticError, match="no more digits") as caught:
            wait()
        assert [first.name in note for note in caught.value.__notes__] == [True]
        assert "fail" in [entry.name for entry in caught.traceback]
        assert first.state not in GATHERS  # nothing is left that somebody must end
    last.unshard()
    session.engine.zero_grad(session.model.parameters())


class Failing(Lit):
    """Its third update fails, of a bucket in the middle."""

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        if index == 2:
            self.trainer.strategy.engine.updaters[0].update = self.fail  # type: ignore[attr-defined]

    def fail(self, view: UpdateView) -> None:
        raise ArithmeticError("no more digits")


def fits_and_fails(name: str) -> list[str]:
    lit = Failing(Recipe(steps=5))
    trainer = make_trainer(ZeroStrategy(**STRATEGIES[name]), accelerator=sim.DEVICE)
    with pytest.raises(ArithmeticError, match="no more digits") as caught:
        trainer.fit(lit)
    return [str(trainer.global_step), *caught.value.__notes__]


@pytest.mark.simulated
@pytest.mark.device("lazy")
@pytest.mark.parametrize("name", ["zero2_offload", "zero3_offload"])
def test_a_fit_whose_update_fails_ends_with_that_error(device_pool1: DevicePool, name: str) -> None:
    ((step, note),) = device_pool1.run(fits_and_fails, name)
    assert step == "3"
    assert "the update of" in note
    assert "in the lane HOST" in note


class Noting(torch.optim.SGD):
    """Notes the dtype of the tensors that it makes, after others had the time to change it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.made: list[torch.dtype] = []
        self.seconds = 0.0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        time.sleep(self.seconds)
        self.made.append(torch.tensor(0.0).dtype)
        return super().step(closure)


class ByNoting(Lit):
    def configure_optimizers(self) -> Any:
        return Noting(self.parameters(), lr=0.1)

    def on_train_start(self) -> None:
        optimizer = self.trainer.optimizers[0]
        assert isinstance(optimizer, Noting)
        optimizer.made.clear()  # those of trials
        optimizer.seconds = 0.05  # so that the next forward begins when the first unit's has ended, if it may


class NotingByHand(ByNoting, Manual):
    """Steps by hand."""


def made_by(module: type[ByNoting]) -> set[torch.dtype]:
    strategy = ZeroStrategy(**STRATEGIES["zero2_offload"], bucket_size_mb=0.0001)  # of several buckets
    trainer = make_trainer(strategy, accelerator=sim.DEVICE, precision="bf16-true")
    trainer.fit(module(Recipe(steps=3)))
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, Noting)
    return set(optimizer.made)


@pytest.mark.simulated
@pytest.mark.device("lazy")
def test_an_update_has_the_default_dtype_of_its_step(device_pool1: DevicePool) -> None:
    """A forward in 16 bits changes it for the whole process; a step by hand is a part of such a forward."""
    assert device_pool1.run(made_by, ByNoting) == [{torch.float32}]
    assert device_pool1.run(made_by, NotingByHand) == [{torch.bfloat16}]
