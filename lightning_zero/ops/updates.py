"""The optimizer updates as functions on tensors; each checks its arguments and makes one pass over memory."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from lightning_zero.ops import _C
from lightning_zero.ops.arguments import (
    ANY,
    DTYPES,
    FP32,
    HALF,
    LARGEST,
    STATE,
    check_betas,
    check_disjoint,
    check_lr,
    check_momentum,
    check_not_negative,
    check_step,
    span,
    unsigned,
)
from lightning_zero.ops.blocks import Quantized, spans_of
from lightning_zero.ops.isa import isa as chosen_isa
from lightning_zero.ops.threads import get_num_threads, positive

Ties = Literal["even", "away"]

_TIES = {"even": _C.Ties.even, "away": _C.Ties.away}


class Options(TypedDict, total=False):
    """Options of all update kernels, besides their rule's own arguments.

    Attributes:
        grad_scale: finite fp32 factor of the gradient (clipping factor / loss scale). The default, 1, changes no bit.
        maximize: step in the direction of the gradient, not against it.
        remainder: [n] int16; with it `param` (bf16 or fp16) is the high part of a split fp32 master: see `split_`.
        copy_out: [n] bf16 or fp16; receives the updated fp32 master rounded to nearest; fp16 overflow becomes infinity.
        copy_ties: rounding of values halfway between two bf16 numbers in `copy_out`: to "even" (the default, IEEE's and
            torch's rule) or "away" from zero, as in the high part of a split master.
        seed: seed of the stochastic rounding of bf16 and 8-bit state, in [0, 2^64).
        index: index of the first element among all elements that are rounded with this seed, in [0, 2^64); the indices
            of the others follow. Stochastic rounding depends on seed, step and index only. The index also determines
            the borders of the blocks of 8-bit state.
        isa: one of `supported_isas` instead of the chosen one, for tests and benchmarks.
        threads: maximum number of threads instead of `get_num_threads`; >= 1.
    """

    grad_scale: float
    maximize: bool
    remainder: Tensor | None
    copy_out: Tensor | None
    copy_ties: Ties
    seed: int
    index: int
    isa: str | None
    threads: int | None


def adamw_(
    param: Tensor,
    exp_avg: Tensor | Quantized,
    exp_avg_sq: Tensor | Quantized,
    grad: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    decoupled: bool = True,
    max_exp_avg_sq: Tensor | None = None,
    **options: Unpack[Options],
) -> None:
    r"""Updates parameters and moments in place by AdamW (or Adam), in one pass over memory.

    With :math:`g` = `grad` x `grad_scale` in fp32 and :math:`\lambda` = `weight_decay`:

    .. math::
        g &\leftarrow g + \lambda p \quad\text{(unless decoupled)} \\
        m &\leftarrow m + (1 - \beta_1) (g - m), \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        p &\leftarrow p - \left(\frac{\mathrm{lr}}{1 - \beta_1^t}
            \frac{m}{\sqrt{v} / \sqrt{1 - \beta_2^t} + \varepsilon} + \mathrm{lr} \lambda p
            \text{ (if decoupled)} \right)

    Sources: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015); Loshchilov and Hutter, "Decoupled
    Weight Decay Regularization" (2019); amsgrad: Reddi, Kale and Kumar, "On the Convergence of Adam and Beyond" (2018).
    The operations, and their order, are those of `torch.optim.Adam(W)(foreach=False)` on a CPU with fused multiply-add,
    with one difference: a decoupled decay is part of the update instead of a factor of the parameter before it, so that
    the parameter is rounded once. From equal inputs, fp32 moments are bitwise equal to torch's. Given the moments, the
    parameter differs from the formula in real numbers by at most half an ulp plus 2^-21 of the update's magnitude.

    Memory is written through raw addresses, so autograd's version counters do not change. All tensors must be 1-D,
    contiguous, on the CPU, of one length n (which may be 0), at element-aligned addresses, and must not overlap.

    Args:
        param: [n] fp32 master parameter; or bf16 or fp16 with `remainder`.
        exp_avg: [n] first moment m: fp32; or bf16, stochastically rounded before the parameter is updated with it; or 8
            bits (:class:`Quantized`, signed), stochastically rounded after the parameter is updated.
        exp_avg_sq: [n] second moment v, in the same form; 8-bit ones are unsigned.
        grad: [n] fp32, bf16 or fp16 gradient; not modified.
        lr: learning rate, finite.
        betas: decay rates of the moments, each in [0, 1).
        eps: added to the denominator, >= 0.
        weight_decay: >= 0.
        step: number t of this update, counted from 1; it determines the bias corrections, computed in fp64.
        decoupled: True for AdamW, False for Adam with an L2 term in the gradient.
        max_exp_avg_sq: [n] running maximum of v, which replaces v in the denominator (amsgrad). Not supported with
            8-bit state.
        **options: see `Options`.

    Raises:
        TypeError: an argument is not a tensor, or has another dtype; or a count is not an int.
        ValueError: a tensor is not 1-D, contiguous, on the CPU, allocated and of the common length, or shares
            memory with another; a hyperparameter is out of range; `isa` is unknown or unsupported.
    """
    states: dict[str, Tensor | Quantized] = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if max_exp_avg_sq is not None:
        if isinstance(exp_avg, Quantized):
            raise ValueError(
                "max_exp_avg_sq was given with 8-bit moments: the maximum of stochastically rounded numbers only "
                "grows. Pass fp32 or bf16 moments, or no max_exp_avg_sq"
            )
        states["max_exp_avg_sq"] = max_exp_avg_sq
    common = _common(param, grad, states, step, options, in_blocks=True)
    check_lr(lr)
    check_not_negative(eps=eps, weight_decay=weight_decay)
    check_betas(betas)
    _C.adam(
        **common,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        decoupled=decoupled,
        amsgrad=max_exp_avg_sq is not None,
    )


def adagrad_(
    param: Tensor,
    sum: Tensor,  # noqa: A002 - torch's name of the state
    grad: Tensor,
    *,
    lr: float,
    lr_decay: float,
    eps: float,
    weight_decay: float,
    step: int,
    **options: Unpack[Options],
) -> None:
    r"""Updates parameters and accumulated squares in place by Adagrad, in one pass over memory.

    With :math:`g` = `grad` x `grad_scale` + `weight_decay` x p in fp32:

    .. math::
        s \leftarrow s + g^2, \qquad
        p \leftarrow p - \frac{\mathrm{lr}}{1 + (t - 1) \mathrm{lr\_decay}} \frac{g}{\sqrt{s} + \varepsilon}

    Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization"
    (2011). The operations are those of `torch.optim.Adagrad(foreach=False)`; for accuracy and memory see `adamw_`.

    Args:
        param: [n] as in `adamw_`.
        sum: [n] sum of squares s, fp32; or bf16, stochastically rounded.
        grad: [n] fp32, bf16 or fp16; not modified.
        lr: learning rate, finite.
        lr_decay: >= 0.
        eps: added to the denominator, >= 0.
        weight_decay: L2 term in the gradient, >= 0.
        step: number t of this update, counted from 1.
        **options: see `Options`.

    Raises:
        TypeError, ValueError: as `adamw_`.
    """
    common = _common(param, grad, {"sum": sum}, step, options)
    check_lr(lr)
    check_not_negative(lr_decay=lr_decay, eps=eps, weight_decay=weight_decay)
    _C.adagrad(**common, lr=lr, lr_decay=lr_decay, eps=eps, weight_decay=weight_decay, step=step)


def lion_(
    param: Tensor,
    exp_avg: Tensor | Quantized,
    grad: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    step: int = 1,
    **options: Unpack[Options],
) -> None:
    r"""Updates parameters and momentum in place by Lion, in one pass over memory.

    With :math:`g` = `grad` x `grad_scale` in fp32, and the m from before the step on both right-hand sides:

    .. math::
        p \leftarrow p - \mathrm{lr} (\mathrm{sign}(\beta_1 m + (1 - \beta_1) g) + \lambda p), \qquad
        m \leftarrow \beta_2 m + (1 - \beta_2) g

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023). sign(NaN) is 0, as in torch; for memory
    and accuracy see `adamw_`.

    Args:
        param: [n] as in `adamw_`.
        exp_avg: [n] momentum m: fp32; or bf16 or 8 bits (:class:`Quantized`, signed), stochastically rounded.
        grad: [n] fp32, bf16 or fp16; not modified.
        lr: learning rate, finite.
        betas: each in [0, 1).
        weight_decay: decoupled, >= 0.
        step: number of this update, counted from 1; only stochastic rounding depends on it.
        **options: see `Options`.

    Raises:
        TypeError, ValueError: as `adamw_`.
    """
    common = _common(param, grad, {"exp_avg": exp_avg}, step, options, in_blocks=True)
    check_lr(lr)
    check_not_negative(weight_decay=weight_decay)
    check_betas(betas)
    _C.lion(**common, lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay)


def sgd_(
    param: Tensor,
    momentum_buffer: Tensor | None,
    grad: Tensor,
    *,
    lr: float,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    first: bool = False,
    step: int = 1,
    **options: Unpack[Options],
) -> None:
    r"""Updates parameters (and momentum) in place by stochastic gradient descent, in one pass over memory.

    With :math:`g` = `grad` x `grad_scale` + `weight_decay` x p in fp32, momentum :math:`\mu`, dampening :math:`\tau`:

    .. math::
        b \leftarrow \mu b + (1 - \tau) g \quad (g \text{ if first}), \qquad
        p \leftarrow p - \mathrm{lr} \begin{cases} g & \mu = 0 \\ g + \mu b & \text{Nesterov} \\ b \end{cases}

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning" (2013), in the form of
    `torch.optim.SGD(foreach=False)`; the result is bitwise equal to torch's. For memory see `adamw_`.

    Args:
        param: [n] as in `adamw_`.
        momentum_buffer: [n] momentum b, fp32; or bf16, stochastically rounded. None without momentum.
        grad: [n] fp32, bf16 or fp16; not modified.
        lr: learning rate, finite.
        weight_decay: L2 term in the gradient, >= 0.
        momentum: >= 0; must be 0 if and only if there is no buffer.
        dampening: finite.
        nesterov: requires momentum > 0 and a dampening of 0.
        first: initialize the buffer with the gradient.
        step: number of this update, counted from 1; only stochastic rounding depends on it.
        **options: see `Options`.

    Raises:
        TypeError, ValueError: as `adamw_`.
    """
    if (momentum_buffer is None) != (momentum == 0.0):
        given = "no momentum_buffer" if momentum_buffer is None else "a momentum_buffer"
        raise ValueError(f"momentum={momentum!r} with {given}; pass the buffer exactly when there is momentum")
    check_momentum(momentum, dampening, nesterov)
    states: dict[str, Tensor | Quantized] = {} if momentum_buffer is None else {"momentum_buffer": momentum_buffer}
    common = _common(param, grad, states, step, options)
    check_lr(lr)
    check_not_negative(weight_decay=weight_decay)
    _C.sgd(
        **common,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        weight_decay=weight_decay,
        first=first,
    )


def _common(
    param: Tensor,
    grad: Tensor,
    states: dict[str, Tensor | Quantized],
    step: int,
    options: Options,
    in_blocks: bool = False,
) -> dict[str, Any]:
    """Checks the arguments that all update kernels share, and converts them for the extension's functions.

    ``in_blocks`` tells whether the kernel supports 8-bit state.
    """
    if unknown := sorted(options.keys() - Options.__annotations__):
        raise TypeError(f"unknown argument {unknown[0]!r}; expected one of {', '.join(Options.__annotations__)}")
    remainder, copy_out = options.get("remainder"), options.get("copy_out")
    spans = [span("param", param, FP32 if remainder is None else HALF, None)]
    count = param.numel()
    index = unsigned("index", options.get("index", 0))
    blocks = {name: state for name, state in states.items() if isinstance(state, Quantized)}
    if blocks and (not in_blocks or len(blocks) < len(states)):
        raise TypeError(f"{next(iter(blocks))} is in 8 bits; expected {'all' if in_blocks else 'no'} state in 8 bits")
    tensors: dict[str, Any] = {name: state for name, state in states.items() if name not in blocks}
    state_dtypes: tuple[torch.dtype, ...] = (torch.int8,) if blocks else STATE
    for name, quantized in blocks.items():
        spans += spans_of(name, quantized, count, index)
    for name, state in tensors.items():
        spans.append(span(name, state, state_dtypes, count))
        state_dtypes = (state.dtype,)  # the other states must have the same dtype
    spans.append(span("grad", grad, ANY, count))
    if remainder is not None:
        spans.append(span("remainder", remainder, (torch.int16,), count))
        if copy_out is not None:
            raise ValueError("copy_out was given with a remainder; the high part of a split master is its 16-bit copy")
    if copy_out is not None:
        spans.append(span("copy_out", copy_out, HALF, count))
    check_disjoint(spans)
    copy_ties, grad_scale = options.get("copy_ties", "even"), options.get("grad_scale", 1.0)
    isa, threads = options.get("isa"), options.get("threads")
    if copy_ties not in _TIES:
        raise ValueError(f"copy_ties={copy_ties!r} is unknown; expected 'even' or 'away'")
    check_step(step)
    if not -LARGEST <= grad_scale <= LARGEST:
        raise ValueError(f"grad_scale={grad_scale!r} is not finite in fp32; skip the update of a non-finite gradient")
    arrays = _C.UpdateArrays(
        count=count,
        param=param.data_ptr(),
        param_dtype=DTYPES[param.dtype],
        remainder=_address(remainder),
        copy_out=_address(copy_out),
        copy_dtype=_C.DType.bfloat16 if copy_out is None else DTYPES[copy_out.dtype],
        copy_ties=_TIES[copy_ties],
        grad=grad.data_ptr(),
        grad_dtype=DTYPES[grad.dtype],
        states=[state.data_ptr() for state in tensors.values()]
        or [state.codes.data_ptr() for state in blocks.values()],
        state_dtype=_C.DType.int8 if blocks else DTYPES[state_dtypes[0]],
        scales=[state.scales.data_ptr() for state in blocks.values()],
    )
    return {
        "isa": chosen_isa() if isa is None else isa,
        "arrays": arrays,
        "key": _C.RoundingKey(
            seed=unsigned("seed", options.get("seed", 0)),
            step=step,
            index=index,
        ),
        "threads": get_num_threads() if threads is None else positive("threads", threads),
        "grad_scale": -grad_scale if options.get("maximize") else grad_scale,
    }


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
