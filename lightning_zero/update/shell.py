"""Shells: an optimizer's rule, applied to other tensors than those it was made for.

A shell is an object of the optimizer's own class with its attributes, but with groups and state of our making. Stepping
it runs the class's ``step`` and nothing else: no hooks, no profiler record, no scheduler's mark, and never the live
groups of the user's optimizer.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.torch_private import OPTIMIZER_HOOKS

_REPLACED = ("state", "param_groups", "step", "zero_grad", *OPTIMIZER_HOOKS)


class ShellGroup(NamedTuple):
    """Tensors (with their ``grad`` set) and the hyperparameters to update them with."""

    tensors: list[Tensor]
    hyperparameters: dict[str, Any]


def run_step(optimizer: Optimizer, groups: Sequence[ShellGroup], state: dict[Tensor, dict[str, Any]]) -> Optimizer:
    """Update the tensors of ``groups`` and their ``state`` in place, by ``optimizer``'s rule; returns the shell."""
    shell = object.__new__(type(optimizer))
    shell.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k not in _REPLACED})
    shell.__dict__.update({hook: OrderedDict() for hook in OPTIMIZER_HOOKS})
    shell.param_groups = [{"params": group.tensors, **group.hyperparameters} for group in groups]
    shell.state = defaultdict(dict, state)
    step = type(optimizer).step
    if getattr(step, "hooked", False):  # torch's wrapper of hooks and profiler around the class's own function
        step = step.__wrapped__  # type: ignore[attr-defined]
    with torch.no_grad():
        step(shell)
    state.update(shell.state)
    return shell
