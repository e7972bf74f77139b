"""The kernels' threads: the same bits for any number of them, whoever calls, also in the child of a fork."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_zero import ops

COUNT = 3 * 65536 + 17  # four pieces, the last one with a tail
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 0.3}


@pytest.fixture(autouse=True)
def settings_of_before() -> Iterator[None]:
    asked, processes = ops._THREADS.asked, ops._THREADS.processes
    yield
    ops._THREADS.asked, ops._THREADS.processes = asked, processes


def updated(threads: int | None, count: int = COUNT, grad_dtype: torch.dtype = torch.float16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    param, exp_avg, exp_avg_sq = (torch.randn(count, generator=generator) for _ in range(3))
    grad, copy = torch.randn(count, generator=generator).to(grad_dtype), torch.zeros(count, dtype=torch.bfloat16)
    exp_avg_sq.abs_()
    for step in (1, 2):
        ops.adamw_(param, exp_avg, exp_avg_sq, grad, step=step, copy_out=copy, threads=threads, **SETTINGS)
    return [param, exp_avg, exp_avg_sq, copy]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("count", [0, 1, 65535, 65536, 65537, 131072, COUNT, 2**21 + 5])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_threads_gives_the_same_bits(count: int, grad_dtype: torch.dtype) -> None:
    expected = updated(1, count, grad_dtype)
    for threads in (2, 3, 8):
        assert_equal(updated(threads, count, grad_dtype), expected)


def test_callers_on_several_threads_take_turns() -> None:
    expected = updated(1)
    results: list[list[Tensor]] = []

    def call() -> None:
        results.extend(updated(3) for _ in range(5))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    torch.randn(300, 300) @ torch.randn(300, 300)  # torch computes beside it
    for caller in callers:
        caller.join(timeout=60)
    assert len(results) == 20
    for result in results:
        assert_equal(result, expected)


def in_child(queue: Any) -> None:
    torch.set_num_threads(1)  # torch's own pool does not survive a fork
    queue.put([float(tensor.double().sum()) for tensor in updated(3)])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_the_child_of_a_fork_has_threads_of_its_own() -> None:
    expected = updated(3)  # the parent's pool has started
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == [float(tensor.double().sum()) for tensor in expected]
    child.join(timeout=60)
    assert child.exitcode == 0
    assert_equal(updated(3), expected)  # and the parent's still work


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_threads_are_made_once_and_small_arrays_need_none() -> None:
    code = (
        "import os, torch; from lightning_zero import ops; torch.set_num_threads(1)\n"
        "def step(n):\n"
        "    p, m, v, g = (torch.zeros(n) for _ in range(4))\n"
        "    ops.adamw_(p, m, v, g, lr=.1, betas=(.9, .99), eps=1e-8, weight_decay=0., step=1, threads=3)\n"
        "    return len(os.listdir('/proc/self/task'))\n"
        "start = len(os.listdir('/proc/self/task'))\n"
        "print([step(n) - start for n in (1000, 10**6, 10**6, 1000, 10**6)])"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[0, 2, 2, 2, 2]"


def test_the_number_is_the_share_of_the_cores_unless_one_is_asked_for() -> None:
    ops.set_num_threads(None)
    ops.share_cores(1)
    cores = ops.get_num_threads()
    assert 1 <= cores <= len(os.sched_getaffinity(0))
    ops.share_cores(2)
    assert ops.get_num_threads() == max(1, cores // 2)
    ops.share_cores(10**6)
    assert ops.get_num_threads() == 1
    ops.set_num_threads(5)
    assert ops.get_num_threads() == 5


@pytest.mark.parametrize(
    ("value", "expected"), [("3", "3"), ("", None), ("0", "error"), ("two", "error"), ("-1", "error")]
)
def test_the_environment_variable(value: str, expected: str | None) -> None:
    code = "from lightning_zero import ops; print(ops.get_num_threads())"
    environment = os.environ | {"LIGHTNING_ZERO_NUM_THREADS": value}
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    if expected == "error":
        assert "LIGHTNING_ZERO_NUM_THREADS" in result.stderr
        assert result.returncode == 1
    else:
        assert result.returncode == 0, result.stderr
        assert expected in (None, result.stdout.strip())


@pytest.mark.parametrize("value", [0, -1])
def test_too_few_threads_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match=f"threads={value}"):
        ops.set_num_threads(value)
    with pytest.raises(ValueError, match=f"threads={value}"):
        updated(value)
    with pytest.raises(ValueError, match=f"processes={value}"):
        ops.share_cores(value)


@pytest.mark.parametrize("value", [1.0, "2", True])
def test_threads_are_counted_in_ints(value: Any) -> None:
    with pytest.raises(TypeError, match="threads"):
        ops.set_num_threads(value)
