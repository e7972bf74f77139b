"""Predicts with a large GPT-2 of a checkpoint in capped memory: `predict_large.py '{"out": ..., ...}'`.

Each rank writes `<out>/<rank>.json`: in bytes above those in use before the model was made, the `peak` and what is held
at the `end`; the model's `full` size in fp32; and its `predictions`.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from e2e.initialize_large import start_of_peak, status
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

# Under a name of its own: both examples have a module `model`, and tests of both run in one process.
_SPEC = importlib.util.spec_from_file_location(
    "gpt2_model", Path(__file__).parents[2] / "examples" / "gpt2" / "model.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
_MODEL = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODEL)
GPT = _MODEL.GPT


class Large(LightningModule):
    """A GPT-2 that is made in shards, in no more memory than `cap` of its size and the mapping of its checkpoint."""

    def __init__(self, sizes: dict[str, int], cap: float, mapped: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.cap, self.mapped = cap, mapped
        self.model: nn.Module | None = None
        self.report: dict[str, Any] = {}

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                full = sum(p.nbytes for p in GPT(**self.sizes).parameters())
            limit = status("VmData") + int(self.cap * full) + self.mapped
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            self.report = {"full": full, "begin": start_of_peak()}
            self.model = GPT(**self.sizes)

    def predict_step(self, batch: Tensor, index: int) -> list[int]:
        assert self.model is not None
        return self.model(batch)[:, -1].argmax(-1).tolist()

    def on_predict_end(self) -> None:
        self.report["peak"] = status("VmHWM") - self.report["begin"]
        self.report["end"] = status("VmRSS") - self.report["begin"]


def main(out: str, strategy: str, sizes: dict[str, int], checkpoint: str, cap: float) -> None:
    trainer = Trainer(
        strategy=strategy,
        precision="bf16-true",
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Large(sizes, cap, Path(checkpoint).stat().st_size)
    batches = torch.arange(2 * 2 * 16).view(2, 2, 16)
    predictions = trainer.predict(module, DataLoader(batches, batch_size=None), ckpt_path=checkpoint)
    Path(out, f"{trainer.global_rank}.json").write_text(json.dumps(module.report | {"predictions": predictions}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
