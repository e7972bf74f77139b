"""ZeRO sharding and offloading for PyTorch Lightning.

Importing this package makes ``Trainer(strategy="zero2_offload")`` and its siblings known to ``lightning``, and to its
``Fabric``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_zero.integration.advice import provide_advice
from lightning_zero.integration.registration import register
from lightning_zero.version import __version__

if TYPE_CHECKING:
    from lightning_zero.checkpoint import CheckpointError
    from lightning_zero.config import hydra_main
    from lightning_zero.engine import full_grad, full_optimizer_state, full_param, gathered_parameters
    from lightning_zero.integration.auto import ZeroAutoStrategy
    from lightning_zero.integration.fabric import ZeroFabricStrategy
    from lightning_zero.integration.loading import load_from_checkpoint
    from lightning_zero.integration.precision import ZeroPrecision
    from lightning_zero.integration.preflight import DoesNotFitError
    from lightning_zero.integration.strategy import ZeroStrategy
    from lightning_zero.sharding import CollectiveError
    from lightning_zero.storage import DiskError
    from lightning_zero.update import (
        CPUSGD,
        CPUAdagrad,
        CPUAdam,
        CPUAdamW,
        CPULion,
        DynamicLossScaler,
        LossScaleError,
        Muon,
        SkippedStepsError,
        StaticLossScaler,
        TornStepError,
    )

__all__ = [
    "CPUSGD",
    "CPUAdagrad",
    "CPUAdam",
    "CPUAdamW",
    "CPULion",
    "CheckpointError",
    "CollectiveError",
    "DiskError",
    "DoesNotFitError",
    "DynamicLossScaler",
    "LossScaleError",
    "Muon",
    "SkippedStepsError",
    "StaticLossScaler",
    "TornStepError",
    "ZeroAutoStrategy",
    "ZeroFabricStrategy",
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
    "CPUAdagrad": "lightning_zero.update",
    "CPUAdam": "lightning_zero.update",
    "CPUAdamW": "lightning_zero.update",
    "CPULion": "lightning_zero.update",
    "CPUSGD": "lightning_zero.update",
    "CheckpointError": "lightning_zero.checkpoint",
    "CollectiveError": "lightning_zero.sharding",
    "DiskError": "lightning_zero.storage",
    "DoesNotFitError": "lightning_zero.integration.preflight",
    "DynamicLossScaler": "lightning_zero.update",
    "LossScaleError": "lightning_zero.update",
    "Muon": "lightning_zero.update",
    "SkippedStepsError": "lightning_zero.update",
    "StaticLossScaler": "lightning_zero.update",
    "TornStepError": "lightning_zero.update",
    "ZeroAutoStrategy": "lightning_zero.integration.auto",
    "ZeroFabricStrategy": "lightning_zero.integration.fabric",
    "ZeroPrecision": "lightning_zero.integration.precision",
    "ZeroStrategy": "lightning_zero.integration.strategy",
    "full_grad": "lightning_zero.engine",
    "full_optimizer_state": "lightning_zero.engine",
    "full_param": "lightning_zero.engine",
    "gathered_parameters": "lightning_zero.engine",
    "hydra_main": "lightning_zero.config",
    "load_from_checkpoint": "lightning_zero.integration.loading",
}

# Submodules that are imported when they are accessed as attributes.
_MODULES = frozenset(
    "callbacks checkpoint cli config engine integration migration ops planning schedulers sharding storage tools"
    " update".split()
)

register()
provide_advice()


def __getattr__(name: str) -> Any:
    # Imported on first use, so that importing the package stays fast.
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
