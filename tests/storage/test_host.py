"""Memory in huge pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lightning_zero.storage import passing_zeros, use_huge_pages
from lightning_zero.storage.host import HUGE_PAGE

MIB = 1 << 20
CPU = torch.device("cpu")


def asks_for_huge_pages(tensor: torch.Tensor) -> bool:
    """Whether the system was asked for huge pages in the middle of the tensor's memory."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE):
        begin, end = (int(address, 16) for address in mapping.split(" ", 1)[0].split("-")) if mapping else (0, 0)
        if begin <= middle < end:
            return "hg" in mapping.rsplit("VmFlags:", 1)[1].split()
    raise AssertionError(f"nothing is mapped at {middle:#x}")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
def test_what_the_allocator_does_not_reuse_is_in_huge_pages() -> None:
    for nbytes, huge in ((33 * MIB, True), (2 * HUGE_PAGE, False)):
        zeros = passing_zeros(nbytes // 4, torch.float32, CPU)
        assert not zeros.any()
        empty = torch.empty(nbytes // 2, dtype=torch.bfloat16)
        assert use_huge_pages(empty) is empty
        assert [asks_for_huge_pages(tensor) for tensor in (zeros, empty)] == [huge, huge]
        empty.zero_()
        assert not empty.any()
    assert passing_zeros(3, torch.int64, torch.device("meta")).is_meta
