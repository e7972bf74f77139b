"""The engine: drives the buckets of a module through forward, backward and step."""

from lightning_zero.engine.access import engines_of, full_grad, full_optimizer_state, full_param, gathered_parameters
from lightning_zero.engine.activations import ActivationLimits
from lightning_zero.engine.runtime import Engine
from lightning_zero.engine.shadow import Shadow, follow

__all__ = [
    "ActivationLimits",
    "Engine",
    "Shadow",
    "engines_of",
    "follow",
    "full_grad",
    "full_optimizer_state",
    "full_param",
    "gathered_parameters",
]
