"""Every update gives the same bits on every instruction set, number of threads, address and length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.problems import (
    MASTERS,
    RULES,
    Layout,
    Make,
    Problem,
    Tensors,
    assert_same,
    from_bits,
    layouts,
    make_tensors,
    offsets_of,
    ordinary,
    placed,
    problems,
    random_bits,
    run,
    same_bits,
)

from lightning_zero import ops

THREADS = (2, 3, 8)
STREAMED = 2**22 + 77  # copies of so many elements bypass the caches
MANY = 2 * 65536 + 129  # three pieces, the last one with a tail
KEY = {"seed": 3, "index": 2**32 - 1000, "step": 7}  # the random numbers' stream changes in the middle


def check_threads(rule_name: str, layout: Layout, make: Make) -> None:
    tensors = make_tensors(RULES[rule_name], layout, MANY, make, torch.Generator().manual_seed(MANY))
    options = KEY | {"copy_ties": MASTERS[layout.master].ties}
    expected = run(RULES[rule_name], tensors, isa="scalar", threads=1, **options)
    for number, isa in enumerate(ops.supported_isas(), start=1):
        for each in THREADS:
            offsets = offsets_of(tensors, 2 * number + each)
            assert_same(run(RULES[rule_name], tensors, offsets, isa=isa, threads=each, **options), expected)


@given(problems())
@settings(max_examples=300)
def test_instruction_sets_give_the_same_bits_at_any_length_and_address(problem: Problem) -> None:
    expected = problem.run(isa="scalar")
    for isa in ops.supported_isas():
        assert_same(problem.run(isa=isa), expected)


@given(problems())
@settings(max_examples=100)
def test_the_address_changes_no_bit(problem: Problem) -> None:
    expected = run(problem.rule, problem.tensors, **problem.options)
    assert_same(problem.run(), expected)


@pytest.mark.parametrize("rule_name", ["adam", "lion"])
def test_any_number_of_threads_gives_the_same_bits(rule_name: str) -> None:
    some = layouts(RULES[rule_name])[:: 7 if RULES[rule_name].states else 4]
    for number, layout in enumerate(some):
        check_threads(rule_name, layout, (ordinary, random_bits)[number % 2])


@pytest.mark.parametrize("master", ["bf16 copy", "bf16 copy away", "fp16 copy"])
def test_copies_that_bypass_the_caches_hold_the_same_bits(master: str) -> None:
    """Stores past the caches need an aligned address; the copies begin an odd number of elements beside one."""
    generator = torch.Generator().manual_seed(1)
    tensors = make_tensors(RULES["lion"], Layout(torch.bfloat16, master, torch.float32), STREAMED, ordinary, generator)
    options = KEY | {"copy_ties": MASTERS[master].ties}
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    for begin in range(0, STREAMED, 2**20):  # in parts that are too short for it
        RULES["lion"]({name: tensor[begin : begin + 2**20] for name, tensor in expected.items()}, **options)
    for isa, offset, threads in [("scalar", 1, 1), *((isa, k, k) for isa in ops.supported_isas()[1:] for k in (1, 3))]:
        assert_same(run(RULES["lion"], tensors, {"copy_out": offset}, isa=isa, threads=threads, **options), expected)


def test_a_long_copy_at_an_odd_address_does_not_bypass_the_caches() -> None:
    """No element of it comes to an aligned address; at another one such stores would end the process."""
    copy = torch.frombuffer(bytearray(2 * STREAMED + 1), dtype=torch.bfloat16, offset=1)
    assert copy.data_ptr() % 2 == 1
    param, grad = torch.linspace(-1.0, 1.0, STREAMED), torch.linspace(2.0, 3.0, STREAMED)
    ops.sgd_(param, None, grad, lr=0.1, copy_out=copy)
    assert torch.equal(copy.clone(), param.bfloat16())


@given(problems(max_count=120), st.lists(st.integers(0, 120), max_size=4))
@settings(max_examples=100)
def test_an_update_in_parts_gives_the_same_bits(problem: Problem, cuts: list[int]) -> None:
    count = problem.tensors["grad"].numel()
    expected, parts = problem.run(), {name: tensor.clone() for name, tensor in problem.tensors.items()}
    bounds = [0, *sorted(min(cut, count) for cut in cuts), count]
    for begin, end in pairwise(bounds):
        index = (problem.options["index"] + begin) % 2**64
        tensors = {name: tensor[begin:end] for name, tensor in parts.items()}
        problem.rule(tensors, **problem.options | {"index": index})
    assert_same(parts, expected)


@given(problems())
@settings(max_examples=100)
def test_maximize_is_the_negated_gradient(problem: Problem) -> None:
    negated = problem.tensors | {"grad": -problem.tensors["grad"]}
    expected = run(problem.rule, negated, problem.offsets, **problem.options | {"maximize": False})
    actual = problem.run(maximize=True)
    assert_same(actual | {"grad": expected["grad"]}, expected)


@given(problems())
@settings(max_examples=100)
def test_grad_scale_multiplies_the_gradient_in_fp32(problem: Problem) -> None:
    scale = problem.options["grad_scale"]
    scaled = problem.tensors | {"grad": problem.tensors["grad"].float() * torch.tensor(scale)}
    expected = run(problem.rule, scaled, **problem.options | {"grad_scale": 1.0})
    actual = problem.run()
    assert_same(actual | {"grad": expected["grad"]}, expected)


@pytest.fixture
def flushing() -> Iterator[None]:
    """Subnormal numbers of the calling thread become zero, as `torch.set_flush_denormal` wants."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU always keeps subnormal numbers")
    assert torch.tensor(1e-38).mul(0.1).item() == 0.0
    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def subnormal_results() -> dict[str, tuple[Tensors, Tensors]]:
    """By rule: many subnormal numbers, and what an update makes of them without flushing."""
    cases = {}
    for rule_name, rule in RULES.items():
        layout = Layout(torch.float16, "fp16 copy", torch.float32)
        tensors = make_tensors(rule, layout, MANY, random_bits, torch.Generator().manual_seed(4))
        for name in ("param", *rule.states):
            tensors[name] = (tensors[name].view(torch.int32) & 0x807FFFFF - 2**32).view(torch.float32)
        cases[rule_name] = (tensors, run(rule, tensors, step=2, grad_scale=2.0**-125))
    return cases


@pytest.mark.parametrize("threads", [1, 3])
def test_flushing_of_subnormal_numbers_by_the_caller_changes_no_bit(
    subnormal_results: dict[str, tuple[Tensors, Tensors]], flushing: None, threads: int
) -> None:
    for rule_name, (tensors, expected) in subnormal_results.items():
        for isa in ops.supported_isas():
            copies = {name: placed(tensor)[0] for name, tensor in tensors.items()}
            RULES[rule_name](copies, step=2, grad_scale=2.0**-125, threads=threads, isa=isa)
            assert_same(copies, expected)
    assert torch.tensor(1e-38).mul(0.1).item() == 0.0  # and the caller still flushes


def test_flushing_by_the_caller_keeps_subnormal_hyperparameters(flushing: None) -> None:
    param, grad = torch.zeros(3), torch.full((3,), 2.0**100)
    ops.sgd_(param, None, grad, lr=1.0, grad_scale=2.0**-130)
    assert param.tolist() == [-(2.0**-30)] * 3
    ops.sgd_(param.zero_(), None, grad, lr=2.0**-130)
    assert param.tolist() == [-(2.0**-30)] * 3


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_are_rounded_as_torch_rounds(dtype: torch.dtype, isa: str) -> None:
    high = torch.arange(2**16)
    # All high halves with low halves around the ties of both formats.
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    whole = from_bits(((high << 16)[:, None] + low).flatten())
    param, grad, copy = whole.clone(), torch.zeros_like(whole), torch.empty_like(whole, dtype=dtype)
    # With lr=0 the parameter stays as it is.
    ops.sgd_(param, None, grad, lr=0.0, copy_out=copy, isa=isa)
    assert same_bits(param, whole)
    assert same_bits(copy, whole.to(dtype))


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_gradient_is_converted_exactly(dtype: torch.dtype, isa: str) -> None:
    grad = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    buffer = torch.zeros(grad.numel())
    # A buffer that starts as the gradient.
    ops.sgd_(torch.zeros_like(buffer), buffer, grad, lr=0.0, momentum=0.9, first=True, isa=isa)
    assert same_bits(buffer, grad.float())


@pytest.mark.parametrize("isa", ops.supported_isas())
def test_a_fused_multiply_add_rounds_once(isa: str) -> None:
    """Sums that are 2^-54 away from a tie: rounded to double first, they would fall on the wrong side."""
    grad = torch.tensor([1 + 2.0**-23, 1 - 2.0**-24])
    grad = torch.cat([grad, -grad])
    # param * weight_decay is 2^-24 and -2^-25, times 1 - 2^-30.
    param = torch.tensor([2.0**-24, -(2.0**-25)]) * (1 + 2.0**-15)
    param, buffer = torch.cat([param, -param]), torch.zeros(4)
    # A buffer that starts as grad + weight_decay * param.
    ops.sgd_(param, buffer, grad, lr=0.1, momentum=0.9, weight_decay=1 - 2.0**-15, first=True, isa=isa)
    assert torch.equal(buffer, grad)


def test_adjacent_views_of_one_buffer_are_accepted() -> None:
    buffer = torch.ones(40)
    ops.adamw_(*buffer.split(10), step=1, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    assert (buffer[:10] < 1.0).all()
    assert (buffer[30:] == 1.0).all()


def test_an_extreme_step_size_stops_at_infinity_and_nan() -> None:
    """Overflow goes where IEEE arithmetic takes it, on every instruction set."""
    tensors: Tensors = {"param": torch.tensor([3e38, -3e38, 0.0] * 7), "grad": torch.tensor([-3e38, 3e38, 0.0] * 7)}
    for isa in ops.supported_isas():
        param = run(RULES["sgd"], tensors, isa=isa, lr=10.0, weight_decay=0.0)["param"]
        assert torch.equal(param, torch.tensor([torch.inf, -torch.inf, 0.0] * 7))
