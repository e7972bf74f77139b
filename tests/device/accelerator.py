"""The simulated device as an accelerator of Lightning: `Trainer(accelerator="sim", devices=2)`."""

from __future__ import annotations

from typing import Any

import torch
from device import sim
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry


class SimAccelerator(Accelerator):
    """Each process takes the device of its local rank."""

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device.index or 0)

    def teardown(self) -> None:
        torch.accelerator.empty_cache()

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return dict(torch.accelerator.memory_stats(device))

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(sim.DEVICE, index) for index in range(int(devices))]

    @staticmethod
    def get_device_type() -> str:
        return sim.DEVICE

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return sim.DEVICE


def register() -> None:
    """Lets Lightning know it by name, once per process."""
    if sim.DEVICE not in AcceleratorRegistry:
        AcceleratorRegistry.register(sim.DEVICE, SimAccelerator)
