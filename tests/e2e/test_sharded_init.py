"""Initialization in shards as users start it, and what it costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import server_environment

SCRIPT = Path(__file__).resolve().with_name("initialize_large.py")
LIMIT = 240.0  # seconds; about 8 on idle cores

pytestmark = [pytest.mark.launch, pytest.mark.slow]


def initialize(folder: Path, **options: Any) -> list[dict[str, Any]]:
    """What the ranks report."""
    path = [str(SCRIPT.parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps({"out": str(folder), **options})],
        cwd=folder,
        env=server_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        check=True,
        timeout=LIMIT,
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of a process's memory is Linux's")
def test_a_large_model_takes_little_more_than_its_shards(tmp_path: Path) -> None:
    """300M fp32 parameters on two ranks: half of them, and less than a quarter beside."""
    for report in initialize(tmp_path, strategy="zero3", width=1024, blocks=21):
        assert report["same"]
        assert report["full"] > 1.2e9
        assert report["peak"] < 0.68 * report["full"]
        assert report["end"] < 0.62 * report["full"]


def test_init_module_starts_the_other_ranks(tmp_path: Path) -> None:
    for report in initialize(tmp_path, strategy="zero3_offload", width=16, blocks=2, init_module=True):
        assert report["same"]
