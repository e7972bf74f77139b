"""The sum of squares: exact but for fp64's additions, and the same bits everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops.problems import FLOATS, ordinary, placed, random_bits
from torch import Tensor

from lightning_zero import ops

PIECE, LANES = 2**16, 16


def exact(values: Tensor) -> float:
    """Squares of fp32 numbers are exact in fp64, and fsum rounds once."""
    return math.fsum(x * x for x in values.double().tolist())


def bound(count: int) -> float:
    """Of the relative error: half an ulp for every addition on the way of one square."""
    additions = math.ceil(min(count, PIECE) / LANES) + LANES + math.ceil(count / PIECE)
    return additions * 2.0**-53


@given(st.integers(0, 3000), st.sampled_from(FLOATS), st.integers(0, 2**32 - 1), st.integers(0, 31))
def test_the_sum_is_exact_but_for_the_additions(count: int, dtype: torch.dtype, seed: int, offset: int) -> None:
    values = ordinary(count, dtype, torch.Generator().manual_seed(seed))
    total = ops.sum_of_squares(values)
    assert abs(total - exact(values)) <= bound(count) * exact(values)
    view, _ = placed(values, offset)
    for isa in ops.supported_isas():
        assert ops.sum_of_squares(view, isa=isa).hex() == total.hex()


@given(st.integers(0, 300), st.sampled_from(FLOATS), st.integers(0, 2**32 - 1))
def test_any_bits_give_the_same_sum_on_every_instruction_set(count: int, dtype: torch.dtype, seed: int) -> None:
    values = random_bits(count, dtype, torch.Generator().manual_seed(seed))
    total = ops.sum_of_squares(values, isa="scalar")
    assert math.isfinite(total) == bool(values.isfinite().all())
    for isa in ops.supported_isas():
        assert math.isnan(total) or ops.sum_of_squares(values, isa=isa) == total
        assert math.isnan(ops.sum_of_squares(values, isa=isa)) == math.isnan(total)


@pytest.mark.parametrize("dtype", FLOATS)
def test_threads_and_addresses_change_no_bit(dtype: torch.dtype) -> None:
    for count in (PIECE, PIECE + 1, 5 * PIECE + 7, 18 * PIECE + 7):
        values = ordinary(count, dtype, torch.Generator().manual_seed(count))
        total = ops.sum_of_squares(values, threads=1)
        assert ops.sum_of_squares_in_pieces(values.split(ops.SQUARES_PIECE)).hex() == total.hex()
        for size in (PIECE * 2 // 3, 5 * PIECE, 16 * PIECE, 17 * PIECE):
            running = ops.RunningSquares(count)
            for part in values.split(size):
                running.add(part)
            assert running.total().hex() == total.hex()
        assert abs(total - exact(values)) <= bound(count) * exact(values)
        for threads in range(1, 9):
            view, _ = placed(values, 2 * threads + 1)
            for isa in ops.supported_isas():
                assert ops.sum_of_squares(view, threads=threads, isa=isa).hex() == total.hex()


def test_rows_of_rows_of_pieces_are_added_in_one_order() -> None:
    values = ordinary(257 * PIECE + 7, torch.float16, torch.Generator().manual_seed(4))
    total = ops.sum_of_squares(values, threads=1, isa="scalar").hex()
    assert ops.sum_of_squares_in_pieces(values.split(ops.SQUARES_PIECE)).hex() == total
    for size in (16 * PIECE, 17 * PIECE):
        running = ops.RunningSquares(values.numel())
        for part in values.split(size):
            running.add(part)
        assert running.total().hex() == total
    for isa in ops.supported_isas():
        assert ops.sum_of_squares(values, threads=3, isa=isa).hex() == total


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_length_and_address(dtype: torch.dtype) -> None:
    whole = ordinary(258, dtype, torch.Generator().manual_seed(3))
    for count in range(258):
        expected = ops.sum_of_squares(whole[:count], isa="scalar")
        assert abs(expected - exact(whole[:count])) <= bound(count) * exact(whole[:count])
        for offset in range(64 // dtype.itemsize):
            view, _ = placed(whole[:count], offset)
            for isa in ops.supported_isas():
                assert ops.sum_of_squares(view, isa=isa).hex() == expected.hex()


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize("count", [1, 17, 1000, PIECE + 40])
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_element_that_is_not_finite_shows(dtype: torch.dtype, count: int, isa: str) -> None:
    for value in (math.inf, -math.inf, math.nan):
        for where in {0, count // 2, count - 1}:
            values = torch.ones(count, dtype=dtype)
            values[where] = value
            total = ops.sum_of_squares(values, isa=isa)
            assert math.isnan(total) if math.isnan(value) else total == math.inf


@pytest.mark.parametrize("isa", ops.supported_isas())
def test_the_largest_and_smallest_numbers_count(isa: str) -> None:
    largest, smallest = torch.finfo(torch.float32).max, 2.0**-149
    assert ops.sum_of_squares(torch.full((1000,), largest), isa=isa) == pytest.approx(1000 * largest**2, rel=1e-13)
    assert ops.sum_of_squares(torch.full((64,), smallest), isa=isa) == 64 * smallest**2
    tiny = torch.full((64,), 2.0**-24, dtype=torch.float16)
    assert ops.sum_of_squares(tiny, isa=isa) == 2.0**-42
    try:
        torch.set_flush_denormal(True)
        for threads in (1, 3):
            many = ops.sum_of_squares(
                torch.full((4 * PIECE,), 3, dtype=torch.int32).view(torch.float32), threads=threads
            )
            assert many == 4 * PIECE * (3 * smallest) ** 2
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nothing_sums_to_zero(dtype: torch.dtype) -> None:
    for isa in ops.supported_isas():
        assert ops.sum_of_squares(torch.zeros(0, dtype=dtype), isa=isa).hex() == (0.0).hex()
        assert ops.sum_of_squares(-torch.zeros(33, dtype=dtype), isa=isa).hex() == (0.0).hex()
