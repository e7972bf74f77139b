"""A device that runs out of memory: what the user reads on each rank, and what the process can do afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from device import sim
from device.where import DevicePool
from lightning import Callback, LightningModule, Trainer
from strategy.fits import NAMES, make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.sharding import BucketGradients

pytestmark = pytest.mark.simulated

WIDTH, DEPTH, EXAMPLES = 128, 4, 64
MODEL = DEPTH * WIDTH * WIDTH * 4  # bytes of parameters
SET_UP_TIMEOUT, TIMEOUT = 10.0, 2.0  # seconds; the ranks may begin apart


class Blocks(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(DEPTH))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(3 * EXAMPLES, self.width), batch_size=EXAMPLES)


def leave(room: int) -> None:
    """On rank 1's device; rank 0's is large."""
    if dist.get_rank() == 1:
        sim.install().set_limit(1, torch.accelerator.memory_allocated(1) + room)


class RunOut(Callback):
    """Leaves no memory for one phase of the second step."""

    def __init__(self, name: str, phase: str) -> None:
        self.name, self.phase = name, phase

    def begin(self, phase: str, trainer: Trainer) -> None:
        if self.phase == phase and trainer.global_step == 1:
            leave(0)

    def limit_waits(self, trainer: Trainer) -> None:
        """From a place on to which both ranks come."""
        dist.all_reduce(torch.zeros(1))
        assert isinstance(trainer.strategy, ZeroStrategy)
        mesh = trainer.strategy.engine.placement.mesh
        groups = [mesh.world.process_group, mesh.shard.process_group]
        if (self.name, self.phase) in FIRST_LIGHTNING:
            groups.append(dist.group.WORLD)
        for group in groups:
            if group is not None:
                group.set_timeout(timedelta(seconds=TIMEOUT))

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1 or self.phase == "reduction":  # which fails in the first step
            self.limit_waits(trainer)
        self.begin("forward", trainer)
        self.begin("gather", trainer)

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Tensor) -> None:
        self.begin("backward", trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self.begin("update", trainer)


# By phase: the function that the error must have come through, and names, not all, that take the device's memory there.
PHASES = {
    "set-up": ("_shard", "zero3"),
    "forward": ("training_step", "zero0 zero1_offload"),
    "gather": ("begin_unshard", "zero3 zero3_offload"),
    "backward": ("backward", "zero2_offload zero3"),
    "reduction": ("_collect", "zero1_offload zero2"),
    "update": ("update", "zero1 zero3"),
}
CELLS = [(name, phase) for phase, (_, names) in PHASES.items() for name in names.split()]
FAST = [("zero2", "reduction"), ("zero3", "gather")]
# The other rank comes to a collective of Lightning's before it comes to one of ours.
FIRST_LIGHTNING = [("zero3", "update")]


@dataclasses.dataclass
class Ended:
    """How the fit ended on one rank."""

    kind: str
    message: str  # with its notes
    functions: list[str]  # that it came through
    before: str  # the error that was raised before it, if there was one
    printed: str
    seconds: float
    kept: int  # bytes on the device afterwards
    trained: bool  # a smaller model, in the same process


def run_out(name: str, phase: str) -> Ended:
    before = held()
    ended = fail(name, phase)
    dist.group.WORLD.set_timeout(timedelta(seconds=10 * SET_UP_TIMEOUT))
    dist.all_reduce(torch.zeros(1))  # rank 0 has waited longer
    ended.kept = held() - before
    leave(MODEL)
    if (name, phase) not in FIRST_LIGHTNING:  # whose group is of no use any more
        ended.trained = train_smaller(name)
    return ended


def held() -> int:
    """Bytes on the device, once what was enqueued has run and garbage is collected."""
    with contextlib.suppress(RuntimeError):  # of a collective to which the other rank did not come
        torch.accelerator.synchronize()
    for _ in range(2):  # what a finalizer has brought back in the first one goes in the second
        gc.collect()
    return torch.accelerator.memory_allocated()


def make(name: str, **flags: Any) -> Trainer:
    # Without checks ranks wait at the end of a step, with them in the next collective.
    checks = 0 if name == "zero2" else 10
    options: dict[str, Any] = {"persistence_numel": 0, "check_steps": checks, "preflight": "off"}
    strategy = ZeroStrategy(**STRATEGIES[name], timeout=SET_UP_TIMEOUT, **options)
    return make_trainer(strategy, accelerator=sim.DEVICE, **flags)


def fail(name: str, phase: str) -> Ended:
    trainer, module = make(name, callbacks=[RunOut(name, phase)]), Blocks(WIDTH)
    collect = BucketGradients._collect

    def collect_in_vain(gradients: BucketGradients, dtype: torch.dtype) -> Tensor:
        leave(0)
        return collect(gradients, dtype)

    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        if phase == "reduction":
            stack.enter_context(mock.patch.object(BucketGradients, "_collect", collect_in_vain))
        if phase == "set-up":
            leave(MODEL // 4)
        printed = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        raised = stack.enter_context(pytest.raises(RuntimeError))
        trainer.fit(module)
    seconds, error = time.monotonic() - began, raised.value
    message = "\n".join([str(error), *getattr(error, "__notes__", [])])
    functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    context = repr(error.__context__) if error.__context__ else ""
    return Ended(type(error).__name__, message, functions, context, printed.getvalue(), seconds, 0, False)


def train_smaller(name: str) -> bool:
    trainer = make(name)
    trainer.fit(Blocks(WIDTH // 8))
    return trainer.global_step == 3


@pytest.mark.device
@pytest.mark.parametrize(
    ("name", "phase"), [pytest.param(*cell, marks=[] if cell in FAST else pytest.mark.slow) for cell in CELLS]
)
def test_the_rank_reports_what_takes_the_memory_and_the_other_ends_with_its_error(
    device_pool2: DevicePool, name: str, phase: str
) -> None:
    other, ended = device_pool2.run(run_out, name, phase)
    if (name, phase) in FIRST_LIGHTNING:
        device_pool2.pool.kill()
    print(ended.printed, other, ended, sep="\n\n")
    assert ended.kind == "OutOfMemoryError"
    assert PHASES[phase][0] in ended.functions
    report = ended.printed
    assert report.count("Rank 1 is out of memory.") == report.count("Memory of rank 1") == 1
    # At `zero3_offload` the most memory is taken when all gradients of this small model are reduced beside backward.
    remedy = "strategy.max_in_flight_mb=0" if name == "zero3_offload" else "strategy=zero3_offload"
    for text in ("optimizer state", "peak of a step", remedy, "accumulate_grad_batches=2"):
        assert text in report
    assert "out of memory" not in other.printed
    assert "rank 1 failed: OutOfMemoryError: the simulated device 1 is out of memory" in other.message
    assert not ended.before
    assert max(other.seconds, ended.seconds) < 10 * SET_UP_TIMEOUT
    assert other.kept == ended.kept == 0
    assert other.trained == ended.trained == ((name, phase) not in FIRST_LIGHTNING)


class SaveOnFullDevice(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            torch.accelerator.synchronize()
            device = dist.get_rank()
            sim.install().set_limit(device, torch.accelerator.memory_allocated(device))
            trainer.save_checkpoint(self.path)
            sim.install().set_limit(device, sim.EVERY_DEVICE_BYTES)


def save_on_full_device(name: str, form: str, folder: Path) -> int:
    """How many more steps the checkpoint resumes with."""
    path = folder / "last.ckpt"
    strategy = ZeroStrategy(**STRATEGIES[name], persistence_numel=0, checkpoint_format=form)
    make_trainer(strategy, accelerator=sim.DEVICE, callbacks=[SaveOnFullDevice(path)]).fit(Blocks(WIDTH))
    resumed = make_trainer(ZeroStrategy(**STRATEGIES[name], persistence_numel=0), accelerator=sim.DEVICE)
    resumed.fit(Blocks(WIDTH), ckpt_path=path)
    return resumed.global_step


@pytest.mark.device
@pytest.mark.parametrize("form", ["full", pytest.param("sharded", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "zero3" else pytest.mark.slow) for name in NAMES]
)
def test_a_checkpoint_is_saved_on_a_device_that_is_full(
    device_pool2: DevicePool, tmp_path: Path, name: str, form: str
) -> None:
    assert device_pool2.run(save_on_full_device, name, form, tmp_path) == [3, 3]
