"""Optimizers over shards: torch's own, and the native kernels on the host."""

from lightning_zero.optim.rules import check_element_wise
from lightning_zero.optim.state import ShardState
from lightning_zero.optim.update import NativeAdamUpdater, ShardUpdater, TorchUpdater, make_updater

__all__ = [
    "NativeAdamUpdater",
    "ShardState",
    "ShardUpdater",
    "TorchUpdater",
    "check_element_wise",
    "make_updater",
]
