"""Amounts of memory on the device, on the host and on a disk, and an account of them during a planned step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lightning_zero.storage import Memory, TensorStore
from lightning_zero.update.footprint import Footprint


@dataclass(frozen=True)
class Bytes:
    """An amount of memory on the device, on the host and on a disk.

    Attributes:
        device: bytes on the device.
        host: bytes of host memory.
        disk: bytes of files.
        pinned: the part of ``host`` that is pinned, in bytes.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    pinned: int = 0

    @classmethod
    def of(cls, memory: Memory, nbytes: int, pinned: bool = False) -> Bytes:
        """``nbytes`` in one of the memories; ``pinned`` applies to host memory only."""
        return cls.on_host(nbytes, pinned) if memory == "host" else cls(**{memory: nbytes})

    @classmethod
    def on_host(cls, nbytes: int, pinned: bool) -> Bytes:
        """``nbytes`` of host memory."""
        return cls(host=nbytes, pinned=nbytes if pinned else 0)

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(
            self.device + other.device, self.host + other.host, self.disk + other.disk, self.pinned + other.pinned
        )

    def __sub__(self, other: Bytes) -> Bytes:
        return Bytes(
            self.device - other.device, self.host - other.host, self.disk - other.disk, self.pinned - other.pinned
        )

    @property
    def total(self) -> int:
        """The sum over device and host."""
        return self.device + self.host


NOTHING = Bytes()


def state_of(store: TensorStore, footprint: Footprint, shard_numel: int) -> Bytes:
    """The memory of the state that an optimizer keeps for a shard.

    Args:
        store: the store of optimizer state.
        footprint: the footprint of the optimizer.
        shard_numel: number of elements of the shard.
    """
    resting = footprint.state_bytes(shard_numel) - footprint.scales
    return Bytes.of(store.resting_memory, resting) + Bytes.of(store.memory, footprint.scales)


class Peak(NamedTuple):
    """The most that is taken at any moment of a step.

    Attributes:
        device: on the device.
        host: on the host.
        total: of device and host together, which is less than their sum if they peak at different moments.
        pinned: of pinned host memory.
    """

    device: int
    host: int
    total: int
    pinned: int = 0


class Account:
    """Counts memory that is taken and given back, and its peak.

    Attributes:
        now: the memory that is taken at present.
        peak: the most so far.
    """

    def __init__(self) -> None:
        self.now = NOTHING
        self.peak = Peak(0, 0, 0)

    def take(self, amount: Bytes) -> Bytes:
        """Adds ``amount`` and returns it, so that the caller can give it back later."""
        self.now += amount
        self.touch(NOTHING)
        return amount

    def give(self, amount: Bytes) -> None:
        """Subtracts ``amount``."""
        self.now -= amount

    def touch(self, amount: Bytes) -> None:
        """Takes ``amount`` and gives it back at once."""
        most = self.now + amount
        self.peak = Peak(*map(max, self.peak, (most.device, most.host, most.total, most.pinned)))
