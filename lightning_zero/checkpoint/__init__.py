"""Checkpoints: state by parameter name, whole, at full precision."""

from lightning_zero.checkpoint.full import CheckpointError, fetch_for_first, load, save
from lightning_zero.checkpoint.shards import all_values
from lightning_zero.checkpoint.state import (
    load_module_state_dict,
    load_optimizer_state_dict,
    module_state_dict,
    optimizer_state_dict,
)

__all__ = [
    "CheckpointError",
    "all_values",
    "fetch_for_first",
    "load",
    "load_module_state_dict",
    "load_optimizer_state_dict",
    "module_state_dict",
    "optimizer_state_dict",
    "save",
]
