"""The kernels' threads: the same bits for any number of them, whoever calls, also in the child of a fork."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops.problems import fresh, placed
from torch import Tensor

from lightning_zero import ops

COUNT = 3 * 65536 + 17  # four pieces, the last one with a tail
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 0.3}

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs cores to bind to")


@pytest.fixture(autouse=True)
def settings_of_before() -> Iterator[None]:
    threads = ops.threads._THREADS
    asked, processes, near = threads.asked, threads.processes, threads.near
    yield
    threads.asked, threads.processes, threads.near = asked, processes, near


@pytest.fixture
def unbound() -> Iterator[None]:
    yield
    ops.bind_threads(None)


def child(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own that has imported torch and the kernels."""
    code = f"import os, torch; from lightning_zero import ops; torch.set_num_threads(1)\n{code}"
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
        timeout=240,
    )


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


def test_more_threads_than_any_machine_has_give_the_same_bits() -> None:
    assert_equal(updated(2**62), updated(1))


def test_callers_on_several_threads_get_what_one_does() -> None:
    expected = updated(1)
    results: list[list[Tensor]] = []

    def call() -> None:
        results.extend(updated(3) for _ in range(5))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    torch.randn(300, 300) @ torch.randn(300, 300)  # torch computes beside it
    for caller in callers:
        caller.join(timeout=240)
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
    assert queue.get(timeout=240) == [float(tensor.double().sum()) for tensor in expected]
    child.join(timeout=240)
    assert child.exitcode == 0
    assert_equal(updated(3), expected)  # and the parent's still work


def tasks() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def cores_of_the_worker(queue: Any) -> None:
    torch.set_num_threads(1)
    before, end = tasks(), time.monotonic() + 60
    # A worker binds itself when it joins an update, which a small machine, or a busy one, may leave to others.
    while time.monotonic() < end:
        updated(2)
        (worker,) = tasks() - before
        if len(cores := sorted(os.sched_getaffinity(int(worker)))) == 1:
            break
    queue.put(cores)


@needs_proc
@needs_affinity
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_the_child_of_a_fork_keeps_to_its_parents_cores(unbound: None) -> None:
    last = max(os.sched_getaffinity(0))
    ops.bind_threads([last])
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()  # without a thread that feeds it
    child = context.Process(target=cores_of_the_worker, args=(queue,))
    child.start()
    child.join()
    assert queue.get() == [last]


def test_ranks_of_a_machine_share_the_cores_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[Any] = []
    monkeypatch.setattr(ops.threads, "_NAMED_CORES", [0, 1, 4, 5])
    monkeypatch.setattr(ops.threads, "bind_threads", bound.append)
    for processes, number in [(1, 0), (2, 0), (2, 1), (4, 3), (8, 5)]:
        ops.share_cores(processes, number)
    assert bound == [[0, 1, 4, 5], [0, 1], [4, 5], [5], [1]]


def test_there_are_no_more_threads_than_cores_they_are_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.threads, "_C", SimpleNamespace(bind_threads=lambda *_, **__: None))
    monkeypatch.setattr(ops.threads, "_THREADS", threads := ops.threads._Threads(""))
    monkeypatch.setattr(ops.threads, "_NAMED_CORES", [*range(8)])
    threads.cores = 64
    counts = []
    for processes in (1, 2, 16):
        ops.share_cores(processes)
        counts.append(ops.get_num_threads())
    ops.bind_threads(None)
    assert [*counts, ops.get_num_threads()] == [8, 4, 1, 4]


@pytest.mark.slow
@needs_proc
def test_threads_are_made_once_and_small_arrays_need_none() -> None:
    code = (
        "def step(n):\n"
        "    p, m, v, g = (torch.zeros(n) for _ in range(4))\n"
        "    ops.adamw_(p, m, v, g, lr=.1, betas=(.9, .99), eps=1e-8, weight_decay=0., step=1, threads=3)\n"
        "    return len(os.listdir('/proc/self/task'))\n"
        "start = len(os.listdir('/proc/self/task'))\n"
        "print([step(n) - start for n in (1000, 10**6, 10**6, 1000, 10**6)])"
    )
    result = child(code)
    assert result.stdout.strip() == "[0, 2, 2, 2, 2]", result.stderr


def test_other_threads_run_during_an_update() -> None:
    tensors = [torch.zeros(4_000_000) for _ in range(4)]
    turns, during, end = 0, [0], time.monotonic() + 60

    def update() -> None:
        for step in itertools.count(1):
            before = turns
            ops.adamw_(*tensors, step=step, isa="scalar", **SETTINGS)
            during.append(turns - before)
            # With the GIL held, the other thread would see the updates' beginnings and ends only.
            if max(during) > 5 or time.monotonic() > end:
                return

    thread = threading.Thread(target=update)
    thread.start()
    while thread.is_alive():
        time.sleep(0.0005)
        turns += 1
    assert max(during) > 5


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


def in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def beside() -> tuple[int, set[int]]:
    ops.work_beside()
    return ops.get_num_threads(), os.sched_getaffinity(0)


@needs_affinity
def test_work_beside_the_training_leaves_two_cores_and_keeps_near_the_device(unbound: None) -> None:
    threads, free = ops.threads._THREADS, os.sched_getaffinity(0)
    ops.set_num_threads(None)
    ops.share_cores(1)
    with mock.patch.object(threads, "cores", 16):
        assert in_thread(beside) == (14, free)
        assert (ops.get_num_threads(), ops.threads_beside()) == (16, 14)  # other threads do not
        ops.share_cores(5)
        assert in_thread(beside) == (1, free)
        ops.set_num_threads(7)
        assert in_thread(beside) == (7, free)
        ops.set_num_threads(None)
        ops.share_cores(1)
        last = max(free)
        ops.keep_near([last])
        assert in_thread(beside) == (1, {last})
        assert ops.get_num_threads() == 1
        assert os.sched_getaffinity(0) == free
        ops.keep_near([])
        assert in_thread(beside) == (14, free)


@pytest.mark.parametrize("value", ["1", "3", "64"])
def test_the_environment_gives_the_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_NUM_THREADS", value)
    assert fresh("threads").get_num_threads() == int(value)


def test_an_empty_environment_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_NUM_THREADS", "")
    monkeypatch.setenv("LIGHTNING_ZERO_CORES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "97")  # torch's, not ours
    module = fresh("threads")
    assert module._THREADS.asked is None
    assert module.get_num_threads() == module._cores()


@pytest.mark.parametrize("value", ["0", "two", "-1", "1.5"])
def test_a_wrong_number_in_the_environment_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_NUM_THREADS", value)
    with pytest.raises(ValueError, match=f"LIGHTNING_ZERO_NUM_THREADS='?{value}"):
        fresh("threads")


@pytest.mark.parametrize("value", [0, -1, 2**63])
def test_numbers_of_threads_that_cannot_be_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match=f"threads={value} is out of range; expected >= 1, and < 2"):
        ops.set_num_threads(value)
    with pytest.raises(ValueError, match=f"threads={value}"):
        updated(value)
    with pytest.raises(ValueError, match=f"processes={value}"):
        ops.share_cores(value)


@pytest.mark.parametrize("value", [1.0, "2", True])
def test_threads_are_counted_in_ints(value: Any) -> None:
    with pytest.raises(TypeError, match="threads"):
        ops.set_num_threads(value)
    with pytest.raises(TypeError, match="threads"):
        updated(value)
    with pytest.raises(TypeError, match="processes"):
        ops.share_cores(value)


# ---------------------------------------------------------------------------------------------------------- binding


def allowed() -> list[int]:
    return sorted(os.sched_getaffinity(0))


BINDING = """
import ast, time
def tasks():
    return set(map(int, os.listdir('/proc/self/task')))
before = tasks()
def cores(expected):
    # A worker binds itself when it joins an update, which a small machine, or a busy one, may leave to others.
    end = time.monotonic() + 60
    while time.monotonic() < end:
        ops.adamw_(*(torch.zeros(10**6) for _ in range(4)), lr=.1, betas=(.9, .99), eps=1e-8, weight_decay=0., step=1,
                   threads=3)
        found = sorted(sorted(os.sched_getaffinity(task)) for task in tasks() - before)
        if found == expected:
            break
    return found
all_cores = sorted(os.sched_getaffinity(0))
"""


@pytest.mark.slow
@needs_proc
@needs_affinity
def test_workers_are_bound_and_set_free_but_never_the_caller() -> None:
    code = BINDING + (
        "print(cores([all_cores] * 2) == [all_cores] * 2)\n"
        "one = [[all_cores[-1]]] * 2\n"
        "ops.bind_threads([all_cores[-1]]); print(cores(one) == one, sorted(os.sched_getaffinity(0)) == all_cores)\n"
        "two = [[all_cores[0]], [all_cores[-1]]]\n"
        "ops.bind_threads([all_cores[-1], all_cores[0]]); print(cores(two) == two)\n"
        "ops.bind_threads(None); print(cores([all_cores] * 2) == [all_cores] * 2)\n"
    )
    result = child(code)
    assert result.stdout.split() == ["True"] * 5, result.stderr + result.stdout


@pytest.mark.slow
@needs_proc
@needs_affinity
def test_the_environment_binds_the_workers() -> None:
    core = allowed()[-1]
    code = BINDING + f"one = [[{core}]] * 2; print(cores(one) == one, sorted(os.sched_getaffinity(0)) == all_cores)"
    result = child(code, LIGHTNING_ZERO_CORES=str(core))
    assert result.stdout.split() == ["True", "True"], result.stderr + result.stdout


@pytest.mark.slow
def test_wrong_cores_are_refused_when_the_package_is_imported() -> None:
    result = child("", LIGHTNING_ZERO_CORES="100000")
    assert result.returncode == 1
    assert "ValueError" in result.stderr
    assert "100000" in result.stderr


@needs_affinity
def test_a_core_that_is_not_allowed_is_refused(unbound: None) -> None:
    for core in (-1, max(allowed()) + 1, 1023, 1024, 10**6):
        with pytest.raises(ValueError, match=f"core {core} is (not one that this process may run on|out of range)"):
            ops.bind_threads([*allowed(), core])


@needs_affinity
def test_bound_threads_give_the_same_bits(unbound: None) -> None:
    expected = updated(1)
    for cores in ([allowed()[0]], allowed() * 3, [], None):
        ops.bind_threads(cores)
        assert_equal(updated(3), expected)


@needs_affinity
@pytest.mark.parametrize("text", ["{0}", "{0}-{0}", "{0},{0}", "{0}-{1}", "{0},{1}-{1}"])
def test_cores_of_the_environment(text: str, monkeypatch: pytest.MonkeyPatch, unbound: None) -> None:
    cores = allowed()
    text = text.format(cores[0], cores[0] + 1 if cores[0] + 1 in cores else cores[0])
    bound: list[Any] = []
    monkeypatch.setattr(ops._C, "bind_threads", lambda cores, together: bound.append((cores, together)))
    monkeypatch.setenv("LIGHTNING_ZERO_CORES", text)
    fresh("threads")
    assert bound == [(ops.threads._cores_named(text), False)]


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9)), min_size=1, max_size=5))
def test_lists_and_ranges_of_cores(parts: list[tuple[int, int]]) -> None:
    text = ",".join(str(first) if more == 0 else f"{first}-{first + more}" for first, more in parts)
    assert ops.threads._cores_named(text) == [core for first, more in parts for core in range(first, first + more + 1)]


@pytest.mark.parametrize("value", ["x", "5-", "-5", "1,,2", "1,", "0 1", "0-1-2", "0x1", "1.0", "0;1", " 0"])
def test_other_text_names_no_cores(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ZERO_CORES", value)
    with pytest.raises(ValueError, match=r"LIGHTNING_ZERO_CORES=.*must be numbers and ranges"):
        fresh("threads")


# ------------------------------------------------------------------------------------------------- zeros, interrupts


@pytest.mark.parametrize("count", [0, 1, 1000, 2**19 - 1, 2**19 + 1, 3 * 2**19 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int16])
def test_zero_fills_a_tensor_and_nothing_beside_it(count: int, dtype: torch.dtype) -> None:
    for threads in (1, 2, 5):
        ops.set_num_threads(threads)
        view, buffer = placed(torch.full((count,), 3, dtype=dtype), 1 + threads)
        ops.zero_(view)
        assert (view == 0).all()
        begin = view.storage_offset()
        assert (buffer[:begin] == 7).all()
        assert (buffer[begin + count :] == 7).all()


INTERRUPTED = """
import signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
arguments = dict(lr=1e-2, betas=(.9, .99), eps=1e-8, weight_decay=.1, isa='scalar')
def tensors():
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(3 * 10**7, generator=generator) for _ in range(4)]
first, expected = tensors(), tensors()
ops.adamw_(*expected, step=1, threads=1, **arguments)
def interrupt(value):
    while value == first[0][0]:  # until the update has begun
        pass
    os.kill(os.getpid(), signal.SIGINT)
for threads in (1, 3):
    current = [tensor.clone() for tensor in first]
    thread = threading.Thread(target=interrupt, args=(current[0][0],))
    try:
        thread.start()
        ops.adamw_(*current, step=1, threads=threads, **arguments)
        thread.join()
        print('missed')
    except KeyboardInterrupt:
        print(all(torch.equal(a, b) for a, b in zip(current, expected)))
again = [tensor.clone() for tensor in first]
ops.adamw_(*again, step=1, threads=3, **arguments)
print(all(torch.equal(a, b) for a, b in zip(again, expected)))
"""


@pytest.mark.slow
def test_an_interrupted_update_is_complete_and_the_process_goes_on() -> None:
    result = child(INTERRUPTED)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True"] * 3
