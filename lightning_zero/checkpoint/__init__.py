"""Checkpoints: state by parameter name, whole, at full precision."""

from lightning_zero.checkpoint import rng
from lightning_zero.checkpoint.background import Background
from lightning_zero.checkpoint.containers import CONTAINERS, begin, load
from lightning_zero.checkpoint.errors import CheckpointError
from lightning_zero.checkpoint.full import fetch_for_first, whole_on_first
from lightning_zero.checkpoint.mapped import give_back_pages
from lightning_zero.checkpoint.optimizer_kind import WEIGHTS_ALONE
from lightning_zero.checkpoint.saving import Save, recover_all, remove
from lightning_zero.checkpoint.shards import follow_first
from lightning_zero.checkpoint.state import (
    check_optimizer_state_dict,
    load_module_state_dict,
    load_optimizer_state_dict,
    load_shadow_state_dict,
    module_state_dict,
    optimizer_state_dict,
)

__all__ = [
    "CONTAINERS",
    "WEIGHTS_ALONE",
    "Background",
    "CheckpointError",
    "Save",
    "begin",
    "check_optimizer_state_dict",
    "fetch_for_first",
    "follow_first",
    "give_back_pages",
    "load",
    "load_module_state_dict",
    "load_optimizer_state_dict",
    "load_shadow_state_dict",
    "module_state_dict",
    "optimizer_state_dict",
    "recover_all",
    "remove",
    "rng",
    "whole_on_first",
]
