"""Checks the kernels' arguments: numbers, and tensors, whose memory is then accessed through raw addresses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.ops import _C

DTYPES = {
    torch.float32: _C.DType.float32,
    torch.bfloat16: _C.DType.bfloat16,
    torch.float16: _C.DType.float16,
}
FP32 = (torch.float32,)
HALF = (torch.bfloat16, torch.float16)
ANY = (*FP32, *HALF)
STATE = (torch.float32, torch.bfloat16)
LARGEST, _SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny


def runs_on(device: torch.device) -> bool:
    """Whether kernels accept tensors on ``device``: they run on the CPU and access its memory only."""
    return device.type == "cpu"


class Span(NamedTuple):
    """The bytes [begin, end) of a tensor argument."""

    begin: int
    end: int
    name: str


def span(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], count: int | None) -> Span:
    """Checks one tensor argument and returns its range of bytes.

    Args:
        name: name of the argument, for messages.
        tensor: the argument.
        dtypes: allowed dtypes.
        count: required number of elements; None: any.

    Raises:
        TypeError: it is not a tensor, or has another dtype.
        ValueError: it is not on the CPU, 1-D, contiguous, negated, allocated, or of the required length.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected {expected}. Convert it with .to(dtype).")
    if not runs_on(tensor.device):
        raise ValueError(f"{name} is on device {tensor.device}; expected cpu. Move it with .cpu().")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; expected a "
            "contiguous 1-D tensor. Pass .contiguous().view(-1), or a view of a flat buffer."
        )
    if tensor.is_neg():
        raise ValueError(f"{name} holds numbers that torch has not negated yet. Pass .resolve_neg().")
    if count is not None and tensor.numel() != count:
        raise ValueError(f"{name} has {tensor.numel()} elements; expected {count}, as many as the first tensor")
    check_allocated(name, tensor)
    begin = tensor.data_ptr()
    return Span(begin, begin + tensor.nbytes, name)


def check_allocated(name: str, tensor: Tensor) -> None:
    """Raises ValueError if the storage is smaller than the tensor, as after freeing it by resizing."""
    allocated = tensor.untyped_storage().nbytes()
    needed = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    if needed > allocated:
        raise ValueError(
            f"the storage of {name} holds {allocated} bytes; expected at least {needed}. "
            "Resize the storage before the update."
        )


def check_disjoint(spans: list[Span]) -> None:
    """Raises ValueError if two arguments share memory."""
    ordered = sorted(span for span in spans if span.begin < span.end)
    for left, right in pairwise(ordered):
        shared = min(left.end, right.end) - right.begin
        if shared > 0:
            raise ValueError(
                f"{left.name} and {right.name} share {shared} bytes of memory; expected disjoint tensors. "
                "Pass a clone of one of them."
            )


def check_lr(lr: float) -> None:
    """Raises ValueError unless the learning rate is finite."""
    # Negative ones are allowed: schedulers that decay to zero may end a rounding error below it.
    if not -LARGEST <= lr <= LARGEST:
        raise ValueError(f"lr={lr!r} is out of range; expected a finite fp32 number")


def check_not_negative(**values: float) -> None:
    """Raises ValueError unless every value is finite and >= 0."""
    for name, value in values.items():
        if not 0.0 <= value <= LARGEST:
            raise ValueError(f"{name}={value!r} is out of range; expected a finite fp32 number >= 0")


def check_betas(betas: Sequence[float]) -> None:
    """Raises ValueError unless there are two numbers, each in [0, 1)."""
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas={betas!r} is out of range; expected two numbers in [0, 1)")


def check_momentum(momentum: float, dampening: float, nesterov: bool) -> None:
    """Raises ValueError unless `sgd_` is defined for this combination of arguments."""
    check_not_negative(momentum=momentum)
    if 0.0 < momentum < _SMALLEST:
        raise ValueError(f"momentum={momentum!r} is out of range; expected 0 or at least {_SMALLEST}")
    if not -LARGEST <= dampening <= LARGEST:
        raise ValueError(f"dampening={dampening!r} is out of range; expected a finite fp32 number")
    if nesterov and (momentum <= 0.0 or dampening != 0.0):
        raise ValueError(
            f"nesterov with momentum={momentum!r}, dampening={dampening!r}; expected a momentum > 0 and dampening 0"
        )


def check_step(step: int) -> None:
    """Raises TypeError or ValueError unless `step` is the number of an update, counted from 1."""
    if not isinstance(step, int) or isinstance(step, bool):
        raise TypeError(f"step has type {type(step).__name__}; expected int. Pass int(step).")
    if not 1 <= step < 2**63:
        raise ValueError(f"step={step} is out of range; expected >= 1, and < 2**63: the first update is number 1")


def unsigned(name: str, value: int) -> int:
    """Returns `value` if it is an unsigned 64-bit int; raises TypeError or ValueError otherwise."""
    if not isinstance(value, int):
        raise TypeError(f"{name} has type {type(value).__name__}; expected int")
    if not 0 <= value < 2**64:
        raise ValueError(f"{name}={value} is out of range; expected 0 <= {name} < 2**64")
    return value
