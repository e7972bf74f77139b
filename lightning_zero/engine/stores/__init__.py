"""Where shards and optimizer state rest between the passes that use them."""

from lightning_zero.engine.stores.device import DeviceStore
from lightning_zero.engine.stores.host import HostStore, note_freed
from lightning_zero.engine.stores.store import Memory, Store

__all__ = ["DeviceStore", "HostStore", "Memory", "Store", "note_freed"]
