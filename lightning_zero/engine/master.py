"""Masters: the full-precision values of a shard, behind one interface.

Updaters read and write a shard's values through a master and never touch its tensors otherwise, so that a layout
(none, an fp32 copy, later a split one) is one object.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lightning_zero.engine.stores import Store


class Master(Protocol):
    """Full-precision values of one shard.

    Attributes:
        dtype: dtype of the values.
        device: where they can be computed on.
        nbytes: memory held in addition to the parameter shard.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def nbytes(self) -> int: ...

    def read(self, start: int, stop: int) -> Tensor:
        """The values of elements ``[start, stop)`` of the shard (1-D), to be updated in place before :meth:`write`."""
        ...

    def write(self, start: int, stop: int) -> None:
        """Publish what was changed in the tensor that :meth:`read` gave: derive the parameter shard from it."""
        ...

    def copy_out(self, start: int, stop: int) -> Tensor | None:
        """Where an update on the host may write the parameter shard itself, instead of :meth:`write`; else ``None``."""
        ...

    def derive(self, start: int, stop: int) -> None:
        """Take over values that someone wrote into the parameter shard."""
        ...


class NoMaster:
    """The parameter shard is its own master: nothing is copied."""

    nbytes = 0

    def __init__(self, shard: Tensor) -> None:
        self._shard = shard  # 1-D, parameter dtype

    @property
    def dtype(self) -> torch.dtype:
        return self._shard.dtype

    @property
    def device(self) -> torch.device:
        return self._shard.device

    def read(self, start: int, stop: int) -> Tensor:
        return self._shard[start:stop]

    def write(self, start: int, stop: int) -> None:
        """Nothing to publish: the values were changed in place."""

    def copy_out(self, start: int, stop: int) -> Tensor | None:
        return None

    def derive(self, start: int, stop: int) -> None:
        """Nothing to take over: the values are the shard's."""


class CopyMaster:
    """Values in a tensor of their own: in another dtype, in another store, or both.

    Args:
        shard: the parameter shard, 1-D.
        values: the initial values, 1-D, at full precision (never the shard's rounded ones).
        store: where the master rests.
        dtype: dtype of the master.
    """

    def __init__(self, shard: Tensor, values: Tensor, store: Store, dtype: torch.dtype) -> None:
        self._shard = shard
        self._values = store.zeros(shard.numel(), dtype)  # 1-D
        self._values.copy_(values)

    @property
    def dtype(self) -> torch.dtype:
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        return self._values.device

    @property
    def nbytes(self) -> int:
        return self._values.nbytes

    def read(self, start: int, stop: int) -> Tensor:
        return self._values[start:stop]

    def write(self, start: int, stop: int) -> None:
        self._shard[start:stop].copy_(self._values[start:stop])

    def copy_out(self, start: int, stop: int) -> Tensor | None:
        same_place = self._shard.device.type == "cpu" and self._values.device.type == "cpu"
        return self._shard[start:stop] if same_place and self._shard.dtype.itemsize == 2 else None

    def derive(self, start: int, stop: int) -> None:
        # Only what changed: a master holds more digits than the shard.
        master, shard = self._values[start:stop], self._shard[start:stop]
        values = shard.to(master)
        torch.where(master.to(shard.dtype) == values.to(shard.dtype), master, values, out=master)
