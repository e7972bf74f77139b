"""Initialization in shards as users start it, and what it costs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from e2e.started import reports_of

SCRIPT = "initialize_large.py"
LIMIT = 240.0  # seconds; about 8 on idle cores

pytestmark = [pytest.mark.launch, pytest.mark.slow]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of a process's memory is Linux's")
def test_a_large_model_takes_little_more_than_its_shards(tmp_path: Path) -> None:
    """300M fp32 parameters on two ranks: half of them, and less than a quarter beside."""
    for report in reports_of(SCRIPT, tmp_path, limit=LIMIT, strategy="zero3", width=1024, blocks=21):
        assert report["same"]
        assert report["full"] > 1.2e9
        assert report["peak"] < 0.68 * report["full"]
        assert report["end"] < 0.62 * report["full"]


def test_init_module_starts_the_other_ranks(tmp_path: Path) -> None:
    options = {"strategy": "zero3_offload", "width": 16, "blocks": 2, "init_module": True}
    for report in reports_of(SCRIPT, tmp_path, limit=LIMIT, **options):
        assert report["same"]
