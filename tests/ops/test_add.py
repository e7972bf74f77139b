"""Sums: torch's bits, whatever the dtype, the instruction set, the threads and the address."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops.problems import FLOATS, GUARD, INTEGERS, placed, random_bits

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


@given(
    st.integers(0, 300),
    st.sampled_from(FLOATS),
    st.integers(1, 5),
    st.sampled_from([1.0, 0.5, 1 / 3]),
    st.integers(0, 2**32 - 1),
    st.integers(0, 31),
)
def test_sums_of_several_have_the_bits_of_one_after_another(
    count: int, dtype: torch.dtype, number: int, factor: float, seed: int, offset: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    values = [random_bits(count, dtype, draw) for _ in range(number)]
    expected = (values[0] * factor).float()
    for more in values[1:]:
        expected = expected + more * factor
    expected = expected.to(dtype)
    placed_at = seed % (number + 1)  # the sum takes the place of one of the parts, or is a tensor of its own
    for isa in ops.supported_isas():
        parts = [placed(part, (offset + i) % 32) for i, part in enumerate([*values, torch.zeros(count, dtype=dtype)])]
        total, buffer = parts[placed_at]
        ops.sum_(total, [part for part, _ in parts[:-1]], factor, isa=isa)
        assert torch.equal(total.isnan(), expected.isnan())
        bits = (t.nan_to_num(0.0, torch.inf, -torch.inf).view(INTEGERS[t.itemsize]) for t in (total, expected))
        assert torch.equal(*bits)
        begin = GUARD + (offset + placed_at) % 32
        assert buffer[:begin].eq(7).all()
        assert buffer[begin + count :].eq(7).all()
        parts = [placed(part, (offset + i) % 32) for i, part in enumerate(values)]
        for add in (False, True):  # to another tensor, in fp32
            before = random_bits(count, torch.float32, draw)
            wide, buffer = placed(before, offset)
            ops.sum_(wide, [part for part, _ in parts], factor, add=add, isa=isa)
            wanted = before + expected if add else expected.float()
            assert torch.equal(wide.isnan(), wanted.isnan())
            assert torch.equal(*(t.nan_to_num(0.0, torch.inf, -torch.inf).view(torch.int32) for t in (wide, wanted)))
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
        last = values.clone()
        ops.sum_(last, [values.flip(0), total.to(dtype), last], threads=threads)
        assert torch.equal(last, (values.flip(0).float() + total.to(dtype) + values).to(dtype))


@pytest.mark.parametrize(
    ("total", "values"),
    [
        (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bfloat16)),
        (torch.ones(2, 3), torch.ones(3, 2, dtype=torch.bfloat16).T),
        (torch.ones(3, 2).T, torch.ones(2, 3)),
        (torch.ones(1), torch.full((1,), -1j).conj().imag),
        (torch.ones(4, dtype=torch.float64), torch.ones(4)),
        (torch.ones(4), torch.ones(4, dtype=torch.float64)),
        (torch.ones(4, device="meta"), torch.ones(4, device="meta")),
    ],
    ids=[
        "kernel",
        "strided values",
        "strided total",
        "lazily negated values",
        "fp64 total",
        "fp64 values",
        "another device",
    ],
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16])
def test_parts_of_any_dtype_are_summed_into_one_of_them(dtype: torch.dtype) -> None:
    parts = [torch.tensor([1, 2]).to(dtype), torch.tensor([3, 5]).to(dtype), torch.tensor([7, 11]).to(dtype)]
    ops.sum_in_order_(parts[1], parts)
    assert [part.tolist() for part in parts] == [[1, 2], [11, 18], [7, 11]]
    total = torch.ones(2, dtype=dtype)
    ops.sum_in_order_(total, parts, add=True)
    assert total.tolist() == [20, 32]
    if dtype.is_floating_point:
        ops.sum_in_order_(parts[0], parts[::2], 0.5)
        assert parts[0].tolist() == [4, 6.5]


def test_wrong_arguments_are_named_before_anything_is_added() -> None:
    total = torch.zeros(6)
    with pytest.raises(TypeError, match=r"total has dtype torch.float64"):
        ops.add_(total.double(), total)
    with pytest.raises(ValueError, match="values has 5 elements; expected 6"):
        ops.add_(total, total.clone()[:5])
    with pytest.raises(ValueError, match="share 16 bytes"):
        ops.add_(total[1:], total[:-1])
    with pytest.raises(ValueError, match="values holds numbers that torch has not negated yet"):
        ops.add_(total[:1], torch.full((1,), -1j).conj().imag)
    with pytest.raises(ValueError, match="no parts"):
        ops.sum_(total, [])
    with pytest.raises(TypeError, match=r"parts\[1\] has dtype torch.bfloat16; expected torch.float32"):
        ops.sum_(total, [total, total.bfloat16()])
    with pytest.raises(TypeError, match=r"parts\[0\] has dtype torch.float32; expected torch.bfloat16"):
        ops.sum_(total.bfloat16(), [total])
    with pytest.raises(TypeError, match=r"total has dtype torch.bfloat16; expected torch.float32"):
        ops.sum_(total.bfloat16(), [total.bfloat16()], add=True)
    with pytest.raises(ValueError, match=r"parts\[0\] has 5 elements; expected 6"):
        ops.sum_(total, [total.clone()[:5]])
    with pytest.raises(ValueError, match="share 16 bytes"):
        ops.sum_(total[1:], [total[1:].clone(), total[:-1]])
    with pytest.raises(ValueError, match="share 24 bytes"):
        ops.sum_(total, [total], add=True)
    assert total.eq(0).all()
