"""The memory report: the plan's numbers, remedies that keep their word, and where it is printed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.ranks import RankPool, ranks
from lightning import Callback, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from strategy.fits import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroPrecision
from lightning_zero.callbacks import EMA, MemoryReport
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.planning import Bytes, Plan, plan
from lightning_zero.planning.memory import Memory, Remedy, held_by, out_of_memory, planned_parts

WIDTH = 160
PRECISIONS = {"bf16": "bf16-mixed", "bf16_true": "bf16-true"}


class Blocks(LightningModule):
    """A tenth of a MiB per block."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.error = error

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.error is not None:
            raise self.error
        for block in self.blocks:
            batch = block(batch)
        return batch.float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(4, WIDTH), batch_size=1)


@dataclasses.dataclass
class Reported:
    """What one rank saw."""

    planned: Plan
    expected: Plan
    remedies: list[Remedy]
    measured: dict[str, Bytes]
    printed: str


def report(
    options: dict[str, Any],
    micro: int = 1,
    precision: str | None = None,
    callbacks: Sequence[Callback] = (),
    **flags: Any,
) -> Reported:
    callback, out = MemoryReport(), io.StringIO()
    flags |= {"plugins": [ZeroPrecision(precision)]} if precision else {}  # type: ignore[arg-type]
    trainer = make_trainer(options, callbacks=[callback, *callbacks], **({"accumulate_grad_batches": micro} | flags))
    with contextlib.redirect_stdout(out):
        trainer.fit(Blocks())
    assert callback.plan is not None
    engine, strategy, model = trainer.strategy.engine, trainer.strategy, Blocks()
    same = ("bucket_size_mb", "persistence_numel", "max_live_numel", "prefetch_mb")
    arguments = {name: getattr(strategy.options, name) for name in same}
    optimizers = [model.configure_optimizers()]
    expected = plan(model, engine.placement, optimizers, micro_batches=micro, **arguments)
    return Reported(callback.plan, expected, callback.remedies, held_by(engine), out.getvalue())


@ranks(2)
@pytest.mark.parametrize(
    ("options", "precision"),
    [({"stage": 2, "offload_optimizer": "cpu"}, "bf16-mixed"), ({"stage": 3}, None)],
    ids=["zero2_offload", "zero3"],
)
def test_the_plan_and_what_is_held(pool: RankPool, options: dict[str, Any], precision: str | None) -> None:
    results = pool.run(report, options, 2, precision)
    for result in results:
        assert result.planned == result.expected
        assert result.measured == planned_parts(result.planned)
        assert sum(result.measured.values(), Bytes()) == result.planned.held
    first, second = (result.printed for result in results)
    assert not second.count("Memory of rank")
    rows = {line.split("│")[1].strip(): line.split("│")[2:6] for line in first.splitlines() if line.count("│") > 5}
    parts = planned_parts(results[0].planned) | {"held between steps": results[0].planned.held}
    for name, part in parts.items():
        shown = [cell.strip() for cell in rows[name.replace("_", " ")]]
        sizes = [f"{nbytes / 2**20:,.2f}" for nbytes in (part.device, part.host)]
        assert shown == [sizes[0], sizes[0], sizes[1], sizes[1]]
    assert all(remedy.override in first for remedy in results[0].remedies)


def report_of_flags(options: dict[str, Any]) -> dict[str, Reported]:
    """By a word for the flags."""
    schedule = GradientAccumulationScheduler({1: 2})
    flags: dict[str, dict[str, Any]] = {
        "plain": {},
        "value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
        "schedule": {"max_epochs": 2, "callbacks": [schedule]},
        "average": {"callbacks": [EMA()]},
        "average on the host": {"callbacks": [EMA(device="cpu")]},
    }
    return {name: report(options, 1, "bf16-true", **each) for name, each in flags.items()}


@ranks(2)
@pytest.mark.parametrize("options", [{"stage": 2, "offload_optimizer": "cpu"}, {"stage": 3}])
def test_what_flags_and_callbacks_will_take_is_planned(pool: RankPool, options: dict[str, Any]) -> None:
    """Clipping by value, and several micro-batches later on, make 16-bit sharded gradients fp32; averages are kept."""
    results = pool.run(report_of_flags, options)
    for name, result in itertools.chain(*(found.items() for found in results)):
        parts, numel = planned_parts(result.planned), sum(bucket.padded_numel for bucket in result.planned.buckets) // 2
        assert result.measured == parts, name
        assert parts["sharded_gradient"].total == (4 if name in ("value", "schedule") else 2) * numel, name
        assert parts["averages"].total == ((4 * numel + 2 * WIDTH) if "average" in name else 0), name
    for name, result in results[0].items():
        words = "twice the factors of GradientAccumulationScheduler", "trainer.accumulate_grad_batches=2"
        said = " ".join(result.printed.split())
        assert [word in said for word in words] == [name == "schedule", name != "schedule"], name


class Late(Blocks):
    """Makes its blocks in shards."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()

    def configure_model(self) -> None:
        if not len(self.blocks):
            self.blocks = Blocks().blocks


def plan_late() -> tuple[Plan | None, Plan | None]:
    """Of a module that is initialized in shards, and of one that is not."""
    callbacks = MemoryReport(table=False), MemoryReport(table=False)
    for callback, module in zip(callbacks, (Late(), Blocks()), strict=True):
        make_trainer("zero3", callbacks=[callback]).fit(module)
    return callbacks[0].plan, callbacks[1].plan


def test_a_module_in_shards_has_the_same_plan(pool2: RankPool) -> None:
    for late, whole in pool2.run(plan_late):
        assert late is not None
        assert late == whole


def with_remedies(options: dict[str, Any]) -> tuple[Plan, list[tuple[Remedy, Plan]]]:
    """The plan, and every remedy with the plan of a run to which it was applied."""
    before = report(options)
    tried = []
    for remedy in before.remedies:
        key, _, value = remedy.override.partition("=")
        changed, precision = dict(options), None
        if key == "precision":
            precision = PRECISIONS[value]
        elif key == "strategy":
            changed = options | {"offload_optimizer": "none", "offload_params": "none"} | STRATEGIES[value]
        else:
            changed[key.removeprefix("strategy.")] = value if value == "cpu" else int(value)
        tried.append((remedy, report(changed, precision=precision).planned))
    return before.planned, tried


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 3, "persistence_numel": 1000}], ids=["zero0", "zero3"])
def test_remedies_save_what_they_say(pool: RankPool, options: dict[str, Any]) -> None:
    before, tried = pool.run(with_remedies, options)[0]
    saved = [remedy.saved("either") for remedy, _ in tried]
    assert saved == sorted(saved, reverse=True)
    assert min(saved) > 0
    for remedy, applied in tried:
        assert remedy.plan == applied, remedy.override
        assert before.peak.total - applied.peak.total == remedy.device == remedy.host  # of CPU ranks
    names = {remedy.override for remedy, _ in tried}
    expected = {"strategy=zero3", "strategy=zero2"} if options == {"stage": 0} else {"strategy.max_live_numel=0"}
    assert names >= expected
    assert not names & {"strategy=zero0"}


def fail_with(error: BaseException, *callbacks: Callback, **options: Any) -> str:
    """What a fit prints on stderr that ends with an error of its module."""
    trainer = make_trainer("zero2", callbacks=list(callbacks), **options)
    with contextlib.redirect_stderr(io.StringIO()) as err, pytest.raises(type(error)) as raised:
        trainer.fit(Blocks(error))
    assert raised.value is error
    assert not getattr(error, "__notes__", [])
    return err.getvalue()


CPU_ALLOCATOR = "[enforce fail at alloc_cpu.cpp:126] DefaultCPUAllocator: {}: you tried to allocate 1 bytes"


@pytest.mark.parametrize(
    ("error", "callbacks"),
    [
        (torch.OutOfMemoryError("a test's"), []),
        (RuntimeError(CPU_ALLOCATOR.format("not enough memory")), [MemoryReport(table=False)]),
    ],
)
def test_it_is_printed_once_where_memory_runs_out(
    pool2: RankPool, error: BaseException, callbacks: list[Callback]
) -> None:
    for rank, err in enumerate(pool2.run(fail_with, error, *callbacks)):
        assert err.count(f"Rank {rank} is out of memory.") == 1
        assert err.count("Memory of rank") == 1
        assert "optimizer state" in err
        assert "strategy=zero3" in err


def test_it_is_not_printed_for_other_errors(pool1: RankPool) -> None:
    assert "memory" not in pool1.run(fail_with, RuntimeError("a test's"), MemoryReport())[0]


def fail_while_sharding(error: BaseException) -> str:
    with mock.patch("lightning_zero.integration.base.Engine", side_effect=error):
        return fail_with(error)


def test_it_is_printed_before_there_is_an_engine(pool1: RankPool) -> None:
    (err,) = pool1.run(fail_while_sharding, torch.OutOfMemoryError("a test's"))
    assert err.count("Memory of rank 0") == 1


def fail_to_report(error: BaseException) -> tuple[list[str], Any]:
    """The notes of the error, and the side for which a report was asked."""
    with (
        mock.patch.object(Memory, "report", side_effect=ValueError("no plan")) as report,
        pytest.raises(type(error)) as raised,
    ):
        make_trainer("zero2").fit(Blocks(error))
    assert raised.value is error
    return error.__notes__, report.call_args.args


@pytest.mark.parametrize(("error", "side"), [(torch.OutOfMemoryError("a test's"), "device"), (MemoryError(), "host")])
def test_a_report_that_fails_hides_no_error(pool1: RankPool, error: BaseException, side: str) -> None:
    ((notes, asked),) = pool1.run(fail_to_report, error)
    assert asked == (side,)
    assert notes == ["ZeroStrategy could not report what the memory holds: ValueError('no plan')"]


def test_errors_that_mean_it() -> None:
    wrapped = RuntimeError("rank 0 could not gather")
    wrapped.__cause__ = torch.OutOfMemoryError("a test's")
    assert out_of_memory(wrapped) == "device"
    allocator = RuntimeError(CPU_ALLOCATOR.format("can't allocate memory"))
    for error in (MemoryError(), OSError(errno.ENOMEM, "mmap"), allocator):
        assert out_of_memory(error) == "host"
    runtime = RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")
    assert out_of_memory(runtime) == "either"  # it also refuses to pin with these words
    for error in (OSError(errno.ENOENT, "file"), RuntimeError("shape"), ValueError("memory")):
        assert out_of_memory(error) is None


def report_under_ddp() -> Plan | None:
    callback = MemoryReport()
    with pytest.warns(UserWarning, match="MemoryReport plans nothing under DDPStrategy"):
        make_trainer("ddp", callbacks=[callback]).fit(Blocks())
    return callback.plan


def test_another_strategy_is_not_planned(pool1: RankPool) -> None:
    assert pool1.run(report_under_ddp) == [None]
