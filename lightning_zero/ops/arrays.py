"""Kernels other than updates: sums, sum of squares, splitting and joining fp32 numbers, filling with zeros."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lightning_zero.ops import _C
from lightning_zero.ops.arguments import ANY, DTYPES, FP32, HALF, check_allocated, check_disjoint, runs_on, span
from lightning_zero.ops.isa import isa as chosen_isa
from lightning_zero.ops.threads import get_num_threads, positive

LANES = ROWS = 16  # `kLanes` and `kRows` of reduce.h
LEVELS = 3  # levels of rows in a piece
SQUARES_PIECE = ROWS**LEVELS * LANES  # number of elements in a piece, whose squares the kernel sums separately
SQUARES_ROW = ROWS * SQUARES_PIECE  # number of elements in a row of pieces: their sums are added before those of others


def sum_of_squares(values: Tensor, *, isa: str | None = None, threads: int | None = None) -> float:
    """Sums the squares of a tensor's elements, in one pass over memory.

    Squares are exact in fp64. They are added in an order that depends on the length only, so that every instruction set
    and number of threads gives the same bits. The sum is finite if and only if every element is, since sums of squares
    of fp32 numbers do not reach the limits of fp64.

    Args:
        values: 1-D, contiguous, on the CPU; fp32, bf16 or fp16.
        isa: one of `supported_isas` instead of the chosen one, for tests and benchmarks.
        threads: maximum number of threads instead of `get_num_threads`; >= 1.

    Raises:
        TypeError, ValueError: see `adamw_`.
    """
    span("values", values, ANY, None)
    return _C.sum_of_squares(
        isa=chosen_isa() if isa is None else isa,
        values=values.data_ptr(),
        dtype=DTYPES[values.dtype],
        count=values.numel(),
        threads=get_num_threads() if threads is None else positive("threads", threads),
    )


def sum_of_squares_in_pieces(pieces: Iterable[Tensor]) -> float:
    """Sums the squares of a tensor that is given in pieces; the bits are those of `sum_of_squares` of the whole tensor.

    Args:
        pieces: consecutive pieces of the tensor with `SQUARES_PIECE` elements each; the last one may be shorter.
    """
    return _add_up([sum_of_squares(piece) for piece in pieces])


def _add_up(sums: list[float]) -> float:
    """Adds the sums of pieces in the same order as the kernel."""
    while len(sums) > 1:
        sums = [reduce(operator.add, sums[i : i + ROWS], 0.0) for i in range(0, len(sums), ROWS)]
    return sums[0] if sums else 0.0


class RunningSquares:
    """Sums the squares of a tensor that arrives in parts, in order, with the bits of `sum_of_squares` of the whole.

    Args:
        numel: number of elements of the tensor.
    """

    def __init__(self, numel: int) -> None:
        self._left = numel  # number of elements that have not been summed
        self._rows: list[float] = []
        self._sums: list[float] = []  # of pieces that wait for the rest of their row
        self._piece: list[Tensor] = []  # copies of elements that wait for the rest of their piece

    def add(self, part: Tensor) -> None:
        """Takes the next elements (1-D), which may change afterwards. Threads share a row that comes as a whole."""
        waiting = sum(each.numel() for each in self._piece)
        while part.numel():
            row = min(SQUARES_ROW, self._left)
            whole = not (waiting or self._sums) and part.numel() >= row
            size = row if whole else min(SQUARES_PIECE, self._left)
            taken, part = part[: size - waiting], part[size - waiting :]
            if waiting + taken.numel() < size:
                self._piece.append(taken.clone())
                return
            piece = torch.cat([*self._piece, taken]) if self._piece else taken
            (self._rows if whole else self._sums).append(sum_of_squares(piece))
            self._left, self._piece, waiting = self._left - size, [], 0
            if len(self._sums) == ROWS:
                self._rows.append(_add_up(self._sums))
                self._sums = []

    def total(self) -> float:
        """The sum; all elements must have been added."""
        assert not self._left, f"{self._left} elements have not been added"
        return _add_up([*self._rows, _add_up(self._sums)])  # to add zero changes no bit


def add_(total: Tensor, values: Tensor, *, isa: str | None = None, threads: int | None = None) -> None:
    """Adds ``values`` to ``total`` in place, with the bits of torch's ``add_``.

    Torch first converts 16-bit values to a tensor of their own, whose fresh memory the system must provide: this takes
    one pass over the two.

    Args:
        total: [n] fp32.
        values: [n] fp32, bf16 or fp16; not modified.
        isa: one of `supported_isas` instead of the chosen one, for tests and benchmarks.
        threads: maximum number of threads instead of `get_num_threads`; >= 1.

    Raises:
        TypeError, ValueError: see `adamw_`.
    """
    check_disjoint([span("total", total, FP32, None), span("values", values, ANY, total.numel())])
    _C.add(
        isa=chosen_isa() if isa is None else isa,
        total=total.data_ptr(),
        values=values.data_ptr(),
        dtype=DTYPES[values.dtype],
        count=total.numel(),
        threads=get_num_threads() if threads is None else positive("threads", threads),
    )


def accumulate_(total: Tensor, values: Tensor) -> None:
    """Adds ``values`` to ``total`` in place: by `add_` where it applies, otherwise by torch, which has the same bits.

    Args:
        total: any shape, dtype and device.
        values: the same shape; any dtype that torch adds to that of ``total``.
    """
    applies = total.dtype in FP32 and values.dtype in ANY and runs_on(total.device) and runs_on(values.device)
    if applies and total.is_contiguous() and values.is_contiguous() and not values.is_neg():
        add_(total.view(-1), values.view(-1))
    else:
        total.add_(values)


def sum_(
    total: Tensor,
    parts: Sequence[Tensor],
    factor: float = 1.0,
    *,
    add: bool = False,
    isa: str | None = None,
    threads: int | None = None,
) -> None:
    """Sums ``parts`` times ``factor`` in their order into ``total``, in one pass over memory.

    Products are rounded to the dtype of the parts, as torch does. Sums are computed in fp32 and converted to the
    parts' dtype once, with torch's rounding.

    Args:
        total: [n] fp32 or, unless ``add``, of the parts' dtype, written. Then it may be one of the parts.
        parts: at least one tensor of [n], all fp32, bf16 or fp16; not modified, unless one of them is ``total``.
        factor: rounded to fp32.
        add: add the sum, converted to the parts' dtype, to ``total``.
        isa: one of `supported_isas` instead of the chosen one, for tests and benchmarks.
        threads: maximum number of threads instead of `get_num_threads`; >= 1.

    Raises:
        TypeError, ValueError: see `adamw_`; or there are no parts.
    """
    if not parts:
        raise ValueError("there are no parts to sum; expected at least one tensor")
    result = span("total", total, FP32 if add else ANY, None)
    allowed = ANY if total.dtype in FP32 else (total.dtype,)
    for index, part in enumerate(parts):
        one = span(f"parts[{index}]", part, allowed, total.numel())
        allowed = (part.dtype,)
        if add or part.dtype != total.dtype or one[:2] != result[:2]:
            check_disjoint([result, one])
    _C.sum_parts(
        isa=chosen_isa() if isa is None else isa,
        total=total.data_ptr(),
        total_dtype=DTYPES[total.dtype],
        add=add,
        parts=[part.data_ptr() for part in parts],
        factor=factor,
        dtype=DTYPES[parts[0].dtype],
        count=total.numel(),
        threads=get_num_threads() if threads is None else positive("threads", threads),
    )


def sum_in_order_(total: Tensor, parts: Sequence[Tensor], factor: float = 1.0, add: bool = False) -> None:
    """Sums ``parts`` times ``factor`` in their order into ``total``: by `sum_` where it applies, otherwise by torch.

    Args:
        total: [n], of any dtype that torch adds and on any device, contiguous; it may be one of the parts.
        parts: at least one tensor of [n] on the same device, all of one dtype.
        factor: 1 for integers.
        add: add the sum to ``total``, which is none of the parts.
    """
    dtype = parts[0].dtype
    if dtype in ANY and total.dtype in (FP32 if add else (*FP32, dtype)) and runs_on(total.device):
        sum_(total, parts, factor, add=add)
        return
    found = torch.empty_like(total, dtype=torch.float32 if dtype in HALF else dtype)
    for index, part in enumerate(parts):
        product = part if factor == 1 else part * factor
        found.add_(product) if index else found.copy_(product)
    found = found.to(dtype)
    total.add_(found) if add else total.copy_(found)


def sums_in_place(dtype: torch.dtype) -> bool:
    """Whether `sum_in_order_` of parts of ``dtype`` needs no memory of its own on the CPU.

    The total must have the same dtype, without ``add``, or be fp32. Otherwise twice the memory of the parts is needed.
    """
    return dtype in ANY


def split_(
    whole: Tensor, high: Tensor, remainder: Tensor, *, isa: str | None = None, threads: int | None = None
) -> None:
    """Splits each fp32 number into a 16-bit number and a 16-bit remainder.

    `high` can be the model's 16-bit parameter, so that a master takes only two more bytes per element.

    - bf16: `high` is the nearest bf16 number, `remainder` the distance in units of the last fp32 bit. `join_` restores
      every number except NaN bit for bit. Halfway between two bf16 numbers, `high` is the one away from zero, since
      with ties to even an even number would need 2^16 + 1 different distances.
    - fp16: `high` is the nearest fp16 number (ties to even), `remainder` the distance in units of
      2^(max(e, -14) - 25), where e is the exponent of `high`. This is exact for 2^-16 <= |x| < 65520 and for zeros,
      and within 2^-40 for smaller numbers. From 65520 on `high` is infinite, and so is the result of `join_`.

    Args:
        whole: [n] fp32; not modified.
        high: [n] bf16 or fp16, written.
        remainder: [n] int16, written.
        isa: one of `supported_isas` instead of the chosen one, for tests and benchmarks.
        threads: maximum number of threads instead of `get_num_threads`; >= 1.

    Raises:
        TypeError, ValueError: see `adamw_`.
    """
    _C.split(**_split_arguments(whole, high, remainder, isa, threads))


def join_(
    whole: Tensor, high: Tensor, remainder: Tensor, *, isa: str | None = None, threads: int | None = None
) -> None:
    """Restores `whole` from `high` and `remainder`, the inverse of `split_`; same arguments and errors."""
    _C.join(**_split_arguments(whole, high, remainder, isa, threads))


def zero_(tensor: Tensor) -> None:
    """Fills a contiguous host tensor with zeros, each part by the thread that processes it in the kernels.

    By the first-touch rule, fresh memory is then placed near that thread, and its pages are allocated in parallel.

    Raises:
        ValueError: the tensor is not contiguous, not on the CPU, or its storage is too small.
    """
    if not runs_on(tensor.device) or not tensor.is_contiguous():
        raise ValueError(
            f"the tensor is on device {tensor.device} with strides {tensor.stride()}; expected a contiguous one on cpu"
        )
    check_allocated("the tensor", tensor)
    _C.fill_with_zeros(memory=tensor.data_ptr(), nbytes=tensor.nbytes, threads=get_num_threads())


def _split_arguments(
    whole: Tensor, high: Tensor, remainder: Tensor, isa: str | None, threads: int | None
) -> dict[str, Any]:
    spans = [span("whole", whole, FP32, None)]
    count = whole.numel()
    spans += [
        span("high", high, HALF, count),
        span("remainder", remainder, (torch.int16,), count),
    ]
    check_disjoint(spans)
    return {
        "isa": chosen_isa() if isa is None else isa,
        "whole": whole.data_ptr(),
        "high": high.data_ptr(),
        "dtype": DTYPES[high.dtype],
        "remainder": remainder.data_ptr(),
        "count": count,
        "threads": get_num_threads() if threads is None else positive("threads", threads),
    }
