"""Stochastic rounding of bf16 state: what it depends on, and that nothing is lost in the mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops.problems import RULES, assert_same, from_bits, random_bits, same_bits
from torch import Tensor

from lightning_zero import ops

SIGMAS = 5.0  # the numbers are fixed: a test that passes passes always
COUNT = 200_003


def rounded(x: Tensor, **key: Any) -> Tensor:
    """fp32 numbers rounded to bf16: a momentum buffer that starts as the gradient."""
    buffer = torch.zeros(x.numel(), dtype=torch.bfloat16)
    ops.sgd_(torch.zeros(x.numel()), buffer, x, lr=0.0, momentum=0.9, first=True, **key)
    return buffer


def random_numbers(count: int = COUNT, seed: int = 1) -> Tensor:
    """Of all lower halves, far from zero and infinity, of both signs."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator) * 2.0 ** torch.randint(-20, 20, (count,), generator=generator)


def errors(stored: Tensor, exact: Tensor) -> Tensor:
    """Whether each number was rounded away from zero, less the probability of it, in its standard deviation."""
    bits = exact.view(torch.int32).long() & 0xFFFFFFFF
    up = (stored.view(torch.int16).long() & 0xFFFF) - (bits >> 16)
    assert ((up == 0) | (up == 1)).all()
    chance = (bits & 0xFFFF).double() / 2**16
    # Those that are almost certain would have all the weight.
    spread = (chance * (1 - chance)).sqrt()
    return torch.where((chance > 0.05) & (chance < 0.95), (up - chance) / spread, 0.0)


def assert_mean_is_zero(values: Tensor) -> None:
    """The mean of independent numbers with the variance one (or zero)."""
    assert values.sum().abs() <= SIGMAS * values.count_nonzero().sqrt()


def moments(grad: Tensor, dtype: torch.dtype, **key: Any) -> tuple[Tensor, Tensor]:
    m, v = (torch.zeros(grad.numel(), dtype=dtype) for _ in range(2))
    arguments: dict[str, Any] = {"lr": 0.0, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    ops.adamw_(torch.zeros(grad.numel()), m, v, grad, **arguments, **{"step": 1, **key})
    return m, v


def test_rounding_is_to_a_neighbour_and_unbiased() -> None:
    x = random_numbers()
    for step in (1, 2, 10**6):
        e = errors(rounded(x, step=step), x)
        assert_mean_is_zero(e)
        assert abs(float((e**2).sum() / e.count_nonzero()) - 1.0) < 0.02


@pytest.mark.parametrize("low", [0x0001, 0x0100, 0x4000, 0x8000, 0xC000, 0xFF00, 0xFFFF])
def test_the_chance_of_rounding_up_is_the_distance(low: int) -> None:
    count = 2**20
    stored = rounded(from_bits(torch.full((count,), 0x3F800000 + low)), seed=low)
    up = float((stored > 1.0).sum())
    chance = low / 2**16
    assert abs(up - count * chance) <= SIGMAS * (count * chance * (1 - chance)) ** 0.5 + 1


def test_both_moments_are_unbiased_and_independent() -> None:
    grad = random_numbers()
    exact = moments(grad, torch.float32)
    stored = moments(grad, torch.bfloat16)
    m, v = (errors(a, b) for a, b in zip(stored, exact, strict=True))
    for product in (m, v, m * v, m[1:] * v[:-1], m[:-1] * v[1:]):
        assert_mean_is_zero(product)


@pytest.mark.parametrize("distance", [1, 2, 3, 8, 16, 64, 1024, 65536])
def test_neighbours_are_independent(distance: int) -> None:
    grad = random_numbers(seed=2)
    for e in map(errors, moments(grad, torch.bfloat16, step=3), moments(grad, torch.float32, step=3)):
        assert_mean_is_zero(e[distance:] * e[:-distance])


@pytest.mark.parametrize("changed", [{"seed": 8}, {"step": 6}, {"seed": 2**63}, {"index": 10**6}, {"index": 2**33}])
def test_another_seed_step_or_index_gives_independent_bits(changed: dict[str, int]) -> None:
    x, key = random_numbers(seed=3), {"seed": 7, "step": 5, "index": 0}
    one, other = rounded(x, **key), rounded(x, **key | changed)
    assert not same_bits(one, other)
    assert_mean_is_zero(errors(one, x) * errors(other, x))


def test_all_steps_and_seeds_are_independent_of_each_other() -> None:
    """Consecutive ones, as training takes them; and the seed of one step is not the step of another's seed."""
    x = random_numbers(4003, seed=4)
    keys = [{"seed": seed, "step": step} for seed in range(5) for step in range(1, 9)]
    e = torch.stack([errors(rounded(x, **key), x) for key in keys])
    correlations = e @ e.T / 4003**0.5
    assert correlations.fill_diagonal_(0.0).abs().max() < SIGMAS
    assert_mean_is_zero(e.flatten())
    assert (e.sum(0).abs() < 7 * len(keys) ** 0.5).all()  # nor has an element a bias of its own


def test_a_mean_that_is_followed_in_small_steps_arrives() -> None:
    """Where rounding to nearest would stay at the start: each step changes less than half a bf16 ulp."""
    count = 4096
    target = torch.full((count,), 1.25)
    m = torch.ones(count, dtype=torch.bfloat16)
    nearest = torch.ones(count, dtype=torch.bfloat16)
    for step in range(1, 2001):
        ops.lion_(torch.zeros(count), m, target, lr=0.0, betas=(0.9, 0.999), weight_decay=0.0, step=step)
        nearest = (nearest.float() * 0.999 + target * 0.001).bfloat16()
    assert (nearest == 1.0).all()
    expected = 1.25 - 0.25 * 0.999**2000
    assert abs(float(m.double().mean()) - expected) < 0.005


@pytest.mark.parametrize("isa", ops.supported_isas())
def test_what_bf16_holds_stays(isa: str) -> None:
    """All of its numbers, zeros with their signs and infinities; NaN stays NaN."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    for step in (1, 2, 3):
        assert same_bits(rounded(every.float(), step=step, isa=isa), every)
        assert same_bits(rounded(every, step=step, isa=isa), every)
    payloads = torch.tensor([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7F80FFFF] * 100)
    assert rounded(from_bits(payloads), isa=isa).isnan().all()


def test_beyond_the_largest_number_is_infinity_or_the_largest() -> None:
    largest = torch.finfo(torch.bfloat16).max
    x = torch.full((1000,), torch.finfo(torch.float32).max)
    assert set(rounded(x).tolist()) <= {largest, torch.inf}
    assert set(rounded(-x).tolist()) <= {-largest, -torch.inf}


def test_subnormal_numbers_are_rounded_like_others() -> None:
    x = from_bits(torch.randint(0, 2**23, (COUNT,), generator=torch.Generator().manual_seed(6)))
    for numbers in (x, -x):
        assert_mean_is_zero(errors(rounded(numbers, seed=1), numbers))


@given(
    st.integers(0, 2**64 - 1),
    st.one_of(st.integers(0, 2**64 - 1), st.integers(2**32 - 400, 2**32 + 10), st.integers(2**64 - 400, 2**64 - 1)),
    st.integers(1, 2**40),
    st.integers(0, 400),
    st.integers(0, 400),
)
def test_a_part_with_its_index_is_rounded_as_in_the_whole(seed: int, index: int, step: int, a: int, b: int) -> None:
    x = random_bits(400, torch.float32, torch.Generator().manual_seed(5))
    whole = rounded(x, seed=seed, index=index, step=step)
    begin, end = sorted((a, b))
    for isa in ops.supported_isas():
        part = rounded(x[begin:end], seed=seed, index=(index + begin) % 2**64, step=step, isa=isa)
        assert same_bits(part, whole[begin:end])


@pytest.mark.parametrize("index", [0, 12345, 2**32 - 100_000, 2**32 - 65536, 2**64 - 7])
def test_threads_and_parts_change_no_bit(index: int) -> None:
    x = random_numbers(3 * 65536 + 5)
    expected = rounded(x, index=index, isa="scalar", threads=1)
    for isa in ops.supported_isas():
        for threads in (1, 2, 5):
            assert same_bits(rounded(x, index=index, isa=isa, threads=threads), expected)
    parts = [rounded(part, index=(index + 50_001 * k) % 2**64) for k, part in enumerate(x.split(50_001))]
    assert same_bits(torch.cat(parts), expected)


@pytest.mark.parametrize("rule_name", [name for name, rule in RULES.items() if rule.states])
def test_the_seed_decides_what_becomes_of_state_and_parameter(rule_name: str) -> None:
    rule, results = RULES[rule_name], []
    for seed in (0, 0, 1):
        generator = torch.Generator().manual_seed(7)
        tensors = {name: torch.zeros(999, dtype=torch.bfloat16) for name in rule.states} | {"param": torch.ones(999)}
        for step in (1, 2, 3):
            rule(tensors | {"grad": torch.randn(999, generator=generator)}, step=step, seed=seed, lr=0.5)
        results.append(tensors)
    assert_same(results[1], results[0])
    for name in rule.states:
        assert not same_bits(results[2][name], results[0][name])
    if rule_name != "lion":  # whose sign few bits change
        assert not same_bits(results[2]["param"], results[0]["param"])


def test_a_state_in_fp32_takes_no_randomness() -> None:
    grad = random_numbers(1000)
    for one, other in zip(moments(grad, torch.float32, seed=1), moments(grad, torch.float32, seed=2), strict=True):
        assert same_bits(one, other)
