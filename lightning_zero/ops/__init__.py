"""Optimizer kernels on host memory, with the instruction set chosen at run time.

The kernels work on 1-D fp32 masters and moments in place, with the GIL released. Large arrays are shared out to
threads of the package's own, which sleep in between and beside which torch's may compute. Every instruction set and
every number of threads gives the same bits (NaN payloads aside). Environment variables, where empty means unset:
`LIGHTNING_ZERO_ISA` (`scalar`, `avx2`, `avx512`) overrides the instruction set, `LIGHTNING_ZERO_NUM_THREADS` the
number of threads.
"""

from __future__ import annotations

import math
import os
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

try:
    from lightning_zero.ops import _C
except ImportError as error:
    raise ImportError(
        f"the compiled extension lightning_zero.ops._C could not be imported from {__path__}; "
        "expected it beside this module. Install the package (`pip install .`), and do not let a source "
        "folder on sys.path hide the installed one."
    ) from error

__all__ = [
    "adamw_",
    "compiled_isas",
    "get_num_threads",
    "isa",
    "set_num_threads",
    "share_cores",
    "supported_isas",
]

_DTYPES = {
    torch.float32: _C.DType.float32,
    torch.bfloat16: _C.DType.bfloat16,
    torch.float16: _C.DType.float16,
}
_FP32 = (torch.float32,)
_HALF = (torch.bfloat16, torch.float16)
_ANY = (*_FP32, *_HALF)

_ISA = _C.resolve_isa(os.environ.get("LIGHTNING_ZERO_ISA", ""))


def _cores() -> int:
    """Cores that this process may use: by affinity and by the quota of its control group (a container's limit)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = Path("/sys/fs/cgroup/cpu.max")
    quota, period = limit.read_text().split() if limit.exists() else ("max", "1")
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} has type {type(value).__name__}; expected int")
    if value < 1:
        raise ValueError(f"{name}={value} is out of range; expected >= 1")
    return value


class _Threads:
    """How many threads a kernel takes: what was asked for, or this process's share of the cores it may run on."""

    def __init__(self, environment: str) -> None:
        if environment and not environment.isdecimal():
            raise ValueError(f"LIGHTNING_ZERO_NUM_THREADS={environment!r} must be a whole number >= 1, or unset")
        self.asked = _positive("LIGHTNING_ZERO_NUM_THREADS", int(environment)) if environment else None
        self.processes = 1
        self.cores = _cores()

    @property
    def number(self) -> int:
        return self.asked or max(1, self.cores // self.processes)


_THREADS = _Threads(os.environ.get("LIGHTNING_ZERO_NUM_THREADS", ""))


def get_num_threads() -> int:
    """The number of threads that a kernel takes at most; small arrays take fewer."""
    return _THREADS.number


def set_num_threads(threads: int | None) -> None:
    """Take this many threads from now on; `None`: the process's share of the cores it may run on.

    Raises:
        TypeError: not an int.
        ValueError: less than 1.
    """
    _THREADS.asked = None if threads is None else _positive("threads", threads)


def share_cores(processes: int) -> None:
    """Tell how many processes of this machine run kernels at the same time; the default is one.

    Raises:
        TypeError: not an int.
        ValueError: less than 1.
    """
    _THREADS.processes = _positive("processes", processes)


def isa() -> str:
    """The instruction set that the kernels use: `LIGHTNING_ZERO_ISA`, or the fastest this machine runs."""
    return _ISA


def compiled_isas() -> tuple[str, ...]:
    """Instruction sets in this binary, slowest first."""
    return tuple(_C.compiled_isas())


def supported_isas() -> tuple[str, ...]:
    """Those of `compiled_isas` that this CPU and operating system run."""
    return tuple(_C.supported_isas())


def adamw_(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    decoupled: bool = True,
    copy_out: Tensor | None = None,
    isa: str | None = None,
    threads: int | None = None,
) -> None:
    r"""Update parameters and moments in place by AdamW (or Adam), in one pass over memory.

    With :math:`g` = `grad` x `grad_scale` in fp32 and :math:`\lambda` = `weight_decay`:

    .. math::
        p &\leftarrow p (1 - \mathrm{lr} \lambda)
            \quad\text{(decoupled)}\qquad\text{or}\qquad g \leftarrow g + \lambda p \\
        m &\leftarrow m + (1 - \beta_1) (g - m), \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \frac{\mathrm{lr}}{1 - \beta_1^t}
            \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \varepsilon}

    Sources: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015); Loshchilov and Hutter,
    "Decoupled Weight Decay Regularization" (2019). The operations are those of
    `torch.optim.Adam(W)(foreach=False)` on a CPU with fused multiply-add, in its order. From equal inputs the
    moments come out bitwise equal to it; `param` differs by at most 1 ulp of itself plus 2^-21 of its update,
    because some builds of torch do not round the square root correctly.

    Memory is written through raw addresses: autograd's version counters do not move. All tensors are 1-D,
    contiguous, on the CPU, of one length n (which may be 0), at any element-aligned address, without overlap.

    Args:
        param: [n] fp32 master parameter.
        exp_avg: [n] fp32 first moment m.
        exp_avg_sq: [n] fp32 second moment v.
        grad: [n] fp32, bf16 or fp16 gradient; not modified.
        lr: learning rate, >= 0.
        betas: decay rates of the moments, each in [0, 1).
        eps: added to the denominator, >= 0.
        weight_decay: >= 0.
        step: number t of this update, counted from 1; it sets the bias corrections, computed in fp64.
        grad_scale: finite factor of the gradient (1 / loss scale x clipping). 1 changes no bit.
        decoupled: True for AdamW, False for Adam with an L2 term in the gradient.
        copy_out: [n] bf16 or fp16, receives the updated parameter rounded to nearest even; fp16 overflow
            becomes infinity.
        isa: one of `supported_isas` instead of the chosen one, for tests and benchmarks.
        threads: at most so many instead of `get_num_threads`; >= 1.

    Raises:
        TypeError: an argument is not a tensor, has another dtype, or `step` is not an int.
        ValueError: a tensor is not 1-D, contiguous, on the CPU, allocated, of the common length, or shares
            memory with another; a hyperparameter is out of range; `isa` is unknown or unsupported.
    """
    spans = [_span("param", param, _FP32, None)]
    count = param.numel()
    spans += [
        _span("exp_avg", exp_avg, _FP32, count),
        _span("exp_avg_sq", exp_avg_sq, _FP32, count),
        _span("grad", grad, _ANY, count),
    ]
    if copy_out is not None:
        spans.append(_span("copy_out", copy_out, _HALF, count))
    _check_disjoint(spans)
    _check_hyperparameters(lr, betas, eps, weight_decay, step, grad_scale)
    _C.adamw(
        isa=_ISA if isa is None else isa,
        param=param.data_ptr(),
        exp_avg=exp_avg.data_ptr(),
        exp_avg_sq=exp_avg_sq.data_ptr(),
        grad=grad.data_ptr(),
        grad_dtype=_DTYPES[grad.dtype],
        copy_out=0 if copy_out is None else copy_out.data_ptr(),
        copy_dtype=_C.DType.bfloat16 if copy_out is None else _DTYPES[copy_out.dtype],
        count=count,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        grad_scale=grad_scale,
        decoupled=decoupled,
        threads=get_num_threads() if threads is None else _positive("threads", threads),
    )


class _Span(NamedTuple):
    """The bytes [begin, end) of a tensor argument."""

    begin: int
    end: int
    name: str


def _span(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], count: int | None) -> _Span:
    """Check one tensor argument, which must have `count` elements unless that is None."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected {expected}. Convert it with .to(dtype).")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on device {tensor.device}; expected cpu. Move it with .cpu().")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; expected a "
            "contiguous 1-D tensor. Pass .contiguous().view(-1), or a view of a flat buffer."
        )
    if count is not None and tensor.numel() != count:
        raise ValueError(f"{name} has {tensor.numel()} elements; expected {count}, the length of param")
    allocated = tensor.untyped_storage().nbytes()
    needed = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    if needed > allocated:
        raise ValueError(
            f"the storage of {name} holds {allocated} bytes; expected at least {needed}. "
            "Resize the storage before the update."
        )
    begin = tensor.data_ptr()
    return _Span(begin, begin + tensor.nbytes, name)


def _check_disjoint(spans: list[_Span]) -> None:
    ordered = sorted(span for span in spans if span.begin < span.end)
    for left, right in pairwise(ordered):
        shared = min(left.end, right.end) - right.begin
        if shared > 0:
            raise ValueError(
                f"{left.name} and {right.name} share {shared} bytes of memory; expected disjoint tensors. "
                "Pass a clone of one of them."
            )


def _check_hyperparameters(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int, grad_scale: float
) -> None:
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name}={value!r} is out of range; expected a finite number >= 0")
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas={betas!r} is out of range; expected two numbers in [0, 1)")
    if not isinstance(step, int):
        raise TypeError(f"step has type {type(step).__name__}; expected int. Pass int(step).")
    if step < 1:
        raise ValueError(f"step={step} is out of range; expected >= 1: the first update is number 1")
    if not math.isfinite(grad_scale):
        raise ValueError(f"grad_scale={grad_scale!r} is not finite; skip the update of a non-finite gradient")
