"""The strategy of Fabric: the same engine, driven by the user's own training loop."""

from lightning_zero.integration.fabric.strategy import ZeroFabricStrategy

__all__ = ["ZeroFabricStrategy"]
