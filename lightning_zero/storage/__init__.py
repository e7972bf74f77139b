"""Where bytes rest, and how they move: stores on the device and on the host, the executor, and a step's timers."""

from lightning_zero.storage.device import DeviceStore
from lightning_zero.storage.executor import DONE, Executor, InlineExecutor, Lane, Ticket
from lightning_zero.storage.host import HostStore, note_freed
from lightning_zero.storage.store import Memory, TensorStore
from lightning_zero.storage.timers import Phase, Timers, timed

__all__ = [
    "DONE",
    "DeviceStore",
    "Executor",
    "HostStore",
    "InlineExecutor",
    "Lane",
    "Memory",
    "Phase",
    "TensorStore",
    "Ticket",
    "Timers",
    "note_freed",
    "timed",
]
