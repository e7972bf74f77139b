"""Sums in place: torch's bits, whatever the dtype, the instruction set, the threads and the address."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops.problems import FLOATS, GUARD, placed, random_bits

from lightning_zero import ops

PIECE = 2**18


@given(st.integers(0, 300), st.sampled_from(FLOATS), st.integers(0, 2**32 - 1), st.integers(0, 31))
def test_sums_have_torchs_bits(count: int, dtype: torch.dtype, seed: int, offset: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    total, values = random_bits(count, torch.float32, draw), random_bits(count, dtype, draw)
    expected = total.clone().add_(values)
    for isa in ops.supported_isas():
        view, buffer = placed(total, offset)
        ops.add_(view, placed(values, 31 - offset)[0], isa=isa)
        assert torch.equal(view.isnan(), expected.isnan())
        assert torch.equal(*(t.nan_to_num(0.0, torch.inf, -torch.inf).view(torch.int32) for t in (view, expected)))
        assert buffer[: GUARD + offset].eq(7).all()
        assert buffer[GUARD + offset + count :].eq(7).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    count, draw = 3 * PIECE + 7, torch.Generator().manual_seed(0)
    total, values = torch.randn(count, generator=draw), torch.randn(count, generator=draw).to(dtype)
    expected = total.clone().add_(values)
    for threads in (1, 2, 5):
        actual = total.clone()
        ops.add_(actual, values, threads=threads)
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("total", "values"),
    [
        (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bfloat16)),
        (torch.ones(2, 3), torch.ones(3, 2, dtype=torch.bfloat16).T),
        (torch.ones(3, 2).T, torch.ones(2, 3)),
        (torch.ones(4, dtype=torch.float64), torch.ones(4)),
        (torch.ones(4), torch.ones(4, dtype=torch.float64)),
        (torch.ones(4, device="meta"), torch.ones(4, device="meta")),
    ],
    ids=["kernel", "strided values", "strided total", "fp64 total", "fp64 values", "another device"],
)
def test_what_the_kernel_does_not_take_torch_adds(
    total: torch.Tensor, values: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    took: list[int] = []
    add = ops.arrays.add_
    monkeypatch.setattr(ops.arrays, "add_", lambda *both: (took.append(both[0].numel()), add(*both)))
    ops.accumulate_(total, values)
    assert total.device.type == "meta" or total.eq(2).all()
    assert took == ([6] if total.is_contiguous() and values.is_contiguous() and total.dim() == 2 else [])


def test_wrong_arguments_are_named_before_anything_is_added() -> None:
    total = torch.zeros(6)
    with pytest.raises(TypeError, match=r"total has dtype torch.float64"):
        ops.add_(total.double(), total)
    with pytest.raises(ValueError, match="values has 5 elements; expected 6"):
        ops.add_(total, total.clone()[:5])
    with pytest.raises(ValueError, match="share 16 bytes"):
        ops.add_(total[1:], total[:-1])
    assert total.eq(0).all()
