"""The interface of a store: the memory in which long-lived tensors rest."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lightning_zero.storage.rested import Memory, Rested


class TensorStore(Protocol):
    """Makes the long-lived tensors of a bucket: master, optimizer state, sharded gradient, parameter shard.

    Attributes:
        device: the device on which its tensors are computed with.
        exact: whether a tensor takes exactly the bytes of its elements. Then it is worth while to move a tensor that
            someone else has allocated into the store.
        memory: the memory of tensors of :meth:`zeros`, and of fetched parts of those of :meth:`rest`.
        resting_memory: the memory in which tensors of :meth:`rest` rest.
        tile: see :class:`~lightning_zero.storage.rested.Rested`.
        passing_bytes: the host memory that tiles may take; 0 where there are no tiles.
        as_on_host: whether computing with its tensors gives the bits of the host's kernels.
        pins: whether host memory that copies to or from the device use directly ("it crosses") is pinned.
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
        """Make a 1-D tensor of ``numel`` zeros; its memory is freed with it. For ``crosses`` see ``pins``."""
        ...

    def close(self) -> None:
        """Remove what the store has outside of memory. Its tensors must not be used any more."""
        ...

    def rest(self, numel: int, dtype: torch.dtype, what: str, *, crosses: bool = False, apart: bool = False) -> Rested:
        """Make a 1-D tensor of zeros that is worked on range by range, such as optimizer state.

        Args:
            numel: number of elements.
            dtype: of the elements.
            what: a name for messages.
            crosses: see ``pins``; state seldom does.
            apart: whether it is always worked on as a whole. Where it rests outside of memory, it is then fetched to
                memory of its own, which does not count as ``passing_bytes``.
        """
        ...
