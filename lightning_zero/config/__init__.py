"""Hydra for applications that train with Lightning: groups with schemas, clear errors, objects from a configuration.

This package imports only the standard library; its functions import torch, Lightning and Hydra when they use them. The
reason is that Hydra's search-path plugin imports it in every Hydra application, also in those that do not use it.
"""

from lightning_zero.config.application import hydra_main
from lightning_zero.config.builders import build_fabric, build_optimizers, build_trainer, micro_batch_size
from lightning_zero.config.errors import ConfigError

__all__ = ["ConfigError", "build_fabric", "build_optimizers", "build_trainer", "hydra_main", "micro_batch_size"]
