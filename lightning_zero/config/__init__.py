"""Hydra for applications that train with Lightning: groups with schemas, clear errors, objects from a configuration.

Importing it imports the standard library only: torch, Lightning and Hydra are imported by the functions that use them,
for Hydra's search-path plugin imports this package in applications that have no use for ours.
"""

from lightning_zero.config.application import hydra_main
from lightning_zero.config.builders import build_fabric, build_optimizers, build_trainer, micro_batch_size
from lightning_zero.config.errors import ConfigError

__all__ = ["ConfigError", "build_fabric", "build_optimizers", "build_trainer", "hydra_main", "micro_batch_size"]
