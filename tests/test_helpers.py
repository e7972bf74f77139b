"""The rank pools, the reference and the guards that the other tests rely on."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import models, processes
from helpers import ranks as ranks_module
from helpers.pairs import pairwise
from helpers.ranks import IMPORT_PATH, ForkServer, RankError, RankPool, longest_wait, ranks
from helpers.reference import Trained, reduce_ranks, reduce_then_sum, sum_then_reduce, train_reference
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest_plugins = ("pytester",)

Flagged = Callable[[int, int, int], bool]
REPOSITORY = Path(__file__).resolve().parents[1]


class Point:
    """Pickles by name both ways."""

    def __init__(self, x: int) -> None:
        self.x = x


def sum_of_ranks(point: Point, *, extra: int) -> tuple[int, Point, list[float]]:
    total = torch.tensor(float(dist.get_rank() + point.x))
    dist.all_reduce(total)
    return dist.get_rank(), Point(point.x + extra), [total.item()]


@ranks(1, 2, 4)
def test_run_gives_every_ranks_result(pool: RankPool) -> None:
    results = pool.run(sum_of_ranks, Point(3), extra=4)
    world = pool.world_size
    assert [rank for rank, _, _ in results] == list(range(world))
    assert [point.x for _, point, _ in results] == [7] * world
    assert [total for _, _, total in results] == [[3.0 * world + sum(range(world))]] * world


def tensor_of_rank(offset: Tensor) -> Tensor:
    return offset + dist.get_rank()


def test_tensors_travel_both_ways(pool2: RankPool) -> None:
    results = pool2.run(tensor_of_rank, torch.full((3,), 0.5, dtype=torch.bfloat16))
    assert torch.equal(results[1], torch.full((3,), 1.5, dtype=torch.bfloat16))


def raise_on(rank: int) -> None:
    print("before the error")
    if dist.get_rank() == rank:
        raise LookupError("no such shard")


def test_an_exception_names_its_rank(pool2: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    pids = pool2.pids
    with pytest.raises(RankError, match="rank 1: LookupError: no such shard") as caught:
        pool2.run(raise_on, 1)
    assert caught.value.rank == 1
    assert caught.value.failures.keys() == {1}
    assert "in raise_on" in caught.value.failures[1].traceback
    assert capsys.readouterr().out.count("before the error") == 2
    assert pool2.run(dist.get_world_size) == [2, 2]
    assert pool2.pids == pids  # all ranks had answered: they go on


def raise_while_others_wait() -> None:
    if dist.get_rank() == 0:
        raise LookupError("rank 0 gave up")
    dist.barrier()


@pytest.mark.slow
def test_a_rank_that_waits_for_a_failed_one_is_ended(pool2: RankPool) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 0: LookupError") as caught:
        pool2.run_within(250, raise_while_others_wait)
    assert time.monotonic() - begin < 100  # it was not the limit of the run
    assert caught.value.rank == 0
    assert caught.value.failures[1].kind == "timeout"
    assert pool2.run(dist.get_rank) == [0, 1]


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def raise_at_once_and_late() -> None:
    if dist.get_rank() == 1:
        work(1.0)
    raise LookupError("no such shard")


@pytest.mark.slow
def test_a_rank_that_is_at_work_is_waited_for(pool2: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether another has failed, or the limit is over, for a while."""
    monkeypatch.setattr(pool2, "grace", 0.5)
    with pytest.raises(RankError) as caught:
        pool2.run(raise_at_once_and_late)
    failed = [(rank, failure.kind) for rank, failure in caught.value.failures.items()]
    assert failed == [(0, "LookupError"), (1, "LookupError")]
    monkeypatch.setattr(ranks_module, "PATIENCE", 100)
    pool2.run_within(0.5, work, 1.0)
    monkeypatch.setattr(ranks_module, "PATIENCE", 2)
    with pytest.raises(RankError, match="timeout: no answer within"):
        pool2.run_within(0.5, work, 60.0)


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # as a Trainer does when it ends
        time.sleep(1000)


@pytest.mark.slow
def test_a_hang_is_recovered_from(pool2: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    pids = pool2.pids
    with pytest.raises(RankError, match=r"rank 1: timeout: no answer within .* in hang_on_rank_1 \(test_helpers"):
        pool2.run_within(5, hang_on_rank_1)  # by then it hangs, on a busy machine too
    assert "in hang_on_rank_1" in capsys.readouterr().out
    assert pool2.run(dist.get_rank) == [0, 1]
    assert not set(pids) & set(pool2.pids)


def limit_of_collectives() -> float:
    group = dist.group.WORLD
    assert group is not None
    limit: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return limit


def test_a_limit_of_its_own_bounds_the_collectives_of_one_run(pool2: RankPool) -> None:
    """In quick turns: the group that the other rank still joins is not given up for one with another limit."""
    for _ in range(10):
        assert pool2.run_within(30, limit_of_collectives) == [longest_wait(30)] * 2
        assert pool2.run(limit_of_collectives) == [longest_wait(pool2.timeout)] * 2


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        signal.raise_signal(signal.SIGSEGV)  # sent to the process, it may come to another thread, and late


def test_a_death_is_reported_and_recovered_from(pool2: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError, match="rank 1: died"):
        pool2.run(die_on_rank_1)
    assert "Segmentation fault" in capsys.readouterr().out
    assert pool2.run(dist.get_rank) == [0, 1]


@pytest.mark.slow
def test_a_rank_that_died_between_runs_is_reported(pool2: RankPool) -> None:
    os.kill(pool2.pids[0], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 0: died"):
        pool2.run(dist.get_rank)
    assert pool2.run(dist.get_rank) == [0, 1]


def products(offset: int) -> list[Tensor]:
    """Matrix products with a weight that begins at `offset` in a flat buffer."""
    generator = torch.Generator().manual_seed(0)
    results = []
    for size in (6, 11, 37, 90):
        x, weight = torch.randn(2, size, size, generator=generator, dtype=torch.float64)
        view = torch.zeros(weight.numel() + offset, dtype=weight.dtype)[offset:].view_as(weight).copy_(weight)
        results += [x @ view, x @ view.T]
    return results


def test_products_depend_neither_on_alignment_nor_on_the_process(pool1: RankPool) -> None:
    aligned = products(0)
    for offset in (1, 2, 3, 7):
        for results in (products(offset), *pool1.run(products, offset)):
            assert all(map(torch.equal, results, aligned))


def unpicklable_result() -> object:
    return lambda: None


def test_what_cannot_be_sent_is_an_error(pool1: RankPool) -> None:
    with pytest.raises(TypeError, match="not at module level"):
        pool1.run(lambda: None)
    with pytest.raises(RankError, match=r"rank 0: .*pickle"):
        pool1.run(unpicklable_result)


class Circle:
    """Only the garbage collector frees it."""

    def __init__(self) -> None:
        self.itself = self


CIRCLES: weakref.WeakSet[Circle] = weakref.WeakSet()


def remember(circle: Circle) -> None:
    CIRCLES.add(circle)


def count_circles() -> int:
    return len(CIRCLES)


def test_ranks_let_go_of_arguments(pool1: RankPool) -> None:
    pool1.run(remember, Circle())
    assert pool1.run(count_circles) == [0]


def leave_a_mess(*_: object) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    warnings.simplefilter("ignore")
    os.environ["LEFT_OVER"] = "1"
    del os.environ["WORLD_SIZE"]
    os.chdir("/")
    signal.signal(signal.SIGTERM, leave_a_mess)
    dist.new_group([0])
    random.random()


def observe() -> tuple[Any, ...]:
    settings = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads())
    around = (list(warnings.filters), dict(os.environ), Path.cwd(), signal.getsignal(signal.SIGTERM))
    return *settings, *around, random.random(), torch.rand(1).item()


def test_ranks_are_clean_between_runs(pool2: RankPool) -> None:
    before = pool2.run(observe)
    pool2.run(leave_a_mess)
    assert pool2.run(observe) == before
    assert before[0][:3] == (torch.float32, True, 1)
    assert not Path(before[0][5]).is_relative_to(REPOSITORY)


def import_path() -> list[str]:
    return sys.path


def test_ranks_import_from_where_the_tests_do(new_ranks: Callable[[int], RankPool]) -> None:
    """Whatever other tests had on their path when the first of them started the ranks."""
    assert new_ranks(1).run(import_path) == [list(IMPORT_PATH)]
    assert str(Path(__file__).parent) in IMPORT_PATH


def test_ranks_end_with_the_tests(tmp_path: Path) -> None:
    script = tmp_path / "tests.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from helpers.ranks import ForkServer, RankPool\n"
        "pool = RankPool(2, ForkServer(preload=()))\n"
        "pool.start()\n"
        "print(*pool.pids, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # a killed process cleans nothing up
    done = subprocess.run([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True, check=False)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    assert all_end(pids)


def all_end(pids: Sequence[int]) -> bool:
    return comes_to(lambda: not any(map(is_alive, pids)))


def comes_to(state: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether something comes to be so."""
    deadline = time.monotonic() + seconds
    while not state() and time.monotonic() < deadline:
        time.sleep(0.02)
    return state()


def is_alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def test_closing_ends_ranks_and_server() -> None:
    server = ForkServer(preload=())
    pool = RankPool(1, server)
    pool.start()
    pids = pool.pids
    assert all(map(is_alive, pids))
    pool.close()
    server.close()
    assert pool.pids == ()
    assert all_end(pids)


class Lit(LightningModule):
    """A model of `helpers.models` under plain Lightning."""

    def __init__(self, world_size: int, steps: int) -> None:
        super().__init__()
        self.model = models.make_model("transformer", dtype=torch.float64)
        self.batches = models.make_batches(steps, 1, world_size)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return models.next_token_loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return models.make_optimizer("momentum", self.model)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(models.rank_batches(self.batches, self.trainer.global_rank), batch_size=None)


def fit_ddp(world_size: int, steps: int) -> tuple[int, dict[str, Tensor]]:
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp",
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, before = Lit(world_size, steps), {*processes.family(os.getpid())}
    trainer.fit(module)
    assert {*processes.family(os.getpid())} <= before
    return trainer.world_size, module.model.state_dict()


def train(world_size: int, steps: int, *, optimizer: str = "momentum", reduce_each: bool = False) -> Trained:
    return train_reference(
        models.make_model("transformer", dtype=torch.float64),
        models.optimizer_factory(optimizer),
        models.make_batches(steps, 1, world_size),
        models.next_token_loss,
        reduce_each=reduce_each,
    )


@ranks(1, 2, 4)
def test_a_trainer_uses_the_ranks_and_launches_nothing(pool: RankPool) -> None:
    world = pool.world_size
    results = pool.run(fit_ddp, world, 10)
    reference = train(world, 10).weights
    for world_size, weights in results:
        assert world_size == world
        assert_close(weights, reference)


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(dict(actual), dict(expected), rtol=1e-9, atol=1e-12)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


def plain_training(
    name: str,
    optimizer_name: str,
    batches: list[Tensor],
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """The loop that every PyTorch user writes."""
    model = models.make_model(name, dtype=dtype)
    optimizer = models.make_optimizer(optimizer_name, model)
    for index, batch in enumerate(batches, start=1):
        (models.next_token_loss(model, batch) / accumulate).backward()
        if index % accumulate == 0:
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [(name, "momentum") for name in models.CONSTRUCTORS] + [("optional", name) for name in models.OPTIMIZERS],
)
def test_one_rank_is_plain_bitwise(name: str, optimizer: str) -> None:
    accumulate, reduce_each = 3, name == "optional"
    batches = models.make_batches(4, accumulate, 1, flagged=models.only_in_step_1)
    trained = train_reference(
        models.make_model(name),
        models.optimizer_factory(optimizer),
        batches,
        models.next_token_loss,
        reduce_each=reduce_each,
    )
    plain = plain_training(name, optimizer, models.rank_batches(batches, 0), accumulate=accumulate)
    assert_equal(trained.weights, plain)


@pytest.mark.parametrize(("world", "reduce_each", "clip_norm"), [(2, False, 0.3), (4, True, 0.3), (4, False, None)])
def test_ranks_are_the_whole_batch(world: int, reduce_each: bool, clip_norm: float | None) -> None:
    batches = models.make_batches(5, 2, world)
    trained = train_reference(
        models.make_model("transformer", dtype=torch.float64),
        models.optimizer_factory("adamw"),
        batches,
        models.next_token_loss,
        reduce_each=reduce_each,
        clip_norm=clip_norm,
    )
    whole = [torch.cat([batch for micro in step for batch in micro]) for step in batches]
    plain = plain_training("transformer", "adamw", whole, clip_norm=clip_norm, dtype=torch.float64)
    assert_close(trained.weights, plain)


def test_the_reduction_adds_in_rank_order() -> None:
    big = 2.0**26  # in fp32, adding 1 to it changes nothing
    values = [[torch.tensor([4 * value])] for value in (big, 1.0, -big, 1.0)]
    assert reduce_ranks(values, None) == [torch.tensor([1.0])]
    assert reduce_ranks(values[::-1], None) == [torch.tensor([0.0])]
    assert reduce_ranks(values, torch.float64) == [torch.tensor([2.0], dtype=torch.float64)]


def test_micro_batches_are_added_before_or_after_the_reduction() -> None:
    big = 2.0**26
    micro = [[[torch.tensor([2 * value])] for value in each] for each in ([big, -big], [1.0, 0.0])]
    assert reduce_then_sum(micro, None, None) == [torch.tensor([1.0])]
    assert sum_then_reduce(micro, None, None) == [torch.tensor([0.0])]


def test_a_missing_gradient_counts_as_zeros_unless_all_are() -> None:
    one = torch.ones(1)
    assert reduce_then_sum([[[None], [one]], [[None], [None]]], None, None) == [torch.tensor([0.5])]
    assert sum_then_reduce([[[None], [one]], [[one], [None]]], None, None) == [torch.ones(1)]
    assert reduce_then_sum([[[None], [None]]], None, None) == [None]


def test_clipping_by_norm_bounds_the_norm() -> None:
    gradients = record_gradients(clip_norm=0.25)
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    assert norm.item() == pytest.approx(0.25, rel=1e-5)


def test_clipping_by_value_bounds_each_value() -> None:
    gradients = torch.cat([gradient.flatten() for gradient in record_gradients(clip_value=0.01)])
    assert gradients.abs().max().item() == pytest.approx(0.01)


def record_gradients(*, clip_norm: float | None = None, clip_value: float | None = None) -> list[Tensor]:
    """SGD from zero momentum and without decay leaves lr times the gradient in the weights."""
    model = models.make_model("mlp")
    trained = train_reference(
        model,
        lambda module: torch.optim.SGD(module.parameters(), lr=1.0),
        models.make_batches(1, 1, 2),
        models.next_token_loss,
        reduce_each=True,
        clip_norm=clip_norm,
        clip_value=clip_value,
    )
    return [value.detach() - trained.weights[name] for name, value in model.named_parameters()]


@pytest.mark.parametrize(
    ("flagged", "steps_seen"),
    [(models.never, None), (models.only_in_step_1, 1), (models.not_on_rank_0, 4), (models.always, 4)],
)
@pytest.mark.parametrize("reduce_each", [True, False])
def test_a_parameter_is_updated_in_the_steps_that_use_it(
    flagged: Flagged, steps_seen: int | None, reduce_each: bool
) -> None:
    trained = train_reference(
        models.make_model("optional"),
        models.optimizer_factory("adamw"),
        models.make_batches(4, 2, 2, flagged=flagged),
        models.next_token_loss,
        reduce_each=reduce_each,
    )
    state = trained.optimizer_state.get("blocks.1.adapter.weight")
    assert (state and int(state["step"])) == steps_seen
    assert int(trained.optimizer_state["blocks.1.qkv.weight"]["step"]) == 4


def test_frozen_parameters_keep_their_values() -> None:
    model = models.make_model("frozen")
    trained = train_reference(
        model,
        models.optimizer_factory("adamw"),
        models.make_batches(2, 1, 2),
        models.next_token_loss,
        reduce_each=True,
    )
    start = model.state_dict()
    unchanged = {name for name in start if torch.equal(start[name], trained.weights[name])}
    assert unchanged == {name for name, value in model.named_parameters() if not value.requires_grad}
    assert len(unchanged) == 16


def to_bf16(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


def test_masters_keep_what_16_bits_round_away() -> None:
    def small_steps(cast: bool) -> dict[str, Tensor]:
        model = models.make_model("mlp", dtype=torch.float32 if cast else torch.bfloat16)
        return train_reference(
            model,
            models.optimizer_factory("sgd", lr=1e-5),
            models.make_batches(3, 1, 2),
            models.next_token_loss,
            reduce_each=True,
            cast=to_bf16 if cast else None,
        ).weights

    start = models.make_model("mlp").state_dict()
    masters, rounded = small_steps(cast=True), small_steps(cast=False)
    weight = "layers.0.weight"
    assert masters[weight].dtype == torch.float32
    assert not torch.equal(masters[weight], start[weight])
    assert torch.equal(rounded[weight], start[weight].bfloat16())


def test_several_16_bit_micro_batches_are_summed_in_fp32() -> None:
    def trained(grad_dtype: torch.dtype | None, *, reduce_each: bool) -> dict[str, Tensor]:
        return train_reference(
            models.make_model("mlp"),
            models.optimizer_factory("momentum"),
            models.make_batches(3, 3, 2),
            models.next_token_loss,
            reduce_each=reduce_each,
            cast=to_bf16,
            grad_dtype=grad_dtype,
        ).weights

    assert_equal(trained(None, reduce_each=True), trained(torch.float32, reduce_each=True))
    weight = "layers.0.weight"
    in_16_bits = trained(torch.bfloat16, reduce_each=True)
    assert not torch.equal(trained(None, reduce_each=True)[weight], in_16_bits[weight])


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def test_a_scheduler_acts_after_each_step() -> None:
    def weights(make_scheduler: Any, lr: float, steps: int) -> dict[str, Tensor]:
        return train_reference(
            models.make_model("mlp"),
            models.optimizer_factory("sgd", lr=lr),
            models.make_batches(steps, 1, 2),
            models.next_token_loss,
            reduce_each=True,
            make_scheduler=make_scheduler,
        ).weights

    assert_equal(weights(halving, 0.1, 1), weights(None, 0.1, 1))
    assert weights(halving, 0.1, 2)["layers.0.bias"].ne(weights(None, 0.1, 2)["layers.0.bias"]).any()


def test_a_model_depends_on_its_seed_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = models.make_model("transformer", seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert_equal(first.state_dict(), models.make_model("transformer", seed=3).state_dict())
    assert first.head.weight is first.tokens.weight


@pytest.mark.parametrize("flagged", [models.never, models.always, models.not_on_rank_0, models.by_turns])
def test_batches_are_flagged_where_asked(flagged: Flagged) -> None:
    batches = models.make_batches(3, 2, 2, flagged=flagged)
    places = [(s, m, r) for s in range(3) for m in range(2) for r in range(2)]
    assert [models.is_flagged(batches[s][m][r]) for s, m, r in places] == [flagged(*p) for p in places]


# Its clock goes on where it is told to, and so does not depend on what the machine does meanwhile.
CLOCK = """
now, lost = 0.0, 0.0

def sleep(seconds, of_others=0.0):
    global now, lost
    now, lost = now + seconds, lost + of_others

class Stopwatch:
    def __init__(self): self.begin = now, lost
    def read(self): return now - self.begin[0], lost - self.begin[1]
"""

GUARDED = """
import pytest
from clock import sleep

def test_quick(): sleep(4.9)
def test_slow(): sleep(5.1)
def test_beside_others(): sleep(20, of_others=15.1)
def test_slow_beside_others(): sleep(20, of_others=14.9)
@pytest.mark.slow
def test_marked(): sleep(6)
def test_listed(): sleep(6)
@pytest.fixture
def start(): sleep(6)
def test_slow_fixture(start): pass
@pytest.mark.gpu
def test_gpu(): raise AssertionError("needs CUDA")
"""


@pytest.fixture
def guarded(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A suite of its own under this suite's conftest, with another clock."""
    source = Path(__file__).with_name("conftest.py").read_text()
    source = source.replace("from helpers.processes import Stopwatch", "from clock import Stopwatch")
    source = re.sub(r'"tests/test_public.py::\w+"', '"test_it.py::test_listed"', source)
    pytester.makeconftest(source)
    pytester.makepyfile(clock=CLOCK)
    pytester.syspathinsert()
    pytester.makeini("[pytest]\nmarkers =\n  slow\n  gpu\n  launch\n  long\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    return pytester


def test_a_slow_test_must_be_marked(guarded: pytest.Pytester) -> None:
    """What others had the cores for does not count."""
    guarded.makepyfile(test_it=GUARDED)
    result = guarded.runpytest_inprocess()
    result.assert_outcomes(passed=5, failed=2, skipped=1)
    result.stdout.fnmatch_lines(["*test_slow took 5.10 s, the limit is 5 s*"])
    result.stdout.fnmatch_lines(["*test_slow_beside_others took 20.00 s, * (and 14.90 s in which *"])


def test_a_test_that_is_slow_once_is_run_again(guarded: pytest.Pytester) -> None:
    guarded.makepyfile(
        test_it="from clock import sleep\nruns = []\ndef test_it():\n    runs.append(0)\n    sleep(6 / len(runs))\n"
        "def test_wrong():\n    runs.append(0)\n    assert False, len(runs)\n"
    )
    result = guarded.runpytest_inprocess()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: 3*"])


def test_seconds_in_which_cores_do_the_work_of_others_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are all but this process, what it has started, and what these have."""
    tick, pid = os.sysconf("SC_CLK_TCK"), os.getpid()
    monkeypatch.setattr(processes, "usable_cpus", lambda: {0, 1})

    def write(cores: Sequence[int], own: int, child: int, other: int, waited_for: int) -> None:
        """Seconds."""
        idle, waiting = 1000, 2000
        lines = [f"cpu{n} {tick * busy} 0 0 {idle * n} {waiting * n} 0 0 0 9 9\n" for n, busy in enumerate(cores)]
        files = {"stat": "cpu  9 9 9 9 9 9 9 9 9 9\n" + "".join(lines) + "intr 5\n"}
        for number, seconds, ended in ((pid, own, waited_for), (7, child, 0), (8, child, 0), (9, other, 0)):
            ticks = f"{tick * seconds} 0 {tick * ended} 0"
            files[f"{number}/stat"] = f"{number} (a) b) S {' 1' * 10} {ticks} 20 0\n"
        files |= {f"{pid}/task/{pid}/children": "7 ", "7/task/7/children": "8 ", "8/task/8/children": ""}
        for name, text in files.items():
            path = tmp_path / "proc" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    clock = [100.0]
    write((10, 20, 500), 5, 2, 3, 1)
    stopwatch = processes.Stopwatch(tmp_path, lambda: clock[0])
    clock[0] += 20
    write((30, 38, 900), 6, 4, 25, 4)  # 38 s, of which 1, 3, and 2 of each child's, are not others'
    assert stopwatch.read() == (20, 15)
    write((10, 20, 900), 6, 4, 25, 4)
    assert stopwatch.read() == (20, 0)
    write((210, 220, 900), 6, 0, 25, 4)
    assert stopwatch.read() == (20, 20)
    assert processes.Stopwatch(tmp_path / "elsewhere", lambda: clock[0]).read() == (0, 0)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_the_work_of_children_is_counted_and_a_process_that_sleeps_has_none() -> None:
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint('ready', flush=True)\ninput()"
    before = sum(map(processes.seconds_of, processes.family(os.getpid())))
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        alive = sum(map(processes.seconds_of, processes.family(os.getpid()))) - before
        assert comes_to(lambda: not processes.at_work(child.pid))
        os.kill(child.pid, signal.SIGSTOP)
        assert comes_to(lambda: processes.at_work(child.pid))
        os.kill(child.pid, signal.SIGCONT)
        child.communicate("\n")
    ended = sum(map(processes.seconds_of, processes.family(os.getpid()))) - before
    assert 0.25 < alive <= ended
    assert not processes.at_work(child.pid)
    assert sum(processes.busy_seconds()) > 0


@pytest.mark.parametrize(("count", "allowed"), [(18, True), (19, False)])
def test_few_tests_may_launch(guarded: pytest.Pytester, count: int, allowed: bool) -> None:
    guarded.makepyfile(
        f"import pytest\n@pytest.mark.launch\n@pytest.mark.parametrize('n', range({count}))\ndef test_it(n): pass\n"
    )
    result = guarded.runpytest_inprocess()
    assert (result.ret == pytest.ExitCode.OK) == allowed
    if not allowed:
        result.stderr.fnmatch_lines(["*19 tests are marked launch, at most 18 may be*"])


def test_pairwise_rows_hold_every_possible_pair() -> None:
    axes = {"a": range(6), "b": "xy", "c": "stu", "d": [None, 1, 2], "e": [False, True]}
    rows = [dict(zip(axes, row, strict=True)) for row in itertools.product(*axes.values())]

    def possible(a: int, b: str, c: str, d: int | None, e: bool) -> bool:
        return not (a == 0 and e) and not (b == "x" and d == 1)

    def pairs(row: dict[str, object]) -> set[object]:
        return set(itertools.combinations(row.items(), 2))

    chosen = pairwise(where=possible, **axes).args[1]
    found = [pairs(dict(zip(axes, row, strict=True))) for row in chosen]
    assert set().union(*found) == set().union(*[pairs(row) for row in rows if possible(**row)])
    assert len(chosen) < len(rows) / 8
