"""What saving and loading take on top of training, measured."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.remote import register
from helpers.ranks import RankPool, ranks
from lightning import Callback, LightningModule, Trainer
from strategy.fits import make_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import CPUAdamW
from lightning_zero.integration.names import STRATEGIES

LAYERS, WIDTH = 10, 2400  # 58M parameters
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


class InBlocks(Large):
    """With 8-bit state."""

    def configure_optimizers(self) -> Any:
        return CPUAdamW(self.parameters(), lr=1e-3, state_dtype="int8")


def make(strategy: dict[str, Any], steps: int, *callbacks: Callback) -> tuple[Trainer, Large]:
    trainer = make_trainer(strategy, max_epochs=-1, max_steps=steps, callbacks=list(callbacks))
    with trainer.init_module(empty_init=False):
        return trainer, InBlocks() if "checkpoint_state" in strategy else Large()


class Peak:
    """The largest resident memory since it was made; Linux counts it."""

    def __init__(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")

    def __call__(self) -> int:
        status = Path("/proc/self/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) << 10


def train_and_save(strategy: dict[str, Any], path: str) -> int:
    """By how much memory grows in a save."""
    register()
    torch.manual_seed(0)
    trainer, module = make(strategy, 1)
    trainer.fit(module)
    peak = Peak()
    before = peak()
    trainer.save_checkpoint(path)
    return peak() - before


class AtStart(Callback):
    """Notes the peak up to the first step, and what of it remains."""

    def __init__(self) -> None:
        self.growth = 0
        self.peak: Peak | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.peak is not None
        highest = self.peak()
        self.growth = highest - Peak()()


def resume(strategy: dict[str, Any], path: str) -> int:
    """By how much more than what remains memory grows from where the checkpoint is opened to the first step."""
    register()
    start = AtStart()
    trainer, module = make(strategy, 2, start)
    load = trainer.strategy.load_checkpoint

    def loading(*args: Any, **kwargs: Any) -> Any:
        start.peak = Peak()
        return load(*args, **kwargs)

    trainer.strategy.load_checkpoint = loading  # type: ignore[method-assign]
    trainer.fit(module, ckpt_path=path)
    assert trainer.global_step == 2
    return start.growth


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize(
    ("protocol", "container", "options"),
    [
        ("", "full", {}),
        ("", "sharded", {}),
        ("shared://", "full", {}),
        ("shared://", "sharded", {}),
        ("", "full", {"checkpoint_state": "compact"}),
        ("", "full", {"checkpoint_state": "fp32"}),
    ],
)
def test_saving_and_loading_take_little_memory(
    pool: RankPool, protocol: str, container: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """At a URL, too, where rank 0 streams one file, and all ranks write theirs of a folder; of 8-bit state, too."""
    strategy = {**STRATEGIES["zero3"], "checkpoint_format": container, **options}
    path = f"{protocol}{tmp_path}/a.ckpt"
    saved = pool.run_within(200, train_and_save, strategy, path)
    loaded = pool.run_within(200, resume, strategy, path)
    print(f"MiB, of {LIMIT >> 20}: save {[n >> 20 for n in saved]}, load {[n >> 20 for n in loaded]}")
    assert max(saved + loaded) <= LIMIT
