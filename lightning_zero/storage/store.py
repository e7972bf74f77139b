"""The interface of a store."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lightning_zero.storage.rested import Memory, Rested


class TensorStore(Protocol):
    """Gives out the long-lived tensors of a bucket: master, optimizer state, sharded gradient, parameter shard.

    Attributes:
        device: where the tensors that it gives out can be computed on.
        exact: whether memory taken equals memory asked for, so that a tensor that someone else allocated is worth
            moving into the store.
        memory: which memory those of :meth:`zeros` take, and what is fetched of those of :meth:`rest`.
        resting_memory: where those of :meth:`rest` rest.
        tile: see :class:`~lightning_zero.storage.rested.Rested`.
        passing_bytes: of host memory through which tiles may pass; 0 where there are none.
        as_on_host: whether what is computed of its tensors has the bits that the kernels on the host give.
        pins: whether memory that crosses is pinned: that copies between it and the device read or write as it is.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def exact(self) -> bool: ...

    @property
    def memory(self) -> Memory: ...

    @property
    def resting_memory(self) -> Memory: ...

    @property
    def tile(self) -> int | None: ...

    @property
    def passing_bytes(self) -> int: ...

    @property
    def as_on_host(self) -> bool: ...

    @property
    def pins(self) -> bool: ...

    def zeros(self, numel: int, dtype: torch.dtype, *, crosses: bool = True) -> Tensor:
        """A new 1-D tensor of ``numel`` zeros, alive as long as something refers to it; see ``pins``."""
        ...

    def close(self) -> None:
        """Give back what the store has outside of memory; nothing that it gave out is used any more."""
        ...

    def rest(self, numel: int, dtype: torch.dtype, what: str, *, crosses: bool = False) -> Rested:
        """The same as one that is worked on range by range, where it rests: state, which seldom crosses.

        Args:
            numel: elements.
            dtype: of them.
            what: it is, for messages.
            crosses: see ``pins``.
        """
        ...
