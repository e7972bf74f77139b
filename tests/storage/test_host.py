"""Host memory that is freed soon: huge pages, and pages that are used again."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import RankPool, ranks

from lightning_zero.integration import engines
from lightning_zero.integration.options import StrategyOptions
from lightning_zero.storage import HostStore, host, temporary_zeros, use_huge_pages

MIB = 1 << 20
CPU = torch.device("cpu")


def flags_of(tensor: torch.Tensor) -> set[str]:
    """What the system notes of the middle of the tensor's memory: "hg": use huge pages, "wf": give children zeros."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE):
        begin, end = (int(address, 16) for address in mapping.split(" ", 1)[0].split("-")) if mapping else (0, 0)
        if begin <= middle < end:
            return set(mapping.rsplit("VmFlags:", 1)[1].split())
    raise AssertionError(f"nothing is mapped at {middle:#x}")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
@pytest.mark.parametrize("nbytes", [32 * MIB, 33 * MIB + 64])
def test_what_the_allocator_does_not_reuse_is_in_huge_pages(nbytes: int) -> None:
    zeros = temporary_zeros(nbytes // 4, torch.float32, CPU)
    empty = torch.empty(nbytes // 2, dtype=torch.bfloat16)
    assert use_huge_pages(empty) is empty
    assert ["hg" in flags_of(tensor) for tensor in (zeros, empty)] == [True, True]
    assert not zeros.any()
    assert not empty.zero_().any()


def test_what_it_reuses_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(host, "_ask_for_huge_pages", lambda tensor: asked.append(tensor.nbytes))
    assert not temporary_zeros(7 * MIB, torch.float32, CPU).any()
    use_huge_pages(torch.empty(7 * MIB))
    assert temporary_zeros(9 * MIB, torch.float32, torch.device("meta")).is_meta
    assert not asked


def test_a_system_without_huge_pages_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_MADV_HUGEPAGE", 9999)  # what such a kernel answers with EINVAL, too
    assert not temporary_zeros(40 * MIB, torch.uint8, CPU).any()
    assert not use_huge_pages(torch.empty(40 * MIB, dtype=torch.uint8)).zero_().any()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not show what it notes")
@pytest.mark.parametrize(("device", "kept"), [("xpu", True), ("cpu", False), (None, False)])
def test_forked_workers_do_not_get_what_serves_a_device(device: str | None, kept: bool) -> None:
    """They get zeros, without a copy. Those of CPU ranks get it, since they can compute with the module."""
    store = HostStore(pin_for=None if device is None else torch.device(device))
    resting = store.rest(40 * MIB // 4, torch.float32, "moments")  # in part in huge pages
    tensors = [resting.view(0, 1000), resting.view(20 * MIB // 4, resting.numel), store.zeros(1000, torch.uint8)]
    assert ["wf" in flags_of(tensor) for tensor in tensors] == [kept] * 3
    assert not resting.view(0, resting.numel).any()


WHERE_A_BLOCK_COMES_FROM = """
import ctypes
from lightning_zero.storage import reuse_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.sbrk.restype = ctypes.c_void_p

def take():
    return libc.malloc(ctypes.c_size_t(31 << 20))

def is_mapped():
    # The second bit of a chunk's size, which lies before its memory. It is not freed, so that nothing is learned.
    return bool(ctypes.c_size_t.from_address(take() - 8).value & 2)

def shrinks_the_heap():
    blocks = [take() for _ in range(10)]
    end = libc.sbrk(0)
    for block in blocks:
        libc.free(ctypes.c_void_p(block))
    return libc.sbrk(0) < end

before = is_mapped()
reuse_freed_memory()
print(before, is_mapped(), shrinks_the_heap())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, ["True", "False", "False"]),
        ({"MALLOC_TRIM_THRESHOLD_": "1000000"}, ["True", "True", "False"]),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432"}, ["False", "False", "True"]),
    ],
    ids=["unset", "set by a variable", "set by a tunable"],
)
def test_freed_memory_is_used_again(settings: dict[str, str], found: list[str]) -> None:
    """Large blocks come from the heap, not as mappings, and its end is kept, unless the environment has its own way."""
    # The suite has settings of its own, which measure memory better.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | settings
    command = [sys.executable, "-P", "-c", WHERE_A_BLOCK_COMES_FROM]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert child.stdout.split() == found


def make_a_mesh() -> int:
    """How often it asks for memory to be used again."""
    with mock.patch.object(engines, "reuse_freed_memory") as asked:
        engines.make_mesh(StrategyOptions(stage=1), 1, dist.get_world_size(), dist.get_rank(), [CPU])
        return asked.call_count


@ranks(1)
def test_cpu_ranks_use_it_again(pool: RankPool) -> None:
    assert pool.run(make_a_mesh) == [1]
