"""Presents 8-bit optimizer state in compact form as lazy fp32 tensors, which are decoded tile by tile when read."""

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
    """The source of one lazy fp32 tensor, which is decoded from codes and scales in a checkpoint.

    Attributes:
        blocks: division of the elements into blocks.
        codes: [n] int8.
        scales: one per block, 1-D uint8.
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
    """Replace tensors in compact form by lazy fp32 tensors; see :func:`lightning_zero.update.decoded`."""
    return decoded(tree, _lazy)


def _lazy(blocks: Blocks, codes: Tensor, scales: Tensor) -> StoredTensor:
    form = blocks.form
    like = torch.empty_strided(form.shape, form.strides, dtype=torch.float32, device="meta")
    return StoredTensor(Decoded(blocks, codes, scales), 0, like)
