"""The end of a process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable

import pytest

from lightning_zero.sharding import gloo_exit
from lightning_zero.storage import Lane, ThreadExecutor, threads

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
# In the place of an import: processes go on from here, one after the other, until one of them fails, at most ten.
TEN_TIMES = """
import os
for _ in range(10):
    if os.fork() == 0:
        break
    if code := os.waitstatus_to_exitcode(os.wait()[1]):
        sys.exit(f"a process has ended with {code}")
else:
    sys.exit()
"""


LINUX_BEFORE_3_14 = pytest.mark.skipif(
    sys.platform != "linux" or sys.version_info >= (3, 14), reason="threads are Linux's, the abort old"
)


def end_of(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


@LINUX_BEFORE_3_14
def test_a_process_whose_collective_has_just_ended_ends_without_an_abort() -> None:
    ended = end_of(LATE.format("import lightning_zero.sharding"))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("end", [threads.drain_lanes, gloo_exit.wait_for_gloo])
def test_jobs_of_lanes_end_before_the_process(end: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """And before anybody looks for threads of gloo, which jobs use."""
    monkeypatch.setattr(threads, "_started", weakref.WeakSet())  # without the lanes of other tests
    executor, ended = ThreadExecutor(), list[bool]()

    def job() -> None:
        time.sleep(0.2)
        ended.append(True)

    executor.submit(job, Lane.WRITE, "a tile")
    end()
    assert ended == [True]


@LINUX_BEFORE_3_14
@pytest.mark.slow
def test_torch_alone_does_abort() -> None:
    """When this fails, torch has been mended, and `sharding/gloo_exit.py` can go.

    The abort needs gloo's thread to ask for Python's lock while the main thread has it, which a busy machine may miss.
    """
    ended = end_of(LATE.format(TEN_TIMES))
    assert f"a process has ended with {-signal.SIGABRT.value}" in ended.stderr
