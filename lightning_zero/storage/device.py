"""Tensors on the training device, from torch's own allocator."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.storage.store import Memory


class DeviceStore:
    """State rests where the model computes."""

    exact = False
    memory: Memory = "device"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)
