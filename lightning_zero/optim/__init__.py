"""Optimizers over shards: torch's own, and the native kernels on the host, which are optimizers of their own too."""

from lightning_zero.optim.cpu import CPUSGD, CPUAdagrad, CPUAdam, CPUAdamW, CPULion, CPUOptimizer
from lightning_zero.optim.rules import check_element_wise
from lightning_zero.optim.state import ShardState
from lightning_zero.optim.update import NativeUpdater, ShardUpdater, TorchUpdater, choose_updater, make_updater

__all__ = [
    "CPUSGD",
    "CPUAdagrad",
    "CPUAdam",
    "CPUAdamW",
    "CPULion",
    "CPUOptimizer",
    "NativeUpdater",
    "ShardState",
    "ShardUpdater",
    "TorchUpdater",
    "check_element_wise",
    "choose_updater",
    "make_updater",
]
