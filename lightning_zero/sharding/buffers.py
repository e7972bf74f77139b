"""A module's buffers, which no rank shards: all have rank 0's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_zero.sharding.collectives import Group
from lightning_zero.sharding.placement import BucketPlacement
from lightning_zero.torch_private import has_own_apply


def convert_buffers(root: nn.Module, placement: BucketPlacement) -> None:
    """Move buffers to the device, give them the dtype of the policy and rank 0's values. Collective."""
    converted: dict[int, Tensor] = {}  # a buffer may be registered twice
    for module in root.modules():
        if has_own_apply(module) and next(module.parameters(), None) is None:
            module.to(placement.device)  # state that is neither parameter nor buffer, as torchmetrics has
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) not in converted:
                dtype = placement.precision.buffer_dtype(buffer.dtype)
                # Contiguous: an expanded buffer cannot be written to.
                strided = buffer.layout is torch.strided
                moved = buffer.to(placement.device, dtype)
                converted[id(buffer)] = moved.contiguous() if strided else moved
            setattr(module, name, converted[id(buffer)])
    broadcast_buffers(root, placement.mesh.world)


def broadcast_buffers(root: nn.Module, world: Group) -> None:
    """Give every rank rank 0's buffers. Collective."""
    for buffer in {id(b): b for b in root.buffers()}.values():
        if buffer.layout is torch.strided:
            data = world.broadcast_(buffer.detach().contiguous(), "broadcast a buffer")
            if data.data_ptr() != buffer.data_ptr():
                buffer.detach().copy_(data)
