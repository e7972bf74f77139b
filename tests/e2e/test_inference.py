"""Inference of large models: `predict` at stage 3 in capped memory, and what `load_from_checkpoint` takes."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from e2e.initialize_large import start_of_peak, status
from e2e.predict_large import GPT
from e2e.started import reports_of

from lightning_zero import load_from_checkpoint

LIMIT = 300.0  # seconds; about 15 on idle cores
SIZES = {"n_layer": 24, "n_head": 16, "n_embd": 704, "context": 64, "vocab_size": 256}  # 143M parameters

pytestmark = [
    pytest.mark.launch,
    pytest.mark.slow,
    pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory is Linux's"),
]


def write(path: Path, model: torch.nn.Module, prefix: str = "", **entries: Any) -> None:
    state = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    version = {"pytorch-lightning_version": lightning.__version__}
    torch.save({"state_dict": state, "epoch": 0, "global_step": 0, **version, **entries}, path)


def test_a_large_gpt2_predicts_in_capped_memory(tmp_path: Path) -> None:
    """On two ranks: shards in fp32 until all are read, then in bf16, half of that; and the block that computes."""
    torch.manual_seed(0)
    model = GPT(**SIZES)
    write(path := tmp_path / "gpt2.ckpt", model, "model.")
    batches = torch.arange(2 * 2 * 16).view(2, 2, 16)
    with torch.no_grad():
        plain = model.bfloat16()
        expected = [plain(batch)[:, -1].argmax(-1).tolist() for batch in batches]
    # A rank that made the whole model, and cast it, would need 1.5 times its size.
    options = {"strategy": "zero3_offload", "sizes": SIZES, "checkpoint": str(path), "cap": 1.25}
    for report in reports_of("predict_large.py", tmp_path, limit=LIMIT, **options):
        assert report["full"] > 5.7e8
        assert report["peak"] < 0.6 * report["full"]
        assert report["end"] < 0.4 * report["full"]
        assert report["predictions"] == expected


def test_a_model_is_loaded_without_a_second_copy(tmp_path: Path) -> None:
    """As examples/gpt2/generate.py does: beside the model no more than a tensor of the file is in memory."""
    sizes = SIZES | {"n_layer": 6}
    write(path := tmp_path / "gpt2.ckpt", GPT(**sizes), hyper_parameters=sizes, hparams_name="kwargs")
    gc.collect()
    begin = start_of_peak()
    model = load_from_checkpoint(GPT, path)
    full = sum(parameter.nbytes for parameter in model.parameters())
    assert status("VmHWM") - begin < 1.15 * full
    assert model.generate([1], 2, top_k=1)
