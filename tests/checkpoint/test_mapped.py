"""Tensors on the pages of a file: ordinary ones, that take no memory for what nobody reads."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import RankPool, ranks
from torch import Tensor, nn

from lightning_zero.checkpoint.archive_reader import give_back_pages, load_mapped

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def make_tree() -> dict[str, Any]:
    matrix = torch.randn(30, 40)
    return {
        "state_dict": OrderedDict(plain=matrix, tied=matrix, view=matrix[3:5, ::2], transposed=matrix.t()),
        "dtypes": [torch.randn(7).to(d) for d in (torch.float64, torch.bfloat16, torch.float16, torch.complex64)],
        "integers": ({"bool": torch.tensor([True, False]), "number": torch.tensor(5)},),
        "nothing": torch.zeros(0, 3),
        "parameter": nn.Parameter(torch.ones(3), requires_grad=False),
        "leaf": torch.ones(3, requires_grad=True),
        "plain": [1, 2.5, "text", None, (True, b"bytes")],
        7: torch.float32,
    }


def check_equal(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, Tensor):
        assert (actual.dtype, actual.stride(), actual.device) == (expected.dtype, expected.stride(), expected.device)
        assert actual.requires_grad == expected.requires_grad
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key, value in expected.items():
            check_equal(actual[key], value)
    elif isinstance(expected, list | tuple):
        for one, other in zip(actual, expected, strict=True):
            check_equal(one, other)
    else:
        assert actual == expected


def test_it_gives_what_torch_loads(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(tree := make_tree(), path)
    found = load_mapped(path)
    check_equal(found, tree)
    check_equal(found, torch.load(path, weights_only=True))
    state = found["state_dict"]
    assert state["plain"].data_ptr() == state["tied"].data_ptr() == state["transposed"].data_ptr()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning", "ignore:TypedStorage is:UserWarning")
def test_unusual_tensors_are_left_to_torch(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    special = {
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": conjugate,
        "negative": conjugate.imag,
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
    }
    for name, value in special.items():
        torch.save({"w": torch.ones(3), name: value, "set": {1, 2}}, path)
        found = load_mapped(path)
        assert torch.equal(found["w"], torch.ones(3))
        assert torch.equal(dense(found[name]), dense(value))
        assert found["set"] == {1, 2}


def dense(value: Tensor) -> Tensor:
    if value.is_quantized:
        return value.dequantize()
    return value.to_dense().resolve_conj().resolve_neg()


def test_changes_stay_in_the_process_and_pages_with_them(tmp_path: Path) -> None:
    """Also changes that torch's version counter does not count."""
    path = tmp_path / "a.ckpt"
    torch.save({name: torch.ones(1 << 16) for name in "wxyz"}, path)
    found = load_mapped(path)
    found["w"][::2] = 5
    found["x"].data.mul_(2)
    found["y"].numpy()[1 << 15] = 7
    for value in found.values():
        give_back_pages(value)
    assert [float(value.sum()) / (1 << 16) for value in found.values()] == [3, 2, 1 + 6 / (1 << 16), 1]
    assert load_mapped(path)["w"].sum() == 1 << 16
    give_back_pages(torch.ones(1 << 16))  # of no file: nothing happens


def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def read_all(path: str, keep: bool) -> tuple[int, float]:
    """By how much the peak of resident memory grows while everything is read, one tensor after the other."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, total = peak(), 0.0
    for value in load_mapped(Path(path)).values():
        total += float(value.sum())
        if not keep:
            give_back_pages(value)
    return peak() - before, total


@linux
@ranks(1)
def test_pages_that_were_read_are_given_back(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    torch.save({str(number): torch.ones(1 << 20) for number in range(32)}, path)
    (kept, total), (given_back, same) = (pool.run(read_all, path, keep)[0] for keep in (True, False))
    assert total == same == 32 << 20
    assert kept > 120 << 20
    assert given_back < 16 << 20


def flags_of(path: str) -> list[str]:
    """What the kernel says of this process's mappings of a file."""
    mapped = load_mapped(Path(path))
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = [number for number, line in enumerate(lines) if line.endswith(path)]
    assert mapped
    return [next(line for line in lines[number:] if line.startswith("VmFlags")) for number in at]


@linux
@ranks(1)
def test_no_memory_is_reserved_for_the_file(pool: RankPool, tmp_path: Path) -> None:
    """Else the system refuses files that are larger than memory and swap."""
    path = str(tmp_path / "a.ckpt")
    torch.save({"w": torch.ones(1 << 20)}, path)
    (flags,) = pool.run(flags_of, path)[0]
    assert " nr" in flags
