"""Memory that an updater takes for a bucket."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from lightning_zero.sharding import MasterForm


class Footprint(NamedTuple):
    """Memory that an updater takes for a bucket.

    Attributes:
        master: its master, as the updater lays it out.
        state: dtypes of the per-element state after the first update, by name.
        scratch: bytes that an update takes in passing, where the master is.
    """

    master: MasterForm
    state: Mapping[str, torch.dtype]
    scratch: int
