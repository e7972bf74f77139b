"""The order of a parameter's elements in a flat buffer: the one in which they lay in memory before.

A convolution with ``channels_last`` weights or a transposed matrix then computes with the strides it was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class ReadableInSlices(Protocol):
    """A tensor whose values are somewhere else, such as in a file, where a part can be read without the rest."""

    def read_slice(self, form: MemoryFormat, start: int, into: Tensor) -> None:
        """Fill ``into`` as :meth:`MemoryFormat.read` does; ``form`` has the tensor's shape."""
        ...


@dataclass(frozen=True)
class MemoryFormat:
    """Shape and strides of a tensor that fills its memory."""

    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> MemoryFormat:
        """The format of a copy of ``tensor``: its own strides if it is dense, similar ones if expanded or cut out."""
        return cls(tensor.shape, torch.empty_like(tensor, device="meta").stride())

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The dimensions, that of the longest stride first."""
        return tuple(sorted(range(len(self.shape)), key=lambda dim: -self.strides[dim]))

    def view(self, flat: Tensor) -> Tensor:
        """``flat`` (1-D) as a tensor of this format, sharing memory."""
        return flat.as_strided(self.shape, self.strides)

    def flatten(self, tensor: Tensor) -> Tensor:
        """The elements of ``tensor`` as this format orders them, 1-D; one of another shape is taken as it is."""
        if tensor.shape == self.shape:
            tensor = tensor.permute(self.order)
        return tensor.reshape(-1)

    def read(self, tensor: Tensor, start: int, into: Tensor) -> None:
        """Fill ``into`` (1-D) with the elements of :meth:`flatten` from ``start`` on; of a file no others are read."""
        if isinstance(tensor, ReadableInSlices) and tensor.shape == self.shape:
            tensor.read_slice(self, start, into)
        else:
            into.copy_(self.flatten(tensor)[start : start + into.numel()].detach())
