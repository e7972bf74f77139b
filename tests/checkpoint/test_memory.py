"""What saving and loading take on top of training, measured."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import RankPool, ranks
from lightning import LightningModule, Trainer
from strategy.fits import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero.registration import STRATEGIES

LAYERS, WIDTH = 25, 3500  # 306M parameters
LARGEST = WIDTH * WIDTH * 4 * 3  # bytes of a parameter and its state
SHARD = LAYERS * LARGEST // 2
LIMIT = SHARD // 10 + LARGEST + (64 << 20)


class Large(LightningModule):
    """Many weights, little to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        out = batch
        for block in self.blocks:
            out = block(out)
        return out.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(4, WIDTH), batch_size=1)  # type: ignore[arg-type]


def make(strategy: dict[str, Any], steps: int) -> tuple[Trainer, Large]:
    trainer = make_trainer(strategy, max_epochs=-1, max_steps=steps)
    with trainer.init_module(empty_init=False):
        return trainer, Large()


class Peak:
    """The largest resident memory since it was made; Linux counts it."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")

    def __call__(self) -> int:
        status = Path("/proc/self/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) << 10


def train_and_save(strategy: dict[str, Any], path: str) -> tuple[int, int]:
    """Peaks of training a step, and with the save after it."""
    torch.manual_seed(0)
    peak = Peak()
    trainer, module = make(strategy, 1)
    trainer.fit(module)
    before = peak()
    trainer.save_checkpoint(path)
    return before, peak()


def resume(strategy: dict[str, Any], path: str) -> int:
    peak = Peak()
    trainer, module = make(strategy, 2)
    trainer.fit(module, ckpt_path=path)
    assert trainer.global_step == 2
    return peak()


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("container", ["full", "sharded"])
@pytest.mark.parametrize("name", ["zero3", "zero2_offload"])
def test_saving_and_loading_take_little_memory(pool: RankPool, name: str, container: str, tmp_path: Path) -> None:
    strategy, path = {**STRATEGIES[name], "checkpoint_format": container}, tmp_path / "a.ckpt"
    saved = pool.run_within(100, train_and_save, strategy, str(path))
    loaded = pool.run_within(100, resume, strategy, str(path))
    for (trained, after), resumed in zip(saved, loaded, strict=True):
        growth = {"save": after - trained, "load": resumed - trained}
        print({k: f"{v >> 20} MiB" for k, v in growth.items()}, f"of {LIMIT >> 20}")
        assert max(growth.values()) <= LIMIT, growth
