"""Optimizer state with 8 bits per element and one scale per block of elements."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.ops import _C
from lightning_zero.ops.arguments import FP32, Span, check_disjoint, span, unsigned
from lightning_zero.ops.isa import isa as chosen_isa
from lightning_zero.ops.threads import get_num_threads, positive

BLOCK = _C.block_length()


class Quantized(NamedTuple):
    """Numbers in 8 bits each, in blocks of 256.

    Elements i with equal ``(index + i) // 256`` share a block, where ``index`` is the index of the first element. A
    number is its code, a small float, times the scale of its block, 2^(scale - 127):

    - signed: 1 bit of sign, 3 of exponent, 4 of significand, the companding law of ITU-T G.711 (A-law, 1972). The scale
      is between 0.51 and 1.04 times the largest number of the block. Numbers down to 2^-6 times the scale have a
      relative error of at most 1/16 (1/32 if rounded to nearest); smaller numbers have steps of 2^-10 times the scale.
    - unsigned: 4 bits of exponent, 4 of significand. The same error holds down to 2^-14 times the scale; below, steps
      are 2^-18 times the scale. A number greater than zero is never stored as zero, so that it can be divided by.

    Scales are powers of two, as in the Open Compute Project's "Microscaling formats (MX)" (2023). So codes keep their
    exact values when a scale changes, as far as they fit, and stored numbers can be stored again without loss. Blocks
    of a few hundred elements are from Dettmers et al., "8-bit optimizers via block-wise quantization" (2022). If a
    number is not finite, or exceeds 1.9375 x 2^127 in magnitude, all numbers of its block become NaN.

    Attributes:
        codes: [n] int8; the bits of the small floats.
        scales: [``count_blocks(index, n)``] uint8. A scale of 0 with codes of 0 represents zeros.
    """

    codes: Tensor
    scales: Tensor


def count_blocks(index: int, numel: int) -> int:
    """The number of blocks that contain any of the elements ``[index, index + numel)``."""
    return -(-(index % BLOCK + numel) // BLOCK) if numel else 0


def spans_of(name: str, state: Quantized, count: int | None, index: int) -> list[Span]:
    """Checks an argument like :func:`lightning_zero.ops.arguments.span`; returns the byte ranges of both tensors."""
    codes = span(f"{name}.codes", state.codes, (torch.int8,), count)
    scales = span(f"{name}.scales", state.scales, (torch.uint8,), None)
    expected = count_blocks(index, state.codes.numel())
    if state.scales.numel() != expected:
        raise ValueError(
            f"{name}.scales has {state.scales.numel()} elements; expected {expected}, the number of blocks that "
            f"contain the {state.codes.numel()} elements from index {index} on"
        )
    return [codes, scales]


def quantize_(
    whole: Tensor,
    state: Quantized,
    *,
    signed: bool,
    index: int = 0,
    isa: str | None = None,
    threads: int | None = None,
) -> None:
    """Writes fp32 numbers to blocks, each rounded to nearest with ties away from zero.

    Results of :func:`dequantize_` are stored without loss.

    Args:
        whole: [n] fp32; not modified. Unless ``signed``, the sign is lost.
        state: written.
        signed: use the signed format; see :class:`Quantized`.
        index: index of the first element, >= 0.
        isa: one of `supported_isas` instead of the chosen one, for tests and benchmarks.
        threads: maximum number of threads instead of `get_num_threads`; >= 1.

    Raises:
        TypeError, ValueError: see `adamw_`.
    """
    _C.quantize(**_arguments(whole, state, signed, index, isa, threads))


def dequantize_(
    whole: Tensor,
    state: Quantized,
    *,
    signed: bool,
    index: int = 0,
    isa: str | None = None,
    threads: int | None = None,
) -> None:
    """Writes the exact values of the numbers in blocks to ``whole``; arguments and errors as for :func:`quantize_`."""
    _C.dequantize(**_arguments(whole, state, signed, index, isa, threads))


def _arguments(
    whole: Tensor, state: Quantized, signed: bool, index: int, isa: str | None, threads: int | None
) -> dict[str, Any]:
    index = unsigned("index", index)
    spans = [span("whole", whole, FP32, None), *spans_of("state", state, whole.numel(), index)]
    check_disjoint(spans)
    return {
        "isa": chosen_isa() if isa is None else isa,
        "whole": whole.data_ptr(),
        "codes": state.codes.data_ptr(),
        "scales": state.scales.data_ptr(),
        "is_signed": bool(signed),
        "lead": index % BLOCK,
        "count": whole.numel(),
        "threads": get_num_threads() if threads is None else positive("threads", threads),
    }
