"""Where bytes rest, and how they move: stores on the device and on the host, executors, and a step's timers.

What depends on the type of the device is in :mod:`lightning_zero.storage.accelerators`.
"""

from lightning_zero.storage.accelerators import (
    OUT_OF_MEMORY,
    DeviceType,
    RandomState,
    device_type,
    register_device_type,
)
from lightning_zero.storage.device import DeviceStore
from lightning_zero.storage.executor import DONE, Executor, InlineExecutor, Lane, Ticket
from lightning_zero.storage.host import HostStore, note_freed
from lightning_zero.storage.store import Memory, TensorStore
from lightning_zero.storage.streams import StreamExecutor, make_executor
from lightning_zero.storage.timers import Phase, Timers, timed

__all__ = [
    "DONE",
    "OUT_OF_MEMORY",
    "DeviceStore",
    "DeviceType",
    "Executor",
    "HostStore",
    "InlineExecutor",
    "Lane",
    "Memory",
    "Phase",
    "RandomState",
    "StreamExecutor",
    "TensorStore",
    "Ticket",
    "Timers",
    "device_type",
    "make_executor",
    "note_freed",
    "register_device_type",
    "timed",
]
