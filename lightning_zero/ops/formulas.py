"""The kernels' arithmetic in torch's operations, with the same bits, for tensors that are not in host memory.

If the state of an optimizer rests partly in host memory and partly on a device, the kernels update the former and these
functions the latter, with identical results. Each operation rounds once, in fp32 or fp64, as IEEE 754 requires, and so
gives the same bits on every device. Exceptions are square roots (see ``_root``) and fused multiply-adds, which torch
has on some devices only (see :class:`Fused`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from lightning_zero.ops import _C, updates
from lightning_zero.ops.arguments import runs_on
from lightning_zero.ops.arrays import LANES, LEVELS, ROWS
from lightning_zero.ops.updates import Options

TILE = 1 << 20  # number of elements that are squared at a time; updates take no more at a time either
_SIZES = (1, 5, 16, 67, 1003)  # sizes for trials: they exercise vectorized loops and the remainders at their ends


class Fused(NamedTuple):
    """Fused multiply-adds of fp32 tensors, which round once.

    Attributes:
        add_scaled: computes ``total += factor * values`` in place; ``factor`` is a number that fp32 represents exactly.
        add_product: computes ``total += values * others`` in place.
    """

    add_scaled: Callable[[Tensor, Tensor, float], object]
    add_product: Callable[[Tensor, Tensor, Tensor], object]


def _add_product(total: Tensor, values: Tensor, others: Tensor | float) -> None:
    """Add the exact product in fp64 and round the sum to odd; rounding that to fp32 then rounds the exact sum.

    Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to
    odd" (2008).
    """
    product, wide = values.double().mul_(others), total.double()
    rounded = product + wide
    # The rounding error of the sum: Knuth, "The Art of Computer Programming", volume 2, 4.2.2, theorem B.
    virtual = rounded - product
    wide -= virtual
    product -= virtual.neg_().add_(rounded)
    lost = product.add_(wide).sign_().mul_(virtual.copy_(rounded).sign_()).nan_to_num_(0.0)  # 1: magnitude too small
    bits, step = rounded.view(torch.int64), lost.to(torch.int64)
    bits += step.mul_((bits & 1).neg_().add_(1))
    total.copy_(rounded)


def _add_scaled_natively(total: Tensor, values: Tensor, factor: float) -> None:
    total.add_(values, alpha=factor)


def _add_product_natively(total: Tensor, values: Tensor, others: Tensor) -> None:
    total.addcmul_(values, others)


@functools.cache
def fused_on(device: torch.device) -> Fused:
    """The fused multiply-adds of a device: torch's own if a trial shows that they round once. The host waits for it."""
    if device.type == "meta":  # used for plans, in the place of a real device
        return Fused(_add_product, _add_product)
    generator = torch.Generator().manual_seed(0)
    scaled = product = True
    for size in _SIZES:
        total, values, others = (
            torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(device) for _ in range(3)
        )
        scaled &= _is_fused(_add_scaled_natively, total, values, others[0].item())
        product &= _is_fused(_add_product_natively, total, values, others)
    return Fused(_add_scaled_natively if scaled else _add_product, _add_product_natively if product else _add_product)


def _is_fused(
    add: Callable[[Tensor, Tensor, Any], None], total: Tensor, values: Tensor, others: Tensor | float
) -> bool:
    found, expected = total.clone(), total.clone()
    add(found, values, others)
    _add_product(expected, values, others)
    return torch.equal(found, expected)


# ------------------------------------------------------------------------------------------------------------- updates


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
    decoupled: bool = True,
    max_exp_avg_sq: Tensor | None = None,
    **options: Unpack[Options],
) -> None:
    """Computes :func:`lightning_zero.ops.adamw_` of fp32 tensors on one device; ``grad`` may have 16 bits.

    It supports the options that concern the gradient. Arguments are not checked.
    """
    c = _C.AdamCoefficients(
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        grad_scale=_factor(options),
        decoupled=decoupled,
        amsgrad=max_exp_avg_sq is not None,
    )
    fused = fused_on(param.device)
    g = _gradient(grad, param, c.grad_scale, c.l2, fused)
    difference = g - exp_avg
    if c.lerp_from_gradient:
        exp_avg.copy_(g)
    fused.add_scaled(exp_avg, difference, c.lerp_weight)
    torch.mul(g, c.one_minus_beta2, out=difference)
    fused.add_product(exp_avg_sq.mul_(c.beta2), difference, g)
    del difference, g
    squares = exp_avg_sq
    if max_exp_avg_sq is not None:
        squares = torch.maximum(max_exp_avg_sq, exp_avg_sq, out=max_exp_avg_sq)
    update = (exp_avg * c.negative_step_size).div_(_root(squares).add_(c.eps))
    _add_update(param, update, c.decay, fused)


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
    """Computes :func:`lightning_zero.ops.adagrad_`; see :func:`adamw_`."""
    c = _C.AdagradCoefficients(
        lr=lr, lr_decay=lr_decay, eps=eps, weight_decay=weight_decay, step=step, grad_scale=_factor(options)
    )
    fused = fused_on(param.device)
    g = _gradient(grad, param, c.grad_scale, c.l2, fused)
    fused.add_product(sum, g, g)
    param += g.mul_(c.negative_lr).div_(_root(sum).add_(c.eps))


def lion_(
    param: Tensor,
    exp_avg: Tensor,
    grad: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    step: int = 1,
    **options: Unpack[Options],
) -> None:
    """Computes :func:`lightning_zero.ops.lion_`; see :func:`adamw_`."""
    c = _C.LionCoefficients(
        lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay, grad_scale=_factor(options)
    )
    fused = fused_on(param.device)
    g = _gradient(grad, param, c.grad_scale, 0.0, fused)
    update = exp_avg * c.beta1
    fused.add_scaled(update, g, c.one_minus_beta1)
    fused.add_scaled(exp_avg.mul_(c.beta2), g, c.one_minus_beta2)
    del g
    _add_update(param, update.sign_().mul_(c.negative_lr), c.decay, fused)


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
    """Computes :func:`lightning_zero.ops.sgd_`; see :func:`adamw_`."""
    c = _C.SgdCoefficients(
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        weight_decay=weight_decay,
        first=first,
        grad_scale=_factor(options),
    )
    fused = fused_on(param.device)
    update = _gradient(grad, param, c.grad_scale, c.l2, fused)
    if momentum_buffer is not None:
        if c.first:
            momentum_buffer.copy_(update)
        else:
            fused.add_scaled(momentum_buffer.mul_(c.momentum), update, c.one_minus_dampening)
        if c.nesterov:
            fused.add_scaled(update, momentum_buffer, c.momentum)
        else:
            update = momentum_buffer
    fused.add_scaled(param, update, c.negative_lr)


class Updates(NamedTuple):
    """The update functions of all rules; arguments as in :mod:`lightning_zero.ops.updates`."""

    adamw_: Callable[..., None]
    adagrad_: Callable[..., None]
    lion_: Callable[..., None]
    sgd_: Callable[..., None]


_BY_KERNELS = Updates(updates.adamw_, updates.adagrad_, updates.lion_, updates.sgd_)
_BY_FORMULAS = Updates(adamw_, adagrad_, lion_, sgd_)


def updates_on(device: torch.device) -> Updates:
    """The update functions for tensors on ``device``: kernels for host memory, otherwise those of this module."""
    return _BY_KERNELS if runs_on(device) else _BY_FORMULAS


def _factor(options: Options) -> float:
    """The factor of the gradient, negative to maximize.

    Raises:
        ValueError: an option is given that only kernels support.
    """
    if given := [name for name in ("remainder", "copy_out") if options.get(name) is not None]:
        raise ValueError(f"{given[0]} was given for tensors that are not in host memory; only kernels take it")
    scale = options.get("grad_scale", 1.0)
    return -scale if options.get("maximize") else scale


def _gradient(grad: Tensor, param: Tensor, scale: float, l2: float, fused: Fused) -> Tensor:
    """A new fp32 tensor with the scaled gradient plus ``l2`` times the parameter."""
    g = grad.to(torch.float32, copy=True).mul_(scale)
    if l2 != 0.0:
        fused.add_scaled(g, param, l2)
    return g


def _root(values: Tensor) -> Tensor:
    """Square roots of fp32 numbers, rounded once."""
    # Some libraries that torch uses compute fp32 roots with an error of a unit in the last place. Such an error in fp64
    # does not matter, since no root of an fp32 number is that close to a border between two fp32 numbers.
    return values.double().sqrt_().to(torch.float32)


def _add_update(param: Tensor, update: Tensor, decay: float, fused: Fused) -> None:
    """Add ``update``, which is overwritten, and ``decay`` times the parameter to the parameter."""
    if decay != 0.0:
        fused.add_scaled(update, param, decay)
    param += update


# ------------------------------------------------------------------------------------------------------------ squares


def sum_of_squares(values: Tensor) -> Tensor:
    """Sum the squares with the bits of :func:`lightning_zero.ops.sum_of_squares`.

    Args:
        values: 1-D, fp32, bf16 or fp16.

    Returns:
        0-dim fp64 on the device of ``values``.
    """
    sums = torch.cat([_sums_of_pieces(tile) for tile in values.split(TILE)])
    while sums.numel() > 1:
        sums = _add_rows(_padded(sums, ROWS), 1)
    return sums.sum()  # of at most one element: makes it 0-dim, and 0 if there is none


def squares_scratch(numel: int) -> int:
    """Bytes of temporary memory of :func:`sum_of_squares` for ``numel`` elements, for a plan."""
    rows = -(-min(numel, TILE) // (ROWS * LANES))
    return rows * (ROWS + 1) * LANES * torch.float64.itemsize


def _sums_of_pieces(tile: Tensor) -> Tensor:
    sums = _padded(tile, ROWS * LANES)
    sums.mul_(sums)
    for _ in range(LEVELS):
        sums = _add_rows(_padded(sums, ROWS * LANES), LANES)
    lanes = sums.view(-1, LANES)
    return _add_rows(lanes.reshape(-1), 1)


def _padded(values: Tensor, multiple: int) -> Tensor:
    """The values as fp64, padded with zeros to a multiple of ``multiple`` elements; ``values`` itself if it is that."""
    missing = -values.numel() % multiple
    if not missing and values.dtype == torch.float64:
        return values
    padded = values.new_zeros(values.numel() + missing, dtype=torch.float64)
    padded[: values.numel()].copy_(values)
    return padded


def _add_rows(values: Tensor, width: int) -> Tensor:
    """The sums of each group of ``ROWS`` consecutive rows of ``width`` elements, added in order."""
    table = values.view(-1, ROWS, width)
    sums = table[:, 0].clone()
    for row in range(1, ROWS):
        sums += table[:, row]
    return sums.view(-1)
