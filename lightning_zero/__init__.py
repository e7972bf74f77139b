"""ZeRO sharding and offloading for PyTorch Lightning.

Importing this package makes ``Trainer(strategy="zero2_offload")`` and its siblings known to ``lightning``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_zero.registration import register
from lightning_zero.version import __version__

if TYPE_CHECKING:
    from lightning_zero.checkpoint import CheckpointError
    from lightning_zero.engine import (
        CollectiveError,
        DynamicLossScaler,
        StaticLossScaler,
        full_grad,
        full_optimizer_state,
        full_param,
        gathered_parameters,
    )
    from lightning_zero.hydra_app import hydra_main
    from lightning_zero.loading import load_from_checkpoint
    from lightning_zero.optim import CPUSGD, CPUAdagrad, CPUAdam, CPUAdamW, CPULion
    from lightning_zero.precision import ZeroPrecision
    from lightning_zero.strategy import ZeroStrategy

__all__ = [
    "CPUSGD",
    "CPUAdagrad",
    "CPUAdam",
    "CPUAdamW",
    "CPULion",
    "CheckpointError",
    "CollectiveError",
    "DynamicLossScaler",
    "StaticLossScaler",
    "ZeroPrecision",
    "ZeroStrategy",
    "__version__",
    "full_grad",
    "full_optimizer_state",
    "full_param",
    "gathered_parameters",
    "hydra_main",
    "load_from_checkpoint",
]

_HOMES = {
    "CPUAdagrad": "lightning_zero.optim",
    "CPUAdam": "lightning_zero.optim",
    "CPUAdamW": "lightning_zero.optim",
    "CPULion": "lightning_zero.optim",
    "CPUSGD": "lightning_zero.optim",
    "CheckpointError": "lightning_zero.checkpoint",
    "CollectiveError": "lightning_zero.engine",
    "DynamicLossScaler": "lightning_zero.engine",
    "StaticLossScaler": "lightning_zero.engine",
    "ZeroPrecision": "lightning_zero.precision",
    "ZeroStrategy": "lightning_zero.strategy",
    "full_grad": "lightning_zero.engine",
    "full_optimizer_state": "lightning_zero.engine",
    "full_param": "lightning_zero.engine",
    "gathered_parameters": "lightning_zero.engine",
    "hydra_main": "lightning_zero.hydra_app",
    "load_from_checkpoint": "lightning_zero.loading",
}

register()


def __getattr__(name: str) -> Any:
    # Imported when it is used: importing the package stays cheap.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
