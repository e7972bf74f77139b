"""In which order the elements of a parameter lie in a flat buffer: the one in which they lay in memory before.

A convolution with ``channels_last`` weights or a transposed matrix then computes with the strides it was given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MemoryFormat:
    """Shape and strides of a tensor that fills its memory."""

    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> MemoryFormat:
        """What a copy of ``tensor`` has: its own strides if it is dense, similar ones if it is expanded or cut out."""
        return cls(tensor.shape, torch.empty_like(tensor, device="meta").stride())

    def view(self, flat: Tensor) -> Tensor:
        """``flat`` (1-D) as a tensor of this format, sharing memory."""
        return flat.as_strided(self.shape, self.strides)

    def flatten(self, tensor: Tensor) -> Tensor:
        """The elements of ``tensor`` as this format orders them, 1-D; one of another shape is taken as it is."""
        if tensor.shape == self.shape:
            tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -self.strides[dim]))
        return tensor.reshape(-1)
