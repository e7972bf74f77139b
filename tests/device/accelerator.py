"""The simulated device as an accelerator of Lightning: `Trainer(accelerator="sim", devices=2)`, and `Fabric(...)`."""

from __future__ import annotations

from typing import Any

import torch
from device import sim
from lightning.fabric.accelerators import ACCELERATOR_REGISTRY as FABRIC_REGISTRY
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry

from lightning_zero.storage import accelerators, register_device_type


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


class SimDevices(accelerators.Accelerator):
    """The device type, as the package sees it: memory from elsewhere can be pinned."""

    can_pin = True

    def pin(self, address: int, nbytes: int) -> None:
        torch.get_device_module(sim.DEVICE).host_register(address, nbytes)

    def unpin(self, address: int) -> None:
        torch.get_device_module(sim.DEVICE).host_unregister(address)


def register() -> None:
    """Lets Trainer, Fabric and the package know it, once per process."""
    register_device_type(sim.DEVICE, SimDevices(sim.DEVICE))
    for registry in (AcceleratorRegistry, FABRIC_REGISTRY):
        if sim.DEVICE not in registry:
            registry.register(sim.DEVICE, SimAccelerator)
