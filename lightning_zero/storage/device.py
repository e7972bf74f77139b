"""Tensors on the training device, from torch's own allocator."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.storage.rested import Memory, Resident


class DeviceStore:
    """State rests where the model computes."""

    exact = False
    memory: Memory = "device"
    resting_memory: Memory = "device"
    tile: int | None = None
    passing_bytes = 0
    as_on_host = False
    pins = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, numel: int, dtype: torch.dtype, *, crosses: bool = True) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def close(self) -> None:
        """Nothing outside of memory."""

    def rest(self, numel: int, dtype: torch.dtype, what: str, *, crosses: bool = False) -> Resident:
        return Resident(self.zeros(numel, dtype), self.memory)


class ResidentStore(DeviceStore):
    """State of some buckets rests where the model computes, while that of others rests elsewhere.

    Which of them they are changes no bit.
    """

    as_on_host = True
