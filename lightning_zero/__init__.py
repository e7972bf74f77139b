"""ZeRO sharding and offloading for PyTorch Lightning.

Importing this package makes ``Trainer(strategy="zero2_offload")`` and its siblings known to ``lightning``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_zero.engine import gathered_parameters
from lightning_zero.precision import ZeroPrecision
from lightning_zero.strategy import ZeroStrategy, register

if TYPE_CHECKING:
    from lightning_zero.hydra_app import hydra_main

__all__ = ["ZeroPrecision", "ZeroStrategy", "gathered_parameters", "hydra_main"]
__version__ = "0.1.0"

register()


def __getattr__(name: str) -> Any:
    # Hydra is imported when it is used: importing the package stays cheap.
    if name == "hydra_main":
        from lightning_zero.hydra_app import hydra_main

        return hydra_main
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
