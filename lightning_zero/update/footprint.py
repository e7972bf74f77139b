"""The memory that an updater needs for a bucket."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from lightning_zero.sharding import MasterForm


class Apart(NamedTuple):
    """Memory and copies of the part of a step that is computed on the device while masters rest on the host.

    Attributes:
        device: bytes of device memory that an update needs while it runs.
        staged: bytes of buffers in host memory that an update holds while it runs.
        moved: bytes that are copied to the device; as many are copied back.
    """

    device: int = 0
    staged: int = 0
    moved: int = 0


class Footprint(NamedTuple):
    """The memory that an updater needs for a bucket. Temporary memory is where the master is.

    Attributes:
        master: the form of the bucket's master, as the updater lays it out.
        state: dtypes of the per-element state after the first update, by name.
        gradients: temporary bytes of the scaled or converted gradients of a tile.
        passing: temporary bytes of the rule while it updates a tile.
        fresh: bytes of the new state that the optimizer makes for a tile at the first update. It is then copied to
            where state rests.
        one_tile: whether the whole shard is updated at once. Then these copies are the last memory that the first
            update allocates.
        staged: bytes of parameters that go through buffers in host memory on their way to the device.
        published: number of elements whose parameters go through a buffer together; ``None``: all.
        owned: bytes of state that the optimizer makes and keeps for each whole parameter.
        scales: bytes of the scales of 8-bit state, which stay in memory wherever the state rests.
        window: number of elements that are fetched at once from where state rests, if that is more than a tile.
        apart: memory and copies of what is computed on the device, if the master is not there.
    """

    master: MasterForm
    state: Mapping[str, torch.dtype]
    gradients: int = 0
    passing: int = 0
    fresh: int = 0
    one_tile: bool = False
    staged: int = 0
    published: int | None = None
    owned: int = 0
    scales: int = 0
    window: int = 0
    apart: Apart = Apart()

    @property
    def scratch(self) -> int:
        """The most bytes of temporary memory that an update needs, except for the first one."""
        return self.gradients + self.passing

    def state_bytes(self, shard_numel: int) -> int:
        """Bytes of the state of a shard with ``shard_numel`` elements."""
        return shard_numel * sum(dtype.itemsize for dtype in self.state.values()) + self.owned + self.scales
