"""Optimizer state in compact form as fp32 tensors, which are decoded when they are read, a tile at a time."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.lazy import StoredTensor
from lightning_zero.sharding.memory_format import MemoryFormat
from lightning_zero.update import Blocks, decoded


@dataclass(frozen=True, eq=False)
class Decoded:
    """Codes and scales of a checkpoint: the source of one lazy tensor, fp32.

    Attributes:
        blocks: how they lie.
        codes: [n] int8.
        scales: [one for a block] uint8.
    """

    blocks: Blocks
    codes: Tensor
    scales: Tensor
    live = False

    @property
    def key(self) -> Hashable:
        return self

    def fetch(self, param: int) -> Tensor:
        return self.blocks.full(self.codes, self.scales)

    def read_slice(self, param: int, form: MemoryFormat, start: int, into: Tensor) -> None:
        """See :class:`~lightning_zero.checkpoint.lazy.StoredSource`."""
        self.blocks.decode(self.codes, self.scales, form, start, into)


def decoded_lazily(tree: Any) -> Any:
    """See :func:`lightning_zero.update.decoded`; tensors in compact form become lazy ones."""
    return decoded(tree, _lazy)


def _lazy(blocks: Blocks, codes: Tensor, scales: Tensor) -> StoredTensor:
    form = blocks.form
    like = torch.empty_strided(form.shape, form.strides, dtype=torch.float32, device="meta")
    return StoredTensor(Decoded(blocks, codes, scales), 0, like)
