"""Split masters: what comes back, and that an update of one is an update of an fp32 master."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops.problems import (
    FLOATS,
    HALF,
    MASTERS,
    RULES,
    Layout,
    from_bits,
    joined,
    make_tensors,
    ordinary,
    placed,
    random_bits,
    same_bits,
    split,
)
from torch import Tensor

from lightning_zero import ops

LARGEST = 65520.0  # from here on fp16 is infinite
EXACT = 2.0**-16  # from here on fp16 and 16 bits hold every fp32 number


def halves(low: Tensor) -> Tensor:
    """fp32 numbers with every upper half, so every sign and exponent, and these lower halves (NaN left out)."""
    whole = from_bits(((torch.arange(2**16) << 16)[:, None] + low).flatten())
    return whole[~whole.isnan()]


@pytest.fixture(scope="module")
def numbers() -> Tensor:
    """Lower halves around the ties of both formats, and random ones."""
    edges = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    whole = [halves(edges)]
    generator = torch.Generator().manual_seed(1)
    whole += [halves(torch.randint(0, 2**16, (1,), generator=generator)) for _ in range(4)]
    # Random lower halves that differ from number to number, too.
    whole += [random_bits(2**18, torch.float32, generator)]
    return without_nan(torch.cat(whole))


def without_nan(x: Tensor) -> Tensor:
    return x[~x.isnan()]


@pytest.mark.parametrize("isa", ops.supported_isas())
def test_bf16_holds_every_number_bit_for_bit(numbers: Tensor, isa: str) -> None:
    high, remainder = split(numbers, torch.bfloat16, isa)
    assert same_bits(joined(high, remainder, isa), numbers)
    bits = numbers.view(torch.int32).long() & 0xFFFFFFFF
    nearest = (bits + 0x8000) >> 16  # half away from zero, since the bits are sign and magnitude
    assert torch.equal(high.view(torch.int16).long() & 0xFFFF, nearest & 0xFFFF)
    assert torch.equal(remainder.long(), bits - (nearest << 16))


@pytest.mark.parametrize("isa", ops.supported_isas())
def test_fp16_holds_every_number_of_its_range(numbers: Tensor, isa: str) -> None:
    high, remainder = split(numbers, torch.float16, isa)
    assert same_bits(high, numbers.half())
    back, magnitude = joined(high, remainder, isa), numbers.abs()
    exact = (magnitude >= EXACT) & (magnitude < LARGEST)
    assert same_bits(back[exact], numbers[exact])
    small = magnitude < EXACT
    assert (back[small].double() - numbers[small].double()).abs().max() <= 2.0**-40
    assert torch.equal(back.signbit(), numbers.signbit())
    large = magnitude >= LARGEST
    assert same_bits(back[large], numbers[large].sign() * torch.inf)
    assert (remainder[large] == 0).all()
    # The remainder is the nearest whole number of units, as documented.
    exponent = high.double().abs().clamp(min=2.0**-14).log2().floor()
    units = (numbers.double() - high.double()) * 2.0 ** (25 - exponent)
    assert torch.equal(remainder[~large].double(), units[~large].round())


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize("dtype", HALF)
def test_zeros_infinities_and_nan(dtype: torch.dtype, isa: str) -> None:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf] * 9)
    high, remainder = split(special, dtype, isa)
    assert same_bits(joined(high, remainder, isa), special)
    assert same_bits(high, special.to(dtype))
    assert (remainder == 0).all()
    payloads = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFF8000, 0xFFFFFFFF] * 5)
    nan = from_bits(payloads)
    assert nan.isnan().all()
    high, remainder = split(nan, dtype, isa)
    assert high.isnan().all()
    assert (remainder == 0).all()
    assert joined(high, remainder, isa).isnan().all()


@pytest.mark.parametrize("dtype", HALF)
def test_what_came_back_splits_and_comes_back_again(numbers: Tensor, dtype: torch.dtype) -> None:
    """Saving and loading through fp32 loses nothing, also below fp16's exact range.

    There, a number that was rounded to a tie may come back as another pair: the same number beside the other fp16.
    """
    high, remainder = split(numbers, dtype)
    once = joined(high, remainder)
    high_again, remainder_again = split(once, dtype)
    assert same_bits(joined(high_again, remainder_again), once)
    sure = numbers.abs() >= EXACT if dtype == torch.float16 else torch.ones_like(numbers, dtype=torch.bool)
    sure |= remainder.abs() < 2**14
    assert same_bits(high_again[sure], high[sure])
    assert torch.equal(remainder_again[sure], remainder[sure])


@pytest.mark.parametrize("isa", ops.supported_isas())
def test_every_bf16_pair_that_is_no_overflow_comes_back(isa: str) -> None:
    """All 2^16 distances beside some numbers: the pairs that `split_` makes are all there are."""
    high = torch.tensor([1.0, -1.0, 1.5, 0.0078125, -3e38, 1e-38, 2.0], dtype=torch.bfloat16).repeat_interleave(2**16)
    remainder = torch.arange(-(2**15), 2**15).to(torch.int16).repeat(7)
    high_again, remainder_again = split(joined(high, remainder, isa), torch.bfloat16, isa)
    assert same_bits(high_again, high)
    assert torch.equal(remainder_again, remainder)


@pytest.mark.parametrize("isa", ops.supported_isas())
def test_every_fp16_pair_within_half_an_ulp_comes_back_as_a_number(isa: str) -> None:
    """All fp16 numbers with the distances at both ends and around zero."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    high = every[every.isfinite()].repeat_interleave(9)
    distances = torch.tensor([-16384, -16380, -8192, -1, 0, 4, 8192, 16383, 16384]).repeat(high.numel() // 9)
    # No distance crosses zero, or goes further than halfway to the next smaller number below a power of two.
    outward = (distances >= 0) != high.signbit()
    power = (high.view(torch.int16) & 0x3FF) == 0
    normal = high.abs() > 2.0**-14
    valid = outward | (distances == 0) | ((high != 0) & ~(power & normal & (distances.abs() > 8192)))
    valid &= ~((high.abs() == 65504) & outward & (distances.abs() == 16384))  # 65520
    exponent = high.double().abs().clamp(min=2.0**-14).log2().floor()
    value = high.double() + distances.double() * 2.0 ** (exponent - 25)
    valid &= value.float().double() == value  # other distances no fp32 number has
    whole = joined(high[valid], distances[valid].to(torch.int16), isa)
    assert torch.equal(whole.double(), value[valid])
    assert same_bits(joined(*split(whole, torch.float16, isa), isa), whole)


@given(st.integers(0, 300), st.sampled_from(HALF), st.lists(st.integers(0, 31), min_size=3, max_size=3), st.integers(0))
def test_length_address_and_instruction_set_change_no_bit(
    count: int, dtype: torch.dtype, offsets: list[int], seed: int
) -> None:
    whole = random_bits(count, torch.float32, torch.Generator().manual_seed(seed % 2**32))
    expected = split(whole, dtype, "scalar")
    back = joined(*expected, "scalar")
    for isa in ops.supported_isas():
        kept = [placed(torch.zeros_like(x), k) for x, k in zip((whole, *expected), offsets, strict=True)]
        views, buffers = zip(*kept, strict=True)
        views[0].copy_(whole)
        ops.split_(*views, isa=isa)
        assert same_bits(views[0], whole)
        assert same_bits(views[1], expected[0])
        assert torch.equal(views[2], expected[1])
        ops.join_(*views, isa=isa)
        assert same_bits(views[0], back)
        for view, buffer in kept:
            begin = view.storage_offset()
            assert (buffer[:begin] == 7).all()
            assert (buffer[begin + count :] == 7).all()
        assert len(buffers) == 3


@pytest.mark.parametrize("dtype", HALF)
def test_any_number_of_threads_gives_the_same_bits(dtype: torch.dtype) -> None:
    whole = random_bits(3 * 2**18 + 77, torch.float32, torch.Generator().manual_seed(2))
    expected = split(whole, dtype, "scalar")
    back = joined(*expected, "scalar")
    for threads in range(1, 9):
        high, remainder = torch.empty_like(expected[0]), torch.empty_like(expected[1])
        ops.split_(whole, high, remainder, threads=threads)
        assert same_bits(high, expected[0])
        assert torch.equal(remainder, expected[1])
        again = torch.empty_like(whole)
        ops.join_(again, high, remainder, threads=threads)
        assert same_bits(again, back)


@pytest.mark.parametrize("dtype", HALF)
def test_flushing_of_subnormal_numbers_by_the_caller_changes_no_bit(dtype: torch.dtype) -> None:
    subnormal = from_bits(torch.arange(0, 2**23, 37))
    whole = torch.cat([subnormal, -subnormal, torch.randn(1000) * 2.0**-24])
    expected = split(whole, dtype)
    back = joined(*expected)
    try:
        torch.set_flush_denormal(True)
        for isa in ops.supported_isas():
            high, remainder = split(whole, dtype, isa)
            again = joined(high, remainder, isa)
            assert same_bits(high, expected[0])
            assert torch.equal(remainder, expected[1])
            assert same_bits(again, back)
    finally:
        torch.set_flush_denormal(False)


def check_trajectory(rule_name: str, dtype: torch.dtype, state: torch.dtype, grad: torch.dtype) -> None:
    """An update of a split master and of an fp32 master with a copy, from the same gradients."""
    rule, generator = RULES[rule_name], torch.Generator().manual_seed(6)
    ties = "away" if dtype == torch.bfloat16 else "even"
    master = next(name for name, m in MASTERS.items() if m.copy == dtype and m.ties == ties)
    whole = make_tensors(rule, Layout(grad, master, state), 203, ordinary, generator)
    for name in rule.states:
        whole[name].zero_()
    # Numbers of every binade at which fp16 rounds otherwise.
    whole["param"] *= 2.0 ** torch.randint(-4, 11, (203,), generator=generator)
    high, remainder = split(whole["param"], dtype)
    parts = {name: whole[name].clone() for name in rule.states} | {"param": high, "remainder": remainder}
    same = torch.ones(203, dtype=torch.bool)
    for step in range(1, 101):
        if dtype == torch.float16:  # below, an fp16 master is rounded to multiples of 2^-39
            same &= (whole["param"].abs() >= EXACT) | (whole["param"] == 0)
        whole["grad"] = ordinary(203, grad, generator)
        options: dict[str, Any] = {"step": step, "seed": 4}
        rule(whole, copy_ties=ties, **options)
        rule(parts | {"grad": whole["grad"]}, **options)
        if dtype == torch.float16:
            same &= (whole["param"].abs() >= EXACT) | (whole["param"] == 0)
        assert same_bits(joined(parts["param"], parts["remainder"])[same], whole["param"][same])
        assert same_bits(parts["param"][same], whole["copy_out"][same])
        for name in rule.states:
            assert same_bits(parts[name][same], whole[name][same])
    assert same.sum() > 50


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rule_name", RULES)
def test_an_update_of_a_split_master_is_one_of_an_fp32_master(rule_name: str, dtype: torch.dtype) -> None:
    """With each dtype the rules share the dtypes of state and gradients."""
    number = list(RULES).index(rule_name)
    state = (torch.float32, torch.bfloat16)[number % 2] if RULES[rule_name].states else torch.float32
    check_trajectory(rule_name, dtype, state, FLOATS[(number + HALF.index(dtype)) % 3])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
def test_many_numbers_of_every_exponent(dtype: torch.dtype) -> None:
    low, high = (0.0, torch.inf) if dtype == torch.bfloat16 else (EXACT, LARGEST)
    for upper in range(2**9):  # sign and exponent
        whole = without_nan(from_bits((upper << 23) + torch.arange(upper, 2**23, 997)))
        back = joined(*split(whole, dtype))
        exact = (whole.abs() >= low) & (whole.abs() < high)
        assert same_bits(back[exact], whole[exact])
        if dtype == torch.float16:
            assert (back - whole)[whole.abs() < EXACT].double().abs().sum() <= 2.0**-40 * whole.numel()
