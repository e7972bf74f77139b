"""Memory of a training whose state and parameters rest on a disk, measured."""

from __future__ import annotations

import gc
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import RankPool
from lightning import Callback, LightningModule, Trainer
from strategy.fits import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import limits
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.integration.preflight import DoesNotFitError
from lightning_zero.storage import note_freed

LAYERS, WIDTH = 160, 1024  # 168M parameters


class Block(nn.Sequential):
    """A unit."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH, bias=False))


class Large(LightningModule):
    """Many weights, little to compute."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(4, WIDTH), batch_size=1)  # type: ignore[arg-type]


def settle_resident() -> int:
    """Give freed memory back, and begin to note the peak; returns what is resident."""
    gc.collect()
    note_freed(torch.empty(0), 1 << 40)
    Path("/proc/self/clear_refs").write_text("5")
    return limits.process_memory()["VmRSS"]


class Training(Callback):
    """Notes the most that is resident from the first step on."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        settle_resident()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.peak = limits.process_memory()["VmHWM"]


def train(strategy: dict[str, Any], layers: int = LAYERS, **flags: Any) -> int:
    """The peak of two steps above what is resident without the model."""
    before, noted = settle_resident(), Training()
    trainer = make_trainer(strategy, max_epochs=-1, max_steps=2, callbacks=[noted], **flags)
    with trainer.init_module(empty_init=False):
        module = Large(layers)
    trainer.fit(module)
    trainer.strategy.release()  # type: ignore[attr-defined]
    return noted.peak - before


def train_again(strategy: dict[str, Any], **flags: Any) -> int:
    """The same, beside what the first training of a process leaves: code, threads and their memory."""
    train(strategy, 1, **flags)
    return train(strategy, **flags)


def on_disk(path: Path) -> dict[str, Any]:
    return STRATEGIES["zero3_nvme"] | {"nvme_path": str(path), "nvme_buffer_gb": 0.1}


@pytest.mark.slow
def test_a_disk_takes_a_sixth_of_the_memory(pool2: RankPool, tmp_path: Path) -> None:
    """Of bf16 parameters. Their gradients rest there, too: in memory they alone would take an eighth."""
    places = on_disk(tmp_path), STRATEGIES["zero3_offload"]
    disk, host = (pool2.run_within(280, train_again, place, precision="bf16-mixed") for place in places)
    for place, peaks in zip(("disk", "host"), (disk, host), strict=True):
        print(f"{place}: {[n >> 20 for n in peaks]} MiB")
    assert min(host) >= LAYERS * WIDTH**2 * 16 // 2, "not all of it was seen"
    assert max(disk) <= min(host) / 6


ROOM, FITTING = 640 << 20, 72  # bytes; layers whose masters and moments alone take 864 MiB


def train_with_little_memory(strategy: dict[str, Any]) -> tuple[int, str]:
    """Steps that were done, and what was said, where the process may take so much more data of its own."""
    train(strategy, 1, precision="bf16-mixed")  # with room: threads and libraries take theirs
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limits.process_memory()["VmData"] + ROOM, hard))
    trainer = make_trainer(strategy, max_epochs=-1, max_steps=2, precision="bf16-mixed")
    try:
        with trainer.init_module(empty_init=False):
            module = Large(FITTING)
        trainer.fit(module)
    except DoesNotFitError as error:
        return trainer.global_step, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        trainer.strategy.release()  # type: ignore[attr-defined]
    return trainer.global_step, ""


@pytest.mark.slow
def test_a_disk_trains_what_does_not_fit_the_memory(pool1: RankPool, tmp_path: Path) -> None:
    """And without it the plan says so, before anything is taken."""
    pool1.kill()
    (done, said), *_ = pool1.run_within(120, train_with_little_memory, on_disk(tmp_path))
    assert (done, said) == (2, "")
    (done, said), *_ = pool1.run_within(120, train_with_little_memory, STRATEGIES["zero3_offload"])
    assert done == 0
    assert re.search(r"data of a process \(ulimit -d\) has .*: rank 0 takes 1\.\d GiB beside", said), said
