"""LitGPT's own pretraining, with the strategy that `TRAIN_LITGPT='{"strategy": ..., "out": ...}'` names.

All that is changed is the line of `litgpt.pretrain.setup` that chooses a strategy.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from litgpt import pretrain  # type: ignore[import-not-found]
from litgpt.args import EvalArgs, TrainArgs  # type: ignore[import-not-found]
from litgpt.config import Config  # type: ignore[import-not-found]
from litgpt.data import DataModule  # type: ignore[import-not-found]
from torch.utils.data import DataLoader

import lightning_zero  # noqa: F401  (registers the names)

VOCAB, LENGTH, STEPS = 97, 16, 4


class Drawn(DataModule):  # type: ignore[misc]
    """Tokens at random, the same in every run."""

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        drawn = torch.randint(VOCAB, (64, LENGTH + 1), generator=torch.Generator().manual_seed(1))
        return DataLoader(drawn, batch_size=self.batch_size)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def main(strategy: str, out: str) -> None:
    torch.set_num_threads(1)
    # LitGPT compiles the model; C++ for it would take minutes.
    torch.compile = functools.partial(torch.compile, backend="eager")  # type: ignore[assignment]
    make = pretrain.L.Fabric
    pretrain.L.Fabric = lambda **options: make(**options | {"strategy": strategy, "accelerator": "cpu"})
    sizes = {"block_size": LENGTH, "vocab_size": VOCAB, "padded_vocab_size": VOCAB, "n_layer": 3, "n_head": 2}
    pretrain.setup(
        "tiny",
        Config(name="tiny", n_embd=16, intermediate_size=64, **sizes),
        out_dir=Path(out),
        precision="32-true",
        data=Drawn(),
        devices=2,
        logger_name="csv",
        train=TrainArgs(
            save_interval=2,
            global_batch_size=8,
            micro_batch_size=2,
            max_tokens=8 * LENGTH * STEPS,
            max_norm=1.0,
            lr_warmup_steps=1,
        ),
        eval=EvalArgs(interval=2, max_iters=2),
    )


if __name__ == "__main__":
    given = json.loads(os.environ["TRAIN_LITGPT"])
    sys.argv[1:] = ["tiny"]  # LitGPT saves the arguments of its own command
    main(**given)
