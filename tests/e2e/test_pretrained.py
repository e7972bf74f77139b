"""What `from_pretrained` of a large model takes at stage 3."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from e2e.started import reports_of

LIMIT = 240.0  # seconds; about 15 on idle cores

pytestmark = [
    pytest.mark.launch,
    pytest.mark.slow,
    pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory is Linux's"),
]


def test_a_pretrained_model_is_never_unsharded(tmp_path: Path) -> None:
    """366 MB of fp32 on two ranks: half of it each, and less than a quarter beside, pages of the file included."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=8192, n_positions=64, n_embd=768, n_layer=12, n_head=12)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "gpt2", max_shard_size="200MB")
    with torch.no_grad():
        expected = model(torch.arange(4).view(1, 4)).logits.double().sum().item()
    options = {"strategy": "zero3_offload", "path": str(tmp_path / "gpt2")}
    for report in reports_of("load_pretrained.py", tmp_path, limit=LIMIT, **options):
        assert report["full"] > 3.6e8
        assert report["peak"] < 0.75 * report["full"]
        assert report["end"] < 0.65 * report["full"]
        assert report["predictions"] == [pytest.approx(expected, rel=1e-3)]
