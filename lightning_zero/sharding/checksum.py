"""A checksum of tensors, computed on their device."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def checksum(values: Tensor) -> Tensor:
    """The sum of the bits of a 1-D tensor, read as 64-bit integers and wrapping around: 0-dim int64, on its device.

    The unaligned elements before the first and after the last aligned 64-bit word are read as integers of their size.
    """
    # Summing words of eight bytes is several times as fast as summing elements.
    width = 8 // values.itemsize
    start = min(-values.storage_offset() % width, values.numel())
    stop = start + (values.numel() - start) // width * width
    total = torch.cat([values[:start], values[stop:]]).view(_INTEGERS[values.itemsize]).sum()
    return total + values[start:stop].view(torch.int64).sum() if stop > start else total
