"""Tensors on the training device, from torch's own allocator."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.storage.rested import Memory, Resident


class DeviceStore:
    """Rests tensors on the device that trains."""

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
        """Do nothing: there is nothing outside of memory."""

    def rest(
        self, numel: int, dtype: torch.dtype, what: str, *, crosses: bool = False, apart: bool = False
    ) -> Resident:
        return Resident(self.zeros(numel, dtype), self.memory)


class ResidentStore(DeviceStore):
    """Rests state of some buckets on the device that trains, while that of the others is offloaded.

    Its updates have the bits of the host's kernels, so that no result depends on which buckets are offloaded.
    """

    as_on_host = True
