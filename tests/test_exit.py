"""The end of a process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# A collective completes while the main thread keeps Python's lock to its end, as if the thread of gloo had been late.
LATE = """
import sys, time
import torch
{}
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
sys.setswitchinterval(100.0)
torch.distributed.all_reduce(torch.ones(1000), async_op=True)
end = time.perf_counter() + 0.2
while time.perf_counter() < end:
    pass
"""


@pytest.mark.skipif(sys.platform != "linux" or sys.version_info >= (3, 14), reason="threads are Linux's, the abort old")
@pytest.mark.parametrize(
    ("imports", "code"),
    [("import lightning_zero.sharding", 0), pytest.param("", -signal.SIGABRT, marks=pytest.mark.slow)],
    ids=["with us", "torch alone"],
)
def test_a_process_whose_collective_has_just_ended_ends_without_an_abort(imports: str, code: int) -> None:
    """Which torch alone does not promise: when it does, `sharding/gloo_exit.py` can go."""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", LATE.format(imports)], capture_output=True, text=True, check=False, timeout=120
    )
    assert ended.returncode == code, ended.stderr
