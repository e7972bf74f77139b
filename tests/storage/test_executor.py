"""The executor: its contract, and that all movement between memories and all updates of a training go through it."""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from engine import driver
from engine.driver import Session, Setup
from helpers import models
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_zero.checkpoint.tiles import copy_to_host
from lightning_zero.engine import Engine
from lightning_zero.sharding import BucketPlacement, Mesh, MixedPrecisionPolicy
from lightning_zero.storage import DONE, Executor, HostStore, InlineExecutor, Lane, Ticket

STEPS, MICRO = 3, 2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, keep_norms=False)


class Recorder(InlineExecutor):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.lanes: Counter[Lane] = Counter()
        self.jobs: Counter[tuple[Lane, str]] = Counter()
        self.depth = 0  # of the work that is under way

    def submit(self, job: Callable[[], object], lane: Lane, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        self.lanes[lane] += 1
        self.jobs[lane, what] += 1
        self.depth += 1
        try:
            return super().submit(job, lane, what, after)
        finally:
            self.depth -= 1


class Nesting(InlineExecutor):
    """A job has ended when all that it submitted has."""

    def __init__(self) -> None:
        self._job = threading.local()

    def nest(self, job: Callable[[], object]) -> Callable[[], None]:
        def whole() -> None:
            outer, inner = self._submitted, list[Ticket]()
            self._job.submitted = inner
            try:
                job()
            finally:
                self._job.submitted = outer
            for ticket in inner:
                ticket.wait()

        return whole

    def note(self, ticket: Ticket) -> Ticket:
        self._submitted.append(ticket)
        return ticket

    @property
    def _submitted(self) -> list[Ticket]:
        """What the job of this thread has submitted so far."""
        submitted: list[Ticket] = getattr(self._job, "submitted", [])
        return submitted


class Deferred(Nesting):
    """Works as late as it may: when a ticket is waited for."""

    def submit(self, job: Callable[[], object], lane: Lane, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        begin, whole = super().submit, self.nest(job)

        class Work:
            ended = False

            def wait(self) -> None:
                if not self.ended:
                    self.ended = True
                    begin(whole, lane, what, after)

            def done(self) -> bool:
                return self.ended

            synchronize = wait

        return self.note(Work())


class Threaded(Nesting):
    """Every lane is a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = {lane: ThreadPoolExecutor(1) for lane in Lane}

    def submit(self, job: Callable[[], object], lane: Lane, what: str, after: Sequence[Ticket] = ()) -> Ticket:
        begun: Future[Ticket] = self.threads[lane].submit(super().submit, self.nest(job), lane, what, after)

        class Work:
            def wait(self) -> None:
                begun.result(timeout=120)

            def done(self) -> bool:
                return begun.done()

            synchronize = wait

        return self.note(Work())


class Watch(TorchDispatchMode):
    """Finds what copies between what a `HostStore` gave out and other memory outside of an executor."""

    def __init__(self, executor: Recorder) -> None:
        super().__init__()
        self.executor = executor
        self.found: list[str] = []
        self.ranges: list[tuple[int, int]] = []  # addresses, ascending

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.numel()]
        moves = func in (torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor) and len(tensors) == 2
        if moves and not self.executor.depth and len({self.on_host(tensor) for tensor in tensors}) == 2:
            self.found.append(f"{func}: {[tuple(tensor.shape) for tensor in tensors]}")
        return func(*args, **(kwargs or {}))

    def on_host(self, tensor: Tensor) -> bool:
        place = bisect.bisect(self.ranges, (tensor.data_ptr(), 1 << 62)) - 1
        return place >= 0 and tensor.data_ptr() < self.ranges[place][1]

    @contextlib.contextmanager
    def watching_stores(self) -> Iterator[None]:
        zeros = HostStore.zeros

        def noted(store: HostStore, numel: int, dtype: torch.dtype, *, crosses: bool = True) -> Tensor:
            tensor = zeros(store, numel, dtype, crosses=crosses)
            bisect.insort(self.ranges, (tensor.data_ptr(), tensor.data_ptr() + max(tensor.nbytes, 1)))
            return tensor

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostStore, "zeros", noted)
            yield


def start(setup: Setup, executor: Executor, optimizer: str = "adamw") -> Session:
    make = driver.make_placement

    def placed(setup: Setup, mesh: Mesh | None = None) -> BucketPlacement:
        return make(setup, mesh)._replace(executor=executor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "make_placement", placed)
        model, factory = models.make_model("transformer"), models.optimizer_factory(optimizer)
        return driver.start(model, factory, setup, Mesh.single())


def batches() -> list[list[Tensor]]:
    return [[micro for (micro,) in step] for step in models.make_batches(STEPS, MICRO, 1)]


def train(session: Session) -> dict[str, Tensor]:
    for micro in batches():
        driver.run_step(session, micro, clip_norm=0.5)
    session.engine.settle()
    with session.engine.gathered(session.model.parameters()):
        return {name: value.detach().clone() for name, value in session.model.state_dict().items()}


# Every two settings meet in one of them.
SETUPS = [
    pytest.param(Setup(stage, True, params, native, precision), id=f"zero{stage}-{native}-{name}-params={params}")
    for stage, params, native, (name, precision) in (
        (1, False, "auto", ("fp32", MixedPrecisionPolicy())),
        (2, False, "off", ("bf16", BF16)),
        (2, False, "auto", ("bf16", BF16)),
        (3, False, "off", ("fp32", MixedPrecisionPolicy())),
        (3, True, "auto", ("bf16", BF16)),
        (3, True, "off", ("fp32", MixedPrecisionPolicy())),
    )
]


@pytest.mark.parametrize("setup", SETUPS)
def test_all_copies_and_updates_go_through_it(setup: Setup) -> None:
    executor = Recorder()
    watch = Watch(executor)
    with watch.watching_stores():
        session = start(setup, executor)
        executor.lanes.clear()
        executor.jobs.clear()
        with watch:
            train(session)
    buckets = session.engine.buckets
    assert watch.found == []
    for bucket in buckets:
        assert executor.jobs[Lane.HOST, f"the update of {bucket.name}"] == STEPS
    # At stage 1 micro-batches are summed on the device, otherwise the second is added on the host.
    added = 0 if setup.stage == 1 else (MICRO - 1) * STEPS
    assert executor.lanes[Lane.D2H] == STEPS * len(buckets)
    assert executor.lanes[Lane.HOST] == (STEPS + added) * len(buckets)
    kernel_writes = setup.native == "auto" and setup.precision is BF16  # on CPU ranks, where it reaches both
    if setup.stage == 3 and setup.offload_params:
        # Gathered for forward and backward; a unit that is whole is not gathered again.
        assert executor.lanes[Lane.H2D] > MICRO * STEPS * len(buckets)
    else:
        assert (executor.lanes[Lane.H2D] == 0) == kernel_writes
    assert executor.lanes[Lane.COMPUTE] == executor.lanes[Lane.READ] == executor.lanes[Lane.WRITE] == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_stays_on_the_device_is_only_computed(stage: int) -> None:
    executor = Recorder()
    train(session := start(Setup(stage), executor))
    assert executor.lanes == {Lane.COMPUTE: STEPS * len(session.engine.buckets)}


def test_a_copy_beside_it_is_found() -> None:
    watch = Watch(Recorder())
    with watch.watching_stores(), watch:
        HostStore().zeros(4, torch.float32)[1:].copy_(torch.ones(3))
        torch.ones(4).copy_(torch.ones(4))
    assert len(watch.found) == 1


@pytest.mark.parametrize("make", [Deferred, Threaded])
@pytest.mark.parametrize("setup", SETUPS)
def test_nobody_reads_a_result_before_its_ticket_is_waited_for(setup: Setup, make: Callable[[], Executor]) -> None:
    expected = train(start(setup, InlineExecutor()))
    actual = train(start(setup, make()))
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.parametrize("make", [Recorder, Deferred, Threaded])
def test_a_shadow_goes_through_it(make: Callable[[], Executor]) -> None:
    executor = make()
    session = start(Setup(2, offload=True), executor)
    shadow = session.engine.make_shadow()
    train(session)
    shadow.update(lambda second, live: 0.5 * (second + live))
    seen = [shard.clone() for shard in shadow.shards]
    shadow.swap()
    for bucket, values in zip(session.engine.buckets, seen, strict=True):
        assert torch.equal(bucket.master.read(0, bucket.layout.shard_numel), values)
    if isinstance(executor, Recorder):
        assert all(executor.jobs[Lane.HOST, f"the second values of {b.name}"] == 2 for b in session.engine.buckets)


def test_state_of_whole_parameters_has_come_when_it_is_gathered() -> None:
    gathered = []
    for executor in (InlineExecutor(), Deferred()):
        session = start(Setup(2, offload=True), executor, "lamb")
        train(session)
        states = [session.updater.gather_state(bucket) for bucket in session.engine.buckets]
        gathered.append([leaf for leaf in tree_leaves(states) if isinstance(leaf, Tensor)])
    assert any(leaf.dim() for leaf in gathered[0])
    assert all(map(torch.equal, *gathered))


def test_what_is_its_own_master_is_fetched_from_the_device_by_nobody() -> None:
    """No optimizer has the frozen parameter: unlike the other's master, its values are where it computes."""
    executor, model = Recorder(), nn.ModuleDict({"frozen": nn.Linear(2, 2, bias=False), "trained": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    placement = driver.make_placement(Setup(2, offload=True), Mesh.single())._replace(executor=executor)
    engine = Engine(model, placement, optimized=model["trained"].parameters())
    executor.lanes.clear()
    for parameter, fetched in ((model["frozen"].weight, 0), (model["trained"].weight, 1)):
        engine.full_param(parameter)
        assert executor.lanes[Lane.H2D] == fetched
    shadow = engine.make_shadow()
    (frozen,) = [bucket for bucket in engine.buckets if not bucket.optimized]
    executor.jobs.clear()
    shadow.swap()  # the values that a host keeps get there
    assert executor.jobs[Lane.H2D, frozen.name] == 1


def test_the_copy_of_a_checkpoint_goes_through_it() -> None:
    executor, tiles = Recorder(), [torch.ones(3), torch.arange(5.0)]
    copies = copy_to_host(tiles, executor)
    tiles[0].zero_()
    assert copies[0].tolist() == [1.0] * 3
    assert executor.lanes == {Lane.D2H: 2}
    assert copy_to_host(tiles, Deferred())[1].tolist() == tiles[1].tolist()


# ------------------------------------------------------------------------------------------------------ the contract


@pytest.mark.parametrize("make", [InlineExecutor, Deferred, Threaded])
def test_work_follows_what_it_comes_after(make: Callable[[], Executor]) -> None:
    executor, source = make(), torch.arange(4.0)
    staged, arrived, back = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    first = executor.commit(staged, source, "a")
    second = executor.submit(lambda: staged.mul_(2), Lane.HOST, "a", after=[first])
    third = executor.fetch(arrived, staged, "a", after=[second])
    fourth = executor.receive(torch.ones(4), arrived.add_, "a", after=[third])
    executor.commit(back, arrived, "a", after=[fourth, DONE]).wait()
    assert back.tolist() == [1.0, 3.0, 5.0, 7.0]


def fail() -> None:
    raise ValueError("out of range")


@pytest.mark.parametrize("make", [InlineExecutor, Deferred, Threaded])
def test_a_failure_surfaces_with_what_it_was_for(make: Callable[[], Executor]) -> None:
    executor, ran = make(), []
    with pytest.raises(ValueError, match="out of range") as caught:
        executor.submit(fail, Lane.HOST, "the update of head (bucket 3)").wait()
    assert ["head (bucket 3)" in note and "HOST" in note for note in caught.value.__notes__] == [True]

    def run_both() -> None:
        failed = executor.submit(fail, Lane.D2H, "first")
        executor.submit(lambda: ran.append(1), Lane.HOST, "second", after=[failed]).wait()

    with pytest.raises(ValueError, match="out of range"):
        run_both()
    assert not ran


def test_an_update_that_fails_names_its_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    session = start(Setup(2, offload=True), InlineExecutor())
    monkeypatch.setattr(type(session.updater), "update", lambda updater, view: fail())
    with pytest.raises(ValueError, match="out of range") as caught:
        driver.run_step(session, batches()[0])
    assert any(session.engine.buckets[0].name in note for note in caught.value.__notes__)
