"""8-bit state in blocks: the formats, their rounding, and updates against a plain implementation in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.problems import FLOATS, MASTERS, RULES, Layout, Tensors, assert_same, make_tensors, ordinary, random_bits
from torch import Tensor

from lightning_zero import ops
from lightning_zero.ops import BLOCK, Quantized

SIGNED = {"exp_avg": True, "exp_avg_sq": False}
_DROPPED = 2**19  # what 19 bits of an fp32 significand count


def empty(numel: int, index: int = 0) -> Quantized:
    blocks = ops.count_blocks(index, numel)
    return Quantized(torch.zeros(numel, dtype=torch.int8), torch.zeros(blocks, dtype=torch.uint8))


def quantized(whole: Tensor, signed: bool, index: int = 0, **options: Any) -> Quantized:
    state = empty(whole.numel(), index)
    ops.quantize_(whole, state, signed=signed, index=index, **options)
    return state


def dequantized(state: Quantized, signed: bool, index: int = 0, **options: Any) -> Tensor:
    whole = torch.full((state.codes.numel(),), 7.0)
    ops.dequantize_(whole, state, signed=signed, index=index, **options)
    return whole


def values_of(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """What codes with a scale each are worth, in double."""
    codes, scales = codes.long() & 0xFF, scales.long()
    magnitude, exponents = (codes & 0x7F, 7) if signed else (codes, 15)
    exponent, significand = magnitude >> 4, magnitude & 15
    power = exponent.clamp(min=1) - exponents
    value = torch.ldexp((significand + 16 * (exponent > 0)).double(), power - 4 + scales - 127)
    value = torch.where(scales == 0, 0.0, torch.where(scales == 255, torch.nan, value))
    return torch.where(codes >= 128, -value, value) if signed else value


def per_element(scales: Tensor, numel: int, index: int) -> Tensor:
    lead = index % BLOCK
    return scales.repeat_interleave(BLOCK)[lead : lead + numel]


def bits_of(x: Tensor) -> Tensor:
    return x.view(torch.int32).long() & 0xFFFFFFFF


def reference_codes(whole: Tensor, signed: bool, index: int, bias: Tensor) -> Quantized:
    """The format's rounding in integers; ``bias`` is added to the 19 bits that are dropped."""
    numel, lead = whole.numel(), index % BLOCK
    padded = torch.zeros(ops.count_blocks(index, numel) * BLOCK)
    padded[lead : lead + numel] = whole.abs()
    largest = bits_of(padded).view(-1, BLOCK).amax(1)
    scales = torch.where(largest == 0, 0, ((largest + _DROPPED - 1) >> 23).clamp(min=1)).clamp(max=255)
    scale = per_element(scales, numel, index)
    exponents = 7 if signed else 15
    relative = torch.ldexp(whole.abs().double(), 127 - scale.clamp(min=1)).float()
    smallest = 2.0 ** (1 - exponents)
    base = (127 - exponents) * 16
    normal = (bits_of(relative) + bias) // _DROPPED - base
    subnormal = (bits_of(relative + smallest) + bias) // _DROPPED - base - 16
    codes = torch.where(relative < smallest, subnormal, normal)
    codes = codes + 128 * (bits_of(whole) >> 31) if signed else codes.clamp(min=1) * (whole != 0)
    return Quantized(torch.where(scale == 255, 0, codes).to(torch.uint8).view(torch.int8), scales.to(torch.uint8))


def _lower(x: int) -> int:
    return x % 2**32


def _upper(x: int) -> int:
    return x // 2**32


def random_words(numel: int, index: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """16 random bits for each element, for the first and the second state."""

    def splitmix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    elements = torch.arange(numel) + index % 2**32
    upper, stream = index // 2**32, elements // 2**32  # 0, or 1 where the lower half of the index has overflowed
    keys = [splitmix(splitmix(splitmix(seed) ^ step) ^ ((upper + k) % 2**32)) for k in range(2)]
    before, between = (torch.tensor([part(key) for key in keys])[stream] for part in (_lower, _upper))

    def times(a: Tensor, b: int) -> Tensor:  # of 32 bits, without overflow
        return (a * (b & 0xFFFF) + ((a * (b >> 16) & 0xFFFF) << 16)) & 0xFFFFFFFF

    x = (elements % 2**32 // 2) ^ before
    x = times(x ^ (x >> 16), 0x7FEB352D)
    x = ((x ^ (x >> 15)) + between) & 0xFFFFFFFF
    x = times(x, 0x846CA68B)
    x = x ^ (x >> 16)
    y = (times(x, 0x9E3779B1) + between) & 0xFFFFFFFF
    y = y ^ (y >> 15)
    odd = elements % 2 == 1
    return torch.where(odd, x >> 16, x & 0xFFFF), torch.where(odd, y >> 16, y & 0xFFFF)


# ---------------------------------------------------------------------------------------------------------- the format


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize("signed", [True, False])
def test_every_code_has_its_value_at_every_scale(signed: bool, isa: str) -> None:
    codes = torch.arange(-128, 128, dtype=torch.int8).repeat(256)
    scales = torch.arange(256, dtype=torch.uint8)
    expected = values_of(codes, scales.repeat_interleave(BLOCK), signed)
    codes[:BLOCK] = 0  # those of a block of zeros
    expected[:BLOCK] = 0.0
    actual = dequantized(Quantized(codes, scales), signed, isa=isa)
    assert torch.equal(actual.double().nan_to_num(7.0), expected.nan_to_num(7.0))


def numbers(kind: str, numel: int, seed: int, spread: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "bits":
        return random_bits(numel, torch.float32, generator)
    exponents = torch.empty(numel).uniform_(-spread, 0, generator=generator)
    x = torch.randn(numel, generator=generator) * torch.exp2(exponents)
    return x * 2.0 ** int(torch.randint(-126, 120, (1,), generator=generator)) if kind == "anywhere" else x


arrays = st.builds(
    numbers,
    st.sampled_from(["bits", "anywhere", "ordinary"]),
    st.integers(0, 3 * BLOCK),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 3.0, 12.0, 40.0]),
)
indices = st.integers(0, 2**64 - 1)


@given(arrays, st.booleans(), indices)
@settings(max_examples=100)
def test_numbers_become_the_nearest_ones_and_what_was_stored_is_stored_again(
    whole: Tensor, signed: bool, index: int
) -> None:
    half = torch.full((whole.numel(),), _DROPPED // 2)
    expected = reference_codes(whole, signed, index, half)
    for isa in ops.supported_isas():
        state = quantized(whole, signed, index, isa=isa)
        assert torch.equal(state.codes, expected.codes)
        assert torch.equal(state.scales, expected.scales)
        stored = dequantized(state, signed, index, isa=isa)
        again = dequantized(quantized(stored, signed, index, isa=isa), signed, index, isa=isa)
        assert torch.equal(stored.nan_to_num(7.0), again.nan_to_num(7.0))
    scale = per_element(expected.scales, whole.numel(), index)
    finite = scale < 255
    assert torch.equal(stored.isnan(), ~finite)
    # Half a step of the binade, of the smallest normal number at least; 0 is for nothing else without a sign.
    x, unit = whole[finite].double().abs(), torch.exp2(scale[finite].clamp(min=1).double() - 127)
    smallest = 2.0 ** (-6 if signed else -14)
    step = torch.exp2(torch.floor(torch.log2(torch.maximum(x, smallest * unit)))) / 16
    error = (stored[finite].double().abs() - x).abs()
    raised = torch.zeros_like(finite[finite]) if signed else x < step / 2
    assert (error[~raised] <= step[~raised] / 2).all()
    assert (stored[finite][raised].double() == torch.where(x == 0, 0.0, step)[raised]).all()
    assert torch.equal(stored[finite].signbit(), whole[finite].signbit() & signed)


def test_conversions_do_not_depend_on_the_threads() -> None:
    whole = numbers("ordinary", 3 * 2**18 + 1001, 1, 12.0)
    one, four = (quantized(whole, True, 77, threads=threads) for threads in (1, 4))
    assert torch.equal(one.codes, four.codes)
    assert torch.equal(one.scales, four.scales)
    results = [dequantized(one, True, 77, threads=threads) for threads in (1, 4)]
    assert torch.equal(*results)


# --------------------------------------------------------------------------------------------------------- the update


def check_update(rule_name: str, grad: torch.dtype, master: str, numel: int, index: int, seed: int, make: Any) -> None:
    """One step on all instruction sets and some threads, against the kernel of fp32 state between conversions."""
    rule, generator = RULES[rule_name], torch.Generator().manual_seed(seed)
    tensors = make_tensors(rule, Layout(grad, master, torch.float32), numel, make, generator)
    states = {name: quantized(tensors.pop(name), SIGNED[name], index) for name in rule.states}
    options = {"index": index, "seed": seed, "step": 3, "copy_ties": MASTERS[master].ties, "grad_scale": 0.5}

    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    whole = {name: dequantized(state, SIGNED[name], index) for name, state in states.items()}
    rule(expected | whole, **options)
    words = random_words(numel, index, seed, 3)
    codes = {
        name: reference_codes(whole[name], SIGNED[name], index, word << 3)
        for name, word in zip(rule.states, words, strict=False)
    }
    poisoned = torch.stack([state.scales == 255 for state in codes.values()]).any(0)
    for state in codes.values():  # a number that is not finite spoils both
        state.scales[poisoned] = 255
        state.codes[per_element(poisoned, numel, index)] = 0

    for isa in ops.supported_isas():
        for threads in (1, 3):
            actual: Tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            found = {name: Quantized(*(part.clone() for part in state)) for name, state in states.items()}
            rule(actual | found, **options, isa=isa, threads=threads)  # type: ignore[arg-type]
            assert_same(actual, expected)
            for name, state in codes.items():
                assert torch.equal(found[name].scales, state.scales), (isa, name)
                assert torch.equal(found[name].codes, state.codes), (isa, name)


@given(
    st.sampled_from(["adam", "adamw", "lion"]),
    st.sampled_from(FLOATS),
    st.sampled_from(sorted(MASTERS)),
    st.integers(0, 3 * BLOCK),
    st.one_of(indices, st.integers(2**32 - 600, 2**32)),
    st.integers(0, 2**32),
    st.sampled_from([ordinary, random_bits]),
)
@settings(max_examples=60)
def test_an_update_is_that_of_fp32_state_rounded_at_random(
    rule_name: str, grad: torch.dtype, master: str, numel: int, index: int, seed: int, make: Any
) -> None:
    check_update(rule_name, grad, master, numel, index, seed, make)


@pytest.mark.parametrize("index", [0, 3 * 2**32 - 1001])
def test_an_update_of_several_pieces_is_that_of_fp32_state(index: int) -> None:
    check_update("adamw", torch.bfloat16, "split bf16", 65536 + 777, index, 5, ordinary)


@pytest.mark.parametrize("name", SIGNED)
def test_nothing_is_lost_in_the_mean(name: str) -> None:
    """A moment that changes by less than a step of its format follows the gradient all the same."""
    count, steps = 64 * BLOCK, 200
    states = {each: empty(count) for each in SIGNED}
    generator = torch.Generator().manual_seed(3)
    level = torch.exp2(-8 * torch.rand(count, generator=generator))  # of gradients in one block
    param, exact = torch.zeros(count), torch.zeros(count)
    betas = (0.99, 0.99)
    for step in range(1, steps + 1):
        options: dict[str, Any] = {"lr": 0.0, "betas": betas, "eps": 1e-8, "weight_decay": 0.0, "step": step, "seed": 9}
        ops.adamw_(param, states["exp_avg"], states["exp_avg_sq"], level, **options)
        exact.lerp_(level if SIGNED[name] else level**2, 0.01)
    error = dequantized(states[name], SIGNED[name]) / exact - 1
    assert error.abs().mean() < 0.2
    # Of errors that are independent: within five standard deviations.
    kept = error[level > 2.0**-5]
    assert abs(float(kept.mean())) < 5 * float(kept.std()) / kept.numel() ** 0.5


def test_state_that_fits_no_kernel_is_refused() -> None:
    x, state = torch.zeros(300), empty(300)
    adam: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    with pytest.raises(ValueError, match="max_exp_avg_sq was given with 8-bit moments"):
        ops.adamw_(x, state, empty(300), x.clone(), **adam, max_exp_avg_sq=x.clone())
    with pytest.raises(TypeError, match="exp_avg is in 8 bits; expected all state"):
        ops.adamw_(x, state, x.clone(), x.clone(), **adam)
    with pytest.raises(TypeError, match="sum is in 8 bits; expected no state"):
        ops.adagrad_(x, state, x.clone(), lr=0.1, lr_decay=0.0, eps=1e-8, weight_decay=0.0, step=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="momentum_buffer is in 8 bits"):
        ops.sgd_(x, state, x.clone(), lr=0.1, momentum=0.9)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"exp_avg.scales has 2 elements; expected 3, the number of blocks"):
        ops.lion_(x, state, x.clone(), lr=0.1, betas=(0.9, 0.99), weight_decay=0.0, index=255)
    with pytest.raises(TypeError, match=r"state.codes has dtype torch.uint8; expected torch.int8"):
        ops.quantize_(x, Quantized(state.codes.view(torch.uint8), state.scales), signed=True)
    with pytest.raises(ValueError, match="share"):
        ops.quantize_(x, Quantized(state.codes, state.codes[:2].view(torch.uint8)), signed=True)
