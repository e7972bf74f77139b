"""Checkpoints: state by parameter name, whole, at full precision."""

from lightning_zero.checkpoint.state import (
    load_module_state_dict,
    load_optimizer_state_dict,
    module_state_dict,
    optimizer_state_dict,
)

__all__ = [
    "load_module_state_dict",
    "load_optimizer_state_dict",
    "module_state_dict",
    "optimizer_state_dict",
]
