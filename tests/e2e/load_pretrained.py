"""Loads a pretrained model at stage 3 and reports its memory: `load_pretrained.py '{"out": ..., ...}'`.

Each rank writes `<out>/<rank>.json`: in bytes above those in use before, the `peak` and what is held at the `end`; the
model's `full` size; and its `predictions`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from e2e.initialize_large import start_of_peak, status
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Pretrained(LightningModule):
    """Makes its model in `configure_model`."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.model: nn.Module | None = None
        self.report: dict[str, Any] = {}

    def configure_model(self) -> None:
        if self.model is None:
            from transformers import AutoModelForCausalLM

            begin = start_of_peak()
            self.model = AutoModelForCausalLM.from_pretrained(self.path)
            self.report = {"begin": begin, "peak": status("VmHWM") - begin, "end": status("VmRSS") - begin}

    def predict_step(self, batch: Tensor, index: int) -> float:
        assert self.model is not None
        return self.model(batch[None]).logits.double().sum().item()


def main(out: str, strategy: str, path: str) -> None:
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    import transformers  # noqa: F401

    module = Pretrained(path)
    predictions = trainer.predict(module, DataLoader(torch.arange(4).view(1, 4), batch_size=None))
    report = module.report | {"full": sum(p.nbytes for p in module.parameters()), "predictions": predictions}
    Path(out, f"{trainer.global_rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
