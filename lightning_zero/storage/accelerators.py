"""Types of devices: one object per type, with what the package needs of it beside tensors, streams and collectives.

Torch offers most of that for all accelerators alike, and :class:`Accelerator` uses it. What only one type has, such as
pinning of memory that is mapped already, is in a class of that type. :func:`register_device_type` adds an object for a
type that torch calls ``PrivateUse1``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_zero.numa import pci_address_of


class Clock(Protocol):
    """Marks moments of a device's work, and measures the time between two of them."""

    def now(self) -> Any:
        """A mark of this moment."""

    def reached(self, mark: Any) -> bool:
        """Whether :meth:`between` can be asked about ``mark`` without waiting."""

    def between(self, start: Any, end: Any) -> float:
        """The seconds between two marks; it waits until both are reached."""


class RandomState(NamedTuple):
    """Functions that read, set and seed a generator. Its state is a 1-D tensor on the CPU."""

    get: Callable[[], Tensor]
    set: Callable[[Tensor], object]
    seed: Callable[[int], object]


class DeviceType(Protocol):
    """The devices of one type.

    Attributes:
        shares_host_memory: whether their tensors are in host memory; they have no memory of their own then.
        can_pin: whether :meth:`pin` works.
    """

    @property
    def shares_host_memory(self) -> bool: ...

    @property
    def can_pin(self) -> bool: ...

    def pin(self, address: int, nbytes: int) -> None:
        """Lock pages of host memory, so that devices can copy to and from them asynchronously and at full speed.

        Raises:
            RuntimeError: the system refuses.
        """
        ...

    def unpin(self, address: int) -> None:
        """Undo :meth:`pin`. All copies to and from there must have ended."""
        ...

    def synchronize(self, device: torch.device) -> None:
        """Wait until a device has done all work that was submitted to it."""
        ...

    def send(self, values: Tensor, device: torch.device) -> Tensor:
        """Copy a few ``values``, which the host has just made, to a device, if possible without waiting for it."""
        ...

    def clock(self, device: torch.device) -> Clock:
        """A clock of the computations on a device."""
        ...

    def random_state(self, device: torch.device) -> RandomState | None:
        """The default generator of a device; ``None``: it uses torch's generator of the CPU."""
        ...

    def name(self, device: torch.device) -> str:
        """The vendor's name of a device's model; where it is not known, the type."""
        ...

    def pci_address(self, device: torch.device) -> str | None:
        """The PCI address of a device, such as "0000:3b:00.0"; ``None``: it is not known."""
        ...

    def peak_bytes(self, device: torch.device) -> int | None:
        """The most bytes that torch's tensors took on a device so far; ``None``: torch does not count them."""
        ...

    def total_bytes(self, device: torch.device) -> int | None:
        """The bytes of a device's memory; ``None``: it is the host's, or is not known."""
        ...

    def used_bytes(self, device: torch.device) -> int:
        """The bytes that torch's tensors take on a device now; 0 where they are in host memory."""
        ...


class _HostClock:
    def now(self) -> float:
        return time.perf_counter()

    def reached(self, mark: float) -> bool:
        return True

    def between(self, start: float, end: float) -> float:
        return end - start


class _EventClock:
    """Events on the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def reached(self, mark: torch.Event) -> bool:
        return bool(mark.query())

    def between(self, start: torch.Event, end: torch.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000.0


class Cpu:
    """The host's processors."""

    shares_host_memory = True
    can_pin = False

    def pin(self, address: int, nbytes: int) -> None:
        raise NotImplementedError("the host's own processors copy nothing asynchronously")

    def unpin(self, address: int) -> None:
        raise NotImplementedError("the host's own processors copy nothing asynchronously")

    def synchronize(self, device: torch.device) -> None:
        """Does nothing: there is nothing to wait for."""

    def send(self, values: Tensor, device: torch.device) -> Tensor:
        return values.to(device)

    def clock(self, device: torch.device) -> Clock:
        return _HostClock()

    def random_state(self, device: torch.device) -> RandomState | None:
        return None

    def name(self, device: torch.device) -> str:
        return "cpu"

    def pci_address(self, device: torch.device) -> str | None:
        return None

    def peak_bytes(self, device: torch.device) -> int | None:
        return None

    def total_bytes(self, device: torch.device) -> int | None:
        return None

    def used_bytes(self, device: torch.device) -> int:
        return 0


class Accelerator:
    """Accelerators of any type, by what torch offers for all of them.

    Torch may have an allocator of pinned memory for the type, but it has no function that pins other memory.

    Args:
        name: torch's name of the type.
    """

    shares_host_memory = False
    can_pin = False

    def __init__(self, name: str) -> None:
        self._name = name

    def pin(self, address: int, nbytes: int) -> None:
        raise NotImplementedError(f"torch pins no memory for {self._name} but its own")

    def unpin(self, address: int) -> None:
        raise NotImplementedError(f"torch pins no memory for {self._name} but its own")

    def synchronize(self, device: torch.device) -> None:
        torch.accelerator.synchronize(device)

    def send(self, values: Tensor, device: torch.device) -> Tensor:
        if values.device.type != "cpu":
            return values.to(device)
        # Torch's allocator uses pinned memory again only when copies from it have ended.
        return (values.pin_memory() if self._allocates_pinned else values).to(device, non_blocking=True)

    @cached_property
    def _allocates_pinned(self) -> bool:
        """Whether torch can allocate pinned memory for this type, which it only shows when it is tried."""
        try:
            return torch.empty(1, dtype=torch.uint8, pin_memory=True, device="cpu").is_pinned()
        except RuntimeError:
            return False

    def clock(self, device: torch.device) -> Clock:
        return _EventClock(device)

    def random_state(self, device: torch.device) -> RandomState | None:
        module, device = torch.get_device_module(device), _with_index(device)

        def seed(number: int) -> None:
            with torch.accelerator.device_index(device.index):
                module.manual_seed(number)

        return RandomState(partial(module.get_rng_state, device), partial(module.set_rng_state, device=device), seed)

    def name(self, device: torch.device) -> str:
        ask = getattr(torch.get_device_module(device), "get_device_name", None)  # not every backend has it
        return device.type if ask is None else str(ask(device))

    def pci_address(self, device: torch.device) -> str | None:
        return None

    def peak_bytes(self, device: torch.device) -> int | None:
        return torch.accelerator.max_memory_allocated(device)

    def total_bytes(self, device: torch.device) -> int | None:
        try:
            return torch.accelerator.get_memory_info(device)[1]
        except RuntimeError:  # of a backend that cannot tell
            return None

    def used_bytes(self, device: torch.device) -> int:
        return torch.accelerator.memory_allocated(device)


class Cuda(Accelerator):
    """NVIDIA's GPUs, and AMD's, for which torch has the same names."""

    can_pin = True

    def pin(self, address: int, nbytes: int) -> None:
        self._check(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0), f"pin {nbytes} bytes of host memory")

    def pci_address(self, device: torch.device) -> str | None:
        return pci_address_of(torch.cuda.get_device_properties(device))

    def unpin(self, address: int) -> None:
        self._check(torch.cuda.cudart().cudaHostUnregister(address), "unpin host memory")

    def _check(self, result: Any, action: str) -> None:
        if int(result) == 0:
            return
        # The runtime keeps the error, and torch would raise it after the next kernel, which has nothing to do with it.
        # Of torch's functions only a check after a kernel takes it away.
        with suppress(RuntimeError):
            torch.ones(1, dtype=torch.uint8, device=self._name)
        raise RuntimeError(f"CUDA could not {action}: {torch.cuda.CudaError(int(result))}")


class Imagined(Accelerator):
    """Stands for an accelerator in plans, where there is none: memory that would be pinned for it is only counted."""

    can_pin = True

    def pin(self, address: int, nbytes: int) -> None:
        """Does nothing: no copy goes to or from there."""

    def unpin(self, address: int) -> None:
        """Does nothing: no memory was pinned."""


def _with_index(device: torch.device) -> torch.device:
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return torch.device(device.type, index)


# Words of runtimes' errors when device memory or pinned memory has run out. Torch's allocator has an error type for it.
OUT_OF_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_TYPES: dict[str, DeviceType] = {"cpu": Cpu(), "cuda": Cuda("cuda"), "meta": Imagined("meta")}


def device_type(device: torch.device) -> DeviceType:
    """The type of a device."""
    return _TYPES.setdefault(device.type, Accelerator(device.type))


def register_device_type(name: str, made: DeviceType) -> None:
    """Set the object for a type, such as one that this package does not know.

    Args:
        name: torch's name of the type, such as the one given to ``torch.utils.rename_privateuse1_backend``.
        made: the object.
    """
    _TYPES[name] = made
