"""A device that runs out of memory: what the user reads on each rank, and what the process can do afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import time
import traceback
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from device import sim
from device.where import DevicePool
from lightning import Callback, LightningModule, Trainer
from strategy.fits import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.sharding import BucketGradients

WIDTH, DEPTH, EXAMPLES = 128, 4, 64
MODEL = DEPTH * WIDTH * WIDTH * 4  # bytes of parameters
SET_UP_TIMEOUT, TIMEOUT = 5.0, 0.5  # seconds; the ranks may begin apart


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
    """Leaves no memory for one part of the second step."""

    def __init__(self, part: str) -> None:
        self.part = part

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(trainer.strategy, ZeroStrategy)
        mesh = trainer.strategy.engine.placement.mesh
        for group in (mesh.world, mesh.shard):
            if group.process_group is not None:
                group.process_group.set_timeout(timedelta(seconds=TIMEOUT))

    def begin(self, part: str, trainer: Trainer) -> None:
        if self.part == part and trainer.global_step == 1:
            leave(0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.begin("forward", trainer)

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Tensor) -> None:
        self.begin("backward", trainer)


# By part of the training: a function that the error must have come through.
PARTS = {
    "forward": "training_step",
    "backward": "backward",
    "reduction": "_collect",
}


@dataclasses.dataclass
class Ended:
    """How the fit ended on one rank."""

    kind: str
    message: str  # with its notes
    functions: list[str]  # that it came through
    printed: str
    seconds: float
    kept: int  # bytes on the device afterwards
    trained: bool  # a smaller model, in the same process


def run_out(name: str, part: str) -> Ended:
    gc.collect()
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    kind, message, functions, printed, seconds = fail(name, part)
    dist.all_reduce(torch.zeros(1))  # rank 0 has waited longer
    gc.collect()
    kept = torch.accelerator.memory_allocated() - before
    leave(MODEL)
    return Ended(kind, message, functions, printed, seconds, kept, train_smaller(name))


def make(name: str, **flags: Any) -> Trainer:
    # Without checks ranks wait at the end of a step, with them in the next collective.
    checks = 0 if name == "zero2" else 10
    strategy = ZeroStrategy(**STRATEGIES[name], timeout=SET_UP_TIMEOUT, persistence_numel=0, check_steps=checks)
    return make_trainer(strategy, accelerator=sim.DEVICE, **flags)


def fail(name: str, part: str) -> tuple[str, str, list[str], str, float]:
    trainer, module = make(name, callbacks=[RunOut(part)]), Blocks(WIDTH)
    collect = BucketGradients._collect

    def collect_in_vain(gradients: BucketGradients, dtype: torch.dtype) -> Tensor:
        leave(0)
        return collect(gradients, dtype)

    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        if part == "reduction":
            stack.enter_context(mock.patch.object(BucketGradients, "_collect", collect_in_vain))
        printed = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        raised = stack.enter_context(pytest.raises(RuntimeError))
        trainer.fit(module)
    seconds, error = time.monotonic() - began, raised.value
    message = "\n".join([str(error), *getattr(error, "__notes__", [])])
    functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return type(error).__name__, message, functions, printed.getvalue(), seconds


def train_smaller(name: str) -> bool:
    trainer = make(name)
    trainer.fit(Blocks(WIDTH // 8))
    return trainer.global_step == 3


FAST = [("zero2", "reduction"), ("zero3", "forward")]
SLOW = [("zero2_offload", "backward"), ("zero3_offload", "forward"), ("zero2", "backward")]


@pytest.mark.device
@pytest.mark.parametrize(("name", "part"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_the_rank_reports_what_takes_the_memory_and_the_other_ends_with_its_error(
    device_pool2: DevicePool, name: str, part: str
) -> None:
    if not device_pool2.where.simulated:
        pytest.skip("only the simulated device has a limit to set")
    other, ended = device_pool2.run(run_out, name, part)
    print(ended.printed, other, ended, sep="\n\n")
    assert ended.kind == "OutOfMemoryError"
    assert PARTS[part] in ended.functions
    report = ended.printed
    assert report.count("Rank 1 is out of memory.") == report.count("Memory of rank 1") == 1
    remedy = "strategy.max_live_numel=0" if name == "zero3_offload" else "strategy=zero3_offload"
    for text in ("optimizer state", "peak of a step", remedy, "accumulate_grad_batches=2"):
        assert text in report
    assert "out of memory" not in other.printed
    assert "rank 1 failed: OutOfMemoryError: the simulated device 1 is out of memory" in other.message
    assert max(other.seconds, ended.seconds) < 10 * SET_UP_TIMEOUT
    assert other.kept == ended.kept == 0
    assert other.trained
    assert ended.trained
