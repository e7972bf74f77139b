"""The interface of a store."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

Memory = Literal["device", "host"]


class TensorStore(Protocol):
    """Gives out the long-lived tensors of a bucket: master, optimizer state, sharded gradient, parameter shard.

    Attributes:
        device: where the tensors that it gives out can be computed on.
        exact: whether memory taken equals memory asked for, so that a tensor that someone else allocated is worth
            moving into the store.
        memory: which memory they take.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def exact(self) -> bool: ...

    @property
    def memory(self) -> Memory: ...

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A new 1-D tensor of ``numel`` zeros, alive as long as something refers to it."""
        ...
