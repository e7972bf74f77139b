"""The order of a parameter's elements in a flat buffer, which is their order in the original memory.

So a convolution with ``channels_last`` weights, or a transposed matrix, keeps its strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class ReadableInSlices(Protocol):
    """A tensor whose values are elsewhere, such as in a file, and can be read in parts."""

    def read_slice(self, form: MemoryFormat, start: int, into: Tensor) -> None:
        """Fill ``into`` (1-D) as :meth:`MemoryFormat.read` does; ``form`` has the tensor's shape."""
        ...


@dataclass(frozen=True)
class MemoryFormat:
    """Shape and strides of a dense tensor."""

    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> MemoryFormat:
        """The format of a copy of ``tensor``: its strides if it is dense, otherwise dense strides of the same order."""
        return cls(tensor.shape, torch.empty_like(tensor, device="meta").stride())

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The dimensions in descending order of their strides."""
        return tuple(sorted(range(len(self.shape)), key=lambda dim: -self.strides[dim]))

    def view(self, flat: Tensor) -> Tensor:
        """``flat`` (1-D) as a tensor of this format, sharing memory."""
        return flat.as_strided(self.shape, self.strides)

    def flatten(self, tensor: Tensor) -> Tensor:
        """The elements of ``tensor`` in the order of this format, 1-D; a tensor of another shape is only flattened."""
        if tensor.shape == self.shape:
            tensor = tensor.permute(self.order)
        return tensor.reshape(-1)

    def read(self, tensor: Tensor, start: int, into: Tensor) -> None:
        """Fill ``into`` (1-D) with elements of :meth:`flatten` from ``start`` on; reads only these from a file."""
        if isinstance(tensor, ReadableInSlices) and tensor.shape == self.shape:
            tensor.read_slice(self, start, into)
        else:
            into.copy_(self.flatten(tensor)[start : start + into.numel()].detach())
