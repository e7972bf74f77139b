"""Initializes a large model at stage 3 and reports its memory: `initialize_large.py '{"out": ..., ...}'`.

Each rank writes `<out>/<rank>.json`: in bytes above those in use at the beginning, the `peak` and what is held at the
`end`; the model's `full` size; and whether the parameters are the `same` as those of ordinary initialization.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from lightning import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_zero import gathered_parameters


def make_model(width: int, blocks: int) -> nn.Module:
    """About 12 width² parameters a block, as a transformer's; the largest tensor has 4 width²."""
    return nn.Sequential(*(
        nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(3 * width, width),
        )
        for _ in range(blocks)
    ))  # fmt: skip


class Large(LightningModule):
    """Never trains: `on_fit_start` is the end of initialization."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.sizes = width, blocks
        self.model: nn.Module | None = None
        self.report: dict[str, int] = {}

    def configure_model(self) -> None:
        if self.model is None:
            begin = start_of_peak()
            self.model = make_model(*self.sizes)
            self.report["begin"] = begin

    def on_fit_start(self) -> None:
        self.report["peak"] = status("VmHWM") - self.report["begin"]
        self.report["end"] = status("VmRSS") - self.report["begin"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Tensor, index: int) -> None:
        return None


def start_of_peak() -> int:
    """Forget the highest memory in use until now; the bytes in use now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(name: str) -> int:
    """A line of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main(out: str, strategy: str, width: int, blocks: int, init_module: bool = False) -> None:
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Large(width, blocks)
    seed_everything(0)
    if init_module:  # this starts the other rank
        with trainer.init_module():
            module.configure_model()
    trainer.fit(module, DataLoader(range(2)))
    report = module.report | {"full": sum(p.nbytes for p in module.parameters())}
    assert module.model is not None
    seed_everything(0)
    expected = make_model(width, blocks) if trainer.is_global_zero else module.model
    same = True
    for block, reference in zip(module.model, expected, strict=True):
        with gathered_parameters(block):
            same &= all(map(torch.equal, block.parameters(), reference.parameters()))
    Path(out, f"{trainer.global_rank}.json").write_text(json.dumps(report | {"same": same}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
