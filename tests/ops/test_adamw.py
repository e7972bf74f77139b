"""The AdamW kernel: equal on every instruction set, and to plain PyTorch within its stated bound."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_zero import ops

HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = {4: torch.int32, 2: torch.int16}
OFFSET = 3  # elements before a misaligned view


@pytest.fixture(scope="module", autouse=True)
def first_optimizer() -> None:
    """The first optimizer makes torch import its compiler: keep that out of the time of a test."""
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Equal bits; two NaNs are equal whatever their payload."""
    nan = expected.isnan()
    integer = INTEGERS[expected.itemsize]
    return torch.equal(actual.isnan(), nan) and torch.equal(actual[~nan].view(integer), expected[~nan].view(integer))


def random_bits(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Every bit pattern alike: NaN, infinities and subnormal numbers included."""
    info = torch.iinfo(INTEGERS[dtype.itemsize])
    values = torch.randint(info.min, info.max + 1, (count,), generator=generator)
    return values.to(INTEGERS[dtype.itemsize]).view(dtype)


def ordinary(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Numbers of many magnitudes, none of them special."""
    exponents = torch.randint(-30, 4, (count,), generator=generator)
    return (torch.randn(count, generator=generator) * 2.0**exponents).to(dtype)


def guarded(values: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """A copy of `values` inside a larger buffer, and the buffer."""
    buffer = torch.full((values.numel() + offset + 8,), 7.0, dtype=values.dtype)
    view = buffer[offset : offset + values.numel()]
    view.copy_(values)
    return view, buffer


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(0, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    make = draw(st.sampled_from([random_bits, ordinary]))
    return {
        "tensors": [make(count, torch.float32, generator) for _ in range(3)],
        "grad": make(count, draw(st.sampled_from(FLOATS)), generator),
        "copy_dtype": draw(st.sampled_from([None, torch.bfloat16, torch.float16])),
        "offset": draw(st.integers(0, 17)),
        "hyperparameters": {
            "lr": draw(st.sampled_from([0.0, 1e-3, 0.5])),
            "betas": draw(st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.0), (0.3, 0.99)])),
            "eps": draw(st.sampled_from([0.0, 1e-8, 1e-3])),
            "weight_decay": draw(st.sampled_from([0.0, 0.1])),
            "step": draw(st.sampled_from([1, 2, 1000, 10**9])),
            "grad_scale": draw(st.sampled_from([1.0, 0.3, 2.0**-16])),
            "decoupled": draw(st.booleans()),
        },
    }


def run(problem: dict[str, Any], isa: str) -> list[Tensor]:
    """The problem's results: param, exp_avg, exp_avg_sq, copy_out and the buffers around them."""
    outputs = [guarded(tensor, problem["offset"]) for tensor in problem["tensors"]]
    grad, _ = guarded(problem["grad"], problem["offset"])
    copy = None
    if problem["copy_dtype"] is not None:
        outputs.append(guarded(torch.zeros(grad.numel(), dtype=problem["copy_dtype"]), problem["offset"]))
        copy = outputs[-1][0]
    param, exp_avg, exp_avg_sq = (view for view, _ in outputs[:3])
    ops.adamw_(param, exp_avg, exp_avg_sq, grad, copy_out=copy, isa=isa, **problem["hyperparameters"])
    assert same_bits(grad, problem["grad"])
    return [tensor for pair in outputs for tensor in pair]


@given(problems())
@settings(max_examples=150)
def test_instruction_sets_give_the_same_bits_at_any_length_and_offset(problem: dict[str, Any]) -> None:
    expected = run(problem, "scalar")
    for isa in ops.supported_isas():
        for actual, reference in zip(run(problem, isa), expected, strict=True):
            assert same_bits(actual, reference)


@given(problems())
@settings(max_examples=50)
def test_memory_around_the_tensors_is_left_alone(problem: dict[str, Any]) -> None:
    offset, count = problem["offset"], problem["grad"].numel()
    for isa in ops.supported_isas():
        for buffer in run(problem, isa)[1::2]:
            assert (buffer[:offset] == 7.0).all()
            assert (buffer[offset + count :] == 7.0).all()


@pytest.mark.parametrize("make", [random_bits, ordinary])
@pytest.mark.parametrize("grad_dtype", FLOATS)
def test_instruction_sets_give_the_same_bits_on_a_million_elements(make: Any, grad_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    count = 1_000_003
    problem = {
        "tensors": [make(count, torch.float32, generator) for _ in range(3)],
        "grad": make(count, grad_dtype, generator),
        "copy_dtype": torch.bfloat16,
        "offset": OFFSET,
        "hyperparameters": HYPERPARAMETERS | {"step": 5, "grad_scale": 0.7},
    }
    expected = run(problem, "scalar")
    for isa in ops.supported_isas():
        for actual, reference in zip(run(problem, isa), expected, strict=True):
            assert same_bits(actual, reference)


def one_ulp(x: Tensor) -> Tensor:
    """Distance from |x| to the next larger fp32 number, in fp64."""
    return torch.nextafter(x.abs(), torch.tensor(torch.inf)).double() - x.abs().double()


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in {"AVX2", "AVX512"}, reason="torch rounds without FMA here"
)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.5, 0.9), (0.0, 0.99)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_every_step_matches_torch(betas: tuple[float, float], weight_decay: float, decoupled: bool) -> None:
    """Moments bitwise; the parameter within 1 ulp of itself plus 2^-21 of its update."""
    generator = torch.Generator().manual_seed(2)
    count = 10_007
    reference = torch.nn.Parameter(torch.randn(count, generator=generator))
    optimizer_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = optimizer_class([reference], lr=1e-3, betas=betas, weight_decay=weight_decay, foreach=False)
    param = reference.detach().clone()
    moments = [torch.zeros(count), torch.zeros(count)]
    for step in range(1, 21):
        reference.grad = ordinary(count, torch.float32, generator)
        before = reference.detach().clone()
        optimizer.step()
        ops.adamw_(
            param,
            *moments,
            reference.grad,
            step=step,
            decoupled=decoupled,
            **HYPERPARAMETERS | {"betas": betas, "weight_decay": weight_decay},
        )
        state = optimizer.state[reference]
        assert same_bits(moments[0], state["exp_avg"])
        assert same_bits(moments[1], state["exp_avg_sq"])
        after = reference.detach()
        bound = one_ulp(torch.maximum(before.abs(), after.abs())) + 2.0**-21 * (after - before).abs().double()
        assert ((param - after).abs().double() <= bound).all()
        # The bound is one step's: both continue from the same parameter.
        param.copy_(after)


@pytest.mark.parametrize("decoupled", [True, False])
def test_thirty_steps_match_torch_without_correction(decoupled: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    count = 1003
    reference = torch.nn.Parameter(torch.randn(count, generator=generator))
    optimizer_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = optimizer_class([reference], foreach=False, **HYPERPARAMETERS)
    param, exp_avg, exp_avg_sq = reference.detach().clone(), torch.zeros(count), torch.zeros(count)
    for step in range(1, 31):
        reference.grad = torch.randn(count, generator=generator)
        optimizer.step()
        ops.adamw_(param, exp_avg, exp_avg_sq, reference.grad, step=step, decoupled=decoupled, **HYPERPARAMETERS)
    torch.testing.assert_close(param, reference.detach(), rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("decoupled", [True, False])
def test_ten_steps_match_the_paper_in_double_precision(decoupled: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    param = torch.randn(257, generator=generator)
    exp_avg, exp_avg_sq = torch.zeros(257), torch.zeros(257)
    p, m, v = param.double(), exp_avg.double(), exp_avg_sq.double()
    lr, (beta1, beta2), eps, decay = 1e-2, (0.9, 0.99), 1e-8, 0.1
    for t in range(1, 11):
        grad = torch.randn(257, generator=generator)
        ops.adamw_(
            param,
            exp_avg,
            exp_avg_sq,
            grad,
            lr=lr,
            betas=(beta1, beta2),
            eps=eps,
            weight_decay=decay,
            step=t,
            decoupled=decoupled,
        )
        g = grad.double()
        if decoupled:
            p = p * (1 - lr * decay)
        else:
            g = g + decay * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        p = p - lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
    torch.testing.assert_close(param.double(), p, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(exp_avg.double(), m, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(exp_avg_sq.double(), v, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copy_out_rounds_every_kind_of_number_as_torch_does(dtype: torch.dtype, isa: str) -> None:
    high = torch.arange(2**16, dtype=torch.int64)
    # All high halves with low halves around the ties of both formats.
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = ((high << 16)[:, None] + low).flatten()
    param = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
    expected = param.clone()
    copy = torch.empty_like(param, dtype=dtype)
    moments = [torch.zeros_like(param), torch.zeros_like(param)]
    grad = torch.zeros_like(param)
    ops.adamw_(
        param, *moments, grad, copy_out=copy, isa=isa, step=1, **HYPERPARAMETERS | {"lr": 0.0}
    )  # with lr=0 the parameter stays as it is
    assert same_bits(param, expected)
    assert same_bits(copy, expected.to(dtype))


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_gradient_is_converted_exactly(dtype: torch.dtype, isa: str) -> None:
    grad = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    grad = grad[~grad.isinf()]
    param, exp_avg, exp_avg_sq = (torch.zeros(grad.numel()) for _ in range(3))
    ops.adamw_(
        param, exp_avg, exp_avg_sq, grad, isa=isa, step=1, **HYPERPARAMETERS | {"betas": (0.0, 0.9)}
    )  # with beta1=0 the first moment is the gradient
    assert torch.equal(exp_avg.isnan(), grad.isnan())
    assert torch.equal(exp_avg.nan_to_num(), grad.float().nan_to_num())


@pytest.mark.parametrize("isa", ops.supported_isas())
def test_a_fused_multiply_add_rounds_once(isa: str) -> None:
    """Sums that are 2^-54 away from a tie: rounded to double first, they would fall on the wrong side."""
    grad = torch.tensor([1 + 2.0**-23, 1 - 2.0**-24])
    grad = torch.cat([grad, -grad])
    # param * weight_decay is 2^-24 and -2^-25, times 1 - 2^-30.
    param = torch.tensor([2.0**-24, -(2.0**-25)]) * (1 + 2.0**-15)
    param = torch.cat([param, -param])
    exp_avg = torch.zeros(4)
    ops.adamw_(
        param,
        exp_avg,
        torch.zeros(4),
        grad,
        isa=isa,
        step=1,
        decoupled=False,
        **HYPERPARAMETERS | {"betas": (0.0, 0.9), "weight_decay": 1 - 2.0**-15},
    )  # with beta1=0 the first moment is grad + weight_decay * param
    assert torch.equal(exp_avg, grad)


@pytest.mark.parametrize("isa", ops.supported_isas())
@pytest.mark.parametrize("grad_dtype", FLOATS)
def test_grad_scale_multiplies_the_gradient_in_fp32(grad_dtype: torch.dtype, isa: str) -> None:
    generator = torch.Generator().manual_seed(5)
    start = [torch.randn(77, generator=generator) for _ in range(3)]
    start[2].abs_()
    grad = (torch.randn(77, generator=generator) * 1000).to(grad_dtype)
    scaled = [tensor.clone() for tensor in start]
    unscaled = [tensor.clone() for tensor in start]
    ops.adamw_(*scaled, grad, grad_scale=0.37, isa=isa, step=3, **HYPERPARAMETERS)
    ops.adamw_(*unscaled, grad.float() * 0.37, isa=isa, step=3, **HYPERPARAMETERS)
    for actual, expected in zip(scaled, unscaled, strict=True):
        assert same_bits(actual, expected)


@pytest.mark.parametrize("isa", ops.supported_isas())
def test_splitting_a_tensor_changes_no_bit(isa: str) -> None:
    generator = torch.Generator().manual_seed(6)
    whole = [torch.randn(101, generator=generator) for _ in range(4)]
    whole[2].abs_()
    parts = [tensor.clone() for tensor in whole]
    ops.adamw_(*whole, step=2, isa=isa, **HYPERPARAMETERS)
    for begin, end in [(0, 5), (5, 38), (38, 38), (38, 101)]:
        ops.adamw_(*(tensor[begin:end] for tensor in parts), step=2, isa=isa, **HYPERPARAMETERS)
    for actual, expected in zip(parts, whole, strict=True):
        assert same_bits(actual, expected)


def test_other_threads_run_during_an_update() -> None:
    tensors = [torch.zeros(4_000_000) for _ in range(4)]
    started = threading.Event()

    def update() -> None:
        started.set()
        ops.adamw_(*tensors, step=1, isa="scalar", **HYPERPARAMETERS)

    thread = threading.Thread(target=update)
    thread.start()
    started.wait()
    turns = 0
    while thread.is_alive():
        time.sleep(0.0005)
        turns += 1
    # With the GIL held, this thread would see the update's beginning and end only.
    assert turns > 3


def fp32(count: int = 8) -> Tensor:
    return torch.zeros(count)


FREED = fp32()
FREED.untyped_storage().resize_(0)
SHARED = fp32(16)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"param": [0.0] * 8}, TypeError, r"param must be a torch.Tensor; got list"),
        ({"param": fp32().double()}, TypeError, r"param has dtype torch.float64; expected torch.float32"),
        ({"exp_avg": fp32().bfloat16()}, TypeError, r"exp_avg has dtype torch.bfloat16"),
        (
            {"grad": torch.zeros(8, dtype=torch.int32)},
            TypeError,
            r"grad has dtype torch.int32; expected .* or",
        ),
        ({"copy_out": fp32()}, TypeError, r"copy_out has dtype torch.float32; expected torch.bfloat16 or"),
        ({"exp_avg_sq": torch.zeros(8, device="meta")}, ValueError, r"exp_avg_sq is on device meta"),
        ({"param": torch.zeros(2, 4)}, ValueError, r"param has shape \(2, 4\)"),
        ({"grad": torch.zeros(16)[::2]}, ValueError, r"grad has shape \(8,\) and strides \(2,\)"),
        ({"grad": fp32(9)}, ValueError, r"grad has 9 elements; expected 8"),
        ({"copy_out": fp32(7).half()}, ValueError, r"copy_out has 7 elements; expected 8"),
        ({"exp_avg": FREED}, ValueError, r"storage of exp_avg holds 0 bytes; expected at least 32"),
        ({"param": SHARED[:8], "grad": SHARED[4:12]}, ValueError, r"param and grad share 16 bytes"),
        ({"exp_avg": SHARED[:8], "exp_avg_sq": SHARED[:8]}, ValueError, r"share 32 bytes of memory"),
        ({"lr": -1e-3}, ValueError, r"lr=-0.001 is out of range"),
        ({"lr": float("nan")}, ValueError, r"lr=nan is out of range"),
        ({"eps": -1.0}, ValueError, r"eps=-1.0 is out of range"),
        ({"weight_decay": float("inf")}, ValueError, r"weight_decay=inf is out of range"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas=\(0.9, 1.0\) is out of range"),
        ({"betas": (-0.1, 0.9)}, ValueError, r"betas=\(-0.1, 0.9\) is out of range"),
        ({"betas": (0.9,)}, ValueError, r"betas=\(0.9,\) is out of range"),
        ({"step": 0}, ValueError, r"step=0 is out of range; expected >= 1"),
        ({"step": torch.tensor(1.0)}, TypeError, r"step has type Tensor; expected int"),
        ({"grad_scale": float("inf")}, ValueError, r"grad_scale=inf is not finite"),
        ({"isa": "neon"}, ValueError, r"instruction set 'neon' is not available.*scalar"),
    ],
)
def test_a_wrong_argument_is_refused_and_nothing_is_written(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {
        "param": torch.ones(8),
        "exp_avg": fp32(),
        "exp_avg_sq": fp32(),
        "grad": torch.ones(8),
        "step": 1,
        **HYPERPARAMETERS,
        **changes,
    }
    with pytest.raises(error, match=message):
        ops.adamw_(**arguments)
    if "param" not in changes:
        assert (arguments["param"] == 1.0).all()


def test_adjacent_views_of_one_buffer_are_accepted() -> None:
    buffer = torch.ones(40)
    ops.adamw_(*buffer.split(10), step=1, **HYPERPARAMETERS)
    assert (buffer[:10] < 1.0).all()
    assert (buffer[30:] == 1.0).all()
