"""Optimizer state in 8 bits per element, with a scale for every block of elements."""

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

    Elements with equal ``(index + i) // 256`` share a block, where ``index`` is that of the first element. A number is
    its code, a small float, times 2^(scale - 127):

    - signed: 1 bit of sign, 3 of exponent, 4 of significand, the companding law of ITU-T G.711 (A-law, 1972). Numbers
      down to 2^-6 times the scale, which is between 0.51 and 1.04 times the largest number of the block, have a
      relative error of at most 1/16 (1/32 where they are rounded to nearest); smaller ones have steps of 2^-10.
    - without a sign: 4 bits of exponent, 4 of significand; the same down to 2^-14, and in steps of 2^-18. What is not
      zero stays above it, so that it can be divided by.

    Scales are powers of two, as those of the Open Compute Project's "Microscaling formats (MX)" (2023): while they
    change, codes that fit keep their value, and what was stored is stored again without loss. Blocks of a few hundred
    elements: Dettmers et al., "8-bit optimizers via block-wise quantization" (2022). A block with a number that is not
    finite, or beyond 1.9375 x 2^127, is NaN throughout.

    Attributes:
        codes: [n] int8; the bits of the small floats.
        scales: [``count_blocks(index, n)``] uint8. Zeros, with zeros as codes, are zero.
    """

    codes: Tensor
    scales: Tensor


def count_blocks(index: int, numel: int) -> int:
    """The number of blocks that elements ``[index, index + numel)`` touch."""
    return -(-(index % BLOCK + numel) // BLOCK) if numel else 0


def spans_of(name: str, state: Quantized, count: int | None, index: int) -> list[Span]:
    """Checks an argument as :func:`lightning_zero.ops.arguments.span` does; returns the bytes of both tensors."""
    codes = span(f"{name}.codes", state.codes, (torch.int8,), count)
    scales = span(f"{name}.scales", state.scales, (torch.uint8,), None)
    expected = count_blocks(index, state.codes.numel())
    if state.scales.numel() != expected:
        raise ValueError(
            f"{name}.scales has {state.scales.numel()} elements; expected {expected}, the blocks that "
            f"{state.codes.numel()} elements from index {index} on touch"
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
    """Writes fp32 numbers to blocks, each rounded to the nearest (halfway away from zero).

    What :func:`dequantize_` gave is stored without loss.

    Args:
        whole: [n] fp32; not modified. Without ``signed`` the sign is lost.
        state: written.
        signed: which of the two formats; see :class:`Quantized`.
        index: of the first element, >= 0.
        isa: one of `supported_isas` instead of the chosen one, for tests and benchmarks.
        threads: at most so many instead of `get_num_threads`; >= 1.

    Raises:
        TypeError, ValueError: as `adamw_`.
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
    """Writes the numbers in blocks to ``whole``, exactly; arguments and errors as for :func:`quantize_`."""
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
