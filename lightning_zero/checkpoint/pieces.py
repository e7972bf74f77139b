"""A tensor that lies in pieces of others, such as the shards that another program has written."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_zero.checkpoint.lazy import StoredTensor
from lightning_zero.engine.memory_format import MemoryFormat


@dataclass(frozen=True, eq=False)
class Pieces:
    """The source of one lazy tensor: its elements in order, in pieces.

    Attributes:
        key: tells it from all others in the checkpoint.
        pieces: 1-D, of any dtype.
        form: a contiguous tensor on the meta device with the shape and dtype of the whole.
    """

    key: Hashable
    pieces: Sequence[Tensor]
    form: Tensor
    live: ClassVar[bool] = False

    def tensor(self) -> StoredTensor:
        """The whole, not put together yet."""
        return StoredTensor(self, 0, self.form)

    def fetch(self, param: int) -> Tensor:
        """The whole, put together; contiguous, on the CPU."""
        whole = torch.empty(self.form.shape, dtype=self.form.dtype)
        self._read(0, whole.view(-1))
        return whole

    def read_run(self, param: int, form: MemoryFormat, start: int, into: Tensor) -> None:
        """See :class:`~lightning_zero.checkpoint.lazy.StoredSource`."""
        if form == MemoryFormat.of(self.form):
            self._read(start, into)
        else:
            form.read(self.fetch(param), start, into)

    def _read(self, start: int, into: Tensor) -> None:
        stop, offset = start + into.numel(), 0
        for piece in self.pieces:
            low, high = max(start, offset), min(stop, offset + piece.numel())
            if low < high:
                into[low - start : high - start].copy_(piece[low - offset : high - offset])
            offset += piece.numel()
