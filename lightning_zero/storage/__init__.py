"""Memories and movements of tensors: stores on the device, in host memory and on a disk, executors, and timers.

Everything that depends on the type of the device is in :mod:`lightning_zero.storage.accelerators`.
"""

from lightning_zero.storage.accelerators import (
    OUT_OF_MEMORY,
    DeviceType,
    RandomState,
    device_type,
    register_device_type,
)
from lightning_zero.storage.device import DeviceStore, ResidentStore
from lightning_zero.storage.disk_file import DiskError
from lightning_zero.storage.executor import DONE, Executor, InlineExecutor, Lane, Ticket
from lightning_zero.storage.host import HostStore, note_freed, reuse_freed_memory, temporary_zeros, use_huge_pages
from lightning_zero.storage.nvme import DiskStore
from lightning_zero.storage.rested import Memory, Rested
from lightning_zero.storage.store import TensorStore
from lightning_zero.storage.streams import StreamExecutor, make_executor
from lightning_zero.storage.threads import ThreadExecutor
from lightning_zero.storage.timers import Phase, Timers, timed
from lightning_zero.storage.work_log import WORK_LOG, Span

__all__ = [
    "DONE",
    "OUT_OF_MEMORY",
    "WORK_LOG",
    "DeviceStore",
    "DeviceType",
    "DiskError",
    "DiskStore",
    "Executor",
    "HostStore",
    "InlineExecutor",
    "Lane",
    "Memory",
    "Phase",
    "RandomState",
    "ResidentStore",
    "Rested",
    "Span",
    "StreamExecutor",
    "TensorStore",
    "ThreadExecutor",
    "Ticket",
    "Timers",
    "device_type",
    "make_executor",
    "note_freed",
    "register_device_type",
    "reuse_freed_memory",
    "temporary_zeros",
    "timed",
    "use_huge_pages",
]
