"""Wrong arguments of every kernel: refused with their name, and nothing is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops.problems import HALF, RULES, Tensors, same_bits
from torch import Tensor

from lightning_zero import ops


def fp32(count: int = 8) -> Tensor:
    return torch.zeros(count)


def int16(count: int = 8) -> Tensor:
    return torch.zeros(count, dtype=torch.int16)


FREED = fp32()
FREED.untyped_storage().resize_(0)
SHARED = fp32(16)

# Of each kernel: a rule with all of its states.
KERNELS = {"adamw_": "amsgrad", "adagrad_": "adagrad", "lion_": "lion", "sgd_": "momentum"}

OF_PARAM_AND_GRAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"param": [0.0] * 8}, TypeError, r"param must be a torch.Tensor; got list"),
    ({"param": None}, TypeError, r"param must be a torch.Tensor; got NoneType"),
    ({"param": fp32().double()}, TypeError, r"param has dtype torch.float64; expected torch.float32"),
    ({"param": fp32().bfloat16()}, TypeError, r"param has dtype torch.bfloat16; expected torch.float32"),
    ({"param": fp32(), "remainder": int16()}, TypeError, r"param has dtype torch.float32; expected torch.bfloat16 or"),
    ({"param": torch.zeros(2, 4)}, ValueError, r"param has shape \(2, 4\)"),
    ({"param": torch.zeros(8, device="meta")}, ValueError, r"param is on device meta; expected cpu"),
    ({"grad": torch.zeros(8, dtype=torch.int32)}, TypeError, r"grad has dtype torch.int32; expected .* or"),
    ({"grad": torch.zeros(16)[::2]}, ValueError, r"grad has shape \(8,\) and strides \(2,\)"),
    ({"grad": fp32(9)}, ValueError, r"grad has 9 elements; expected 8"),
    ({"grad": None}, TypeError, r"grad must be a torch.Tensor; got NoneType"),
    ({"grad": FREED}, ValueError, r"storage of grad holds 0 bytes; expected at least 32"),
    ({"param": SHARED[:8], "grad": SHARED[4:12]}, ValueError, r"param and grad share 16 bytes"),
    ({"copy_out": fp32()}, TypeError, r"copy_out has dtype torch.float32; expected torch.bfloat16 or"),
    ({"copy_out": fp32(7).half()}, ValueError, r"copy_out has 7 elements; expected 8"),
    ({"copy_out": SHARED.bfloat16()[::2]}, ValueError, r"copy_out has shape \(8,\) and strides \(2,\)"),
    ({"copy_ties": "odd"}, ValueError, r"copy_ties='odd' is unknown; expected 'even' or 'away'"),
    ({"param": fp32().half(), "remainder": fp32().half()}, TypeError, r"remainder has dtype torch.float16"),
    ({"param": fp32().half(), "remainder": int16(3)}, ValueError, r"remainder has 3 elements; expected 8"),
    (
        {"param": fp32().half(), "remainder": int16(), "copy_out": fp32().half()},
        ValueError,
        r"copy_out was given with a remainder",
    ),
    ({"lr": float("nan")}, ValueError, r"lr=nan is out of range"),
    ({"lr": float("inf")}, ValueError, r"lr=inf is out of range"),
    ({"weight_decay": -0.1}, ValueError, r"weight_decay=-0.1 is out of range"),
    ({"weight_decay": float("inf")}, ValueError, r"weight_decay=inf is out of range"),
    ({"step": 0}, ValueError, r"step=0 is out of range; expected >= 1"),
    ({"step": -3}, ValueError, r"step=-3 is out of range; expected >= 1"),
    ({"step": 1.0}, TypeError, r"step has type float; expected int"),
    ({"step": torch.tensor(1.0)}, TypeError, r"step has type Tensor; expected int"),
    ({"grad_scale": float("inf")}, ValueError, r"grad_scale=inf is not finite"),
    ({"grad_scale": float("nan")}, ValueError, r"grad_scale=nan is not finite"),
    ({"seed": -1}, ValueError, r"seed=-1 is out of range"),
    ({"seed": 2**64}, ValueError, r"seed=18446744073709551616 is out of range"),
    ({"seed": 1.0}, TypeError, r"seed has type float; expected int"),
    ({"index": -1}, ValueError, r"index=-1 is out of range"),
    ({"index": 2**64}, ValueError, r"index=18446744073709551616 is out of range"),
    ({"index": "0"}, TypeError, r"index has type str; expected int"),
    ({"threads": 0}, ValueError, r"threads=0 is out of range"),
    ({"threads": 2.0}, TypeError, r"threads has type float; expected int"),
    ({"threads": True}, TypeError, r"threads has type bool; expected int"),
    ({"isa": "neon"}, ValueError, r"instruction set 'neon' is not available.*scalar"),
]

OF_STATE: list[tuple[Any, type[Exception], str]] = [
    (fp32().half(), TypeError, r" has dtype torch.float16; expected torch.float32"),
    (fp32().double(), TypeError, r" has dtype torch.float64; expected torch.float32"),
    (torch.zeros(8, device="meta"), ValueError, r" is on device meta"),
    (fp32(7), ValueError, r" has 7 elements; expected 8"),
    (torch.zeros(16)[::2], ValueError, r" has shape \(8,\) and strides \(2,\)"),
    (FREED, ValueError, r"storage of .* holds 0 bytes; expected at least 32"),
    ([0.0] * 8, TypeError, r" must be a torch.Tensor; got list"),
]

BETAS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"betas": (0.9, 1.0)}, ValueError, r"betas=\(0.9, 1.0\) is out of range"),
    ({"betas": (-0.1, 0.9)}, ValueError, r"betas=\(-0.1, 0.9\) is out of range"),
    ({"betas": (0.9, float("nan"))}, ValueError, r"betas=\(0.9, nan\) is out of range"),
    ({"betas": (0.9,)}, ValueError, r"betas=\(0.9,\) is out of range"),
]

OF_ONE_KERNEL: dict[str, list[tuple[dict[str, Any], type[Exception], str]]] = {
    "adamw_": [
        *BETAS,
        ({"eps": -1.0}, ValueError, r"eps=-1.0 is out of range"),
        ({"exp_avg_sq": fp32().bfloat16()}, TypeError, r"exp_avg_sq has dtype torch.bfloat16; expected torch.float32"),
        ({"exp_avg": fp32().bfloat16()}, TypeError, r"exp_avg_sq has dtype torch.float32; expected torch.bfloat16"),
        ({"max_exp_avg_sq": fp32().bfloat16()}, TypeError, r"max_exp_avg_sq has dtype torch.bfloat16"),
        ({"exp_avg": SHARED[:8], "exp_avg_sq": SHARED[:8]}, ValueError, r"share 32 bytes of memory"),
        ({"exp_avg": SHARED[:8], "max_exp_avg_sq": SHARED[7:15]}, ValueError, r"share 4 bytes of memory"),
    ],
    "adagrad_": [
        ({"eps": -1.0}, ValueError, r"eps=-1.0 is out of range"),
        ({"lr_decay": -0.1}, ValueError, r"lr_decay=-0.1 is out of range"),
        ({"param": SHARED[:8], "sum": SHARED[8 - 1 : 15]}, ValueError, r"param and sum share 4 bytes"),
    ],
    "lion_": [*BETAS, ({"grad": SHARED[:8], "exp_avg": SHARED[:8]}, ValueError, r"share 32 bytes of memory")],
    "sgd_": [
        ({"momentum": 0.0}, ValueError, r"momentum=0.0 with a momentum_buffer"),
        ({"momentum_buffer": None}, ValueError, r"momentum=0.9 with no momentum_buffer"),
        ({"momentum": -0.5}, ValueError, r"momentum=-0.5 is out of range"),
        ({"momentum": float("nan")}, ValueError, r"momentum=nan is out of range"),
        ({"dampening": float("nan")}, ValueError, r"dampening=nan is out of range"),
        ({"nesterov": True, "dampening": 0.1}, ValueError, r"nesterov with momentum=0.9, dampening=0.1"),
        (
            {"nesterov": True, "momentum": 0.0, "momentum_buffer": None},
            ValueError,
            r"nesterov with momentum=0.0, dampening=0.0",
        ),
    ],
}

CASES = [
    *((kernel, *case) for kernel in KERNELS for case in OF_PARAM_AND_GRAD),
    *(
        (kernel, {name: state}, error, message)
        for kernel, rule_name in KERNELS.items()
        for name in RULES[rule_name].states
        for state, error, message in OF_STATE
    ),
    *((kernel, *case) for kernel, cases in OF_ONE_KERNEL.items() for case in cases),
]


def assert_refused(
    call: Any, arguments: dict[str, Any], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = arguments | changes
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    readable = {name: x for name, x in tensors.items() if x.device.type == "cpu" and x is not FREED}
    before = {name: x.clone() for name, x in readable.items()}
    with pytest.raises(error, match=message):
        call(**given)
    for name, tensor in readable.items():
        if tensor.itemsize in (2, 4):
            assert same_bits(tensor.reshape(-1), before[name].reshape(-1)), name


def update_arguments(kernel: str) -> dict[str, Any]:
    rule = RULES[KERNELS[kernel]]
    tensors: Tensors = {name: torch.full((8,), 0.5) for name in rule.states}
    return {"param": torch.ones(8), "grad": torch.ones(8), **tensors, **rule.arguments, "step": 1}


@pytest.mark.parametrize(("kernel", "changes", "error", "message"), CASES)
def test_a_wrong_argument_is_refused_and_nothing_is_written(
    kernel: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    assert_refused(getattr(ops, kernel), update_arguments(kernel), changes, error, message)


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_unknown_argument_is_refused_and_nothing_is_written(kernel: str) -> None:
    """A misspelt option would leave the default."""
    for name in ("grad_scal", "foreach"):
        assert_refused(getattr(ops, kernel), update_arguments(kernel), {name: 0.5}, TypeError, name)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("rule_name", RULES)
def test_right_arguments_are_accepted(rule_name: str, dtype: torch.dtype) -> None:
    """The largest seed and index and an empty tensor among them."""
    rule = RULES[rule_name]
    for count in (0, 8):
        tensors = {name: torch.zeros(count) for name in rule.states}
        tensors |= {"param": torch.zeros(count, dtype=dtype), "grad": torch.ones(count, dtype=dtype)}
        if dtype != torch.float32:
            tensors["remainder"] = int16(count)
        rule(tensors, step=1, seed=2**64 - 1, index=2**64 - 1, isa=None, threads=None, copy_out=None)
        assert (tensors["param"] < 0).all()


@pytest.mark.parametrize("function", [ops.split_, ops.join_])
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"whole": fp32().double()}, TypeError, r"whole has dtype torch.float64; expected torch.float32"),
        ({"whole": torch.zeros(2, 4)}, ValueError, r"whole has shape \(2, 4\)"),
        ({"whole": FREED}, ValueError, r"storage of whole holds 0 bytes"),
        ({"whole": [0.0] * 8}, TypeError, r"whole must be a torch.Tensor; got list"),
        ({"high": fp32()}, TypeError, r"high has dtype torch.float32; expected torch.bfloat16 or torch.float16"),
        ({"high": fp32(9).half()}, ValueError, r"high has 9 elements; expected 8"),
        ({"high": torch.zeros(16).half()[::2]}, ValueError, r"high has shape \(8,\) and strides \(2,\)"),
        ({"remainder": fp32().half()}, TypeError, r"remainder has dtype torch.float16; expected torch.int16"),
        ({"remainder": int16(5)}, ValueError, r"remainder has 5 elements; expected 8"),
        ({"remainder": int16().to("meta")}, ValueError, r"remainder is on device meta"),
        ({"whole": SHARED[:8], "high": SHARED.view(torch.float16)[8:16]}, ValueError, r"whole and high share 16 bytes"),
        ({"high": SHARED.view(torch.float16)[:8], "remainder": SHARED.view(torch.int16)[:8]}, ValueError, r"share 16"),
        ({"threads": 0}, ValueError, r"threads=0 is out of range"),
        ({"isa": "neon"}, ValueError, r"instruction set 'neon' is not available.*scalar"),
    ],
)
def test_a_wrong_argument_of_split_and_join_is_refused(
    function: Any, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"whole": torch.ones(8), "high": torch.full((8,), 2.0).half(), "remainder": int16() + 3}
    assert_refused(function, arguments, changes, error, message)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"values": [1.0]}, TypeError, r"values must be a torch.Tensor; got list"),
        ({"values": fp32().double()}, TypeError, r"values has dtype torch.float64; expected"),
        ({"values": int16()}, TypeError, r"values has dtype torch.int16; expected"),
        ({"values": torch.zeros(2, 4)}, ValueError, r"values has shape \(2, 4\)"),
        ({"values": torch.zeros(16)[::2]}, ValueError, r"values has shape \(8,\) and strides \(2,\)"),
        ({"values": torch.zeros(8, device="meta")}, ValueError, r"values is on device meta"),
        ({"values": FREED}, ValueError, r"storage of values holds 0 bytes"),
        ({"threads": 0}, ValueError, r"threads=0 is out of range"),
        ({"threads": 1.5}, TypeError, r"threads has type float"),
        ({"isa": "neon"}, ValueError, r"instruction set 'neon' is not available.*scalar"),
    ],
)
def test_a_wrong_argument_of_the_sum_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    assert_refused(ops.sum_of_squares, {"values": torch.ones(8)}, changes, error, message)


def test_zero_refuses_memory_with_gaps() -> None:
    """The bytes from its address on would be other elements than the view's."""
    whole = torch.ones(4, 4)
    with pytest.raises(ValueError, match="contiguous"):
        ops.zero_(whole[:, ::2])
    assert (whole == 1.0).all()


def test_zero_refuses_freed_memory() -> None:
    tensor = torch.ones(64)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"holds 0 bytes; expected at least 256"):
        ops.zero_(tensor)
