"""Shells: an optimizer's rule, applied to other tensors than those it was made for.

A shell is an object of the optimizer's own class with its attributes, but with groups and state of our making. Stepping
it runs the class's ``step`` and nothing else: no hooks, no profiler record, no scheduler's mark, and never the live
groups of the user's optimizer.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.torch_private import OPTIMIZER_HOOKS, foreach_devices

_REPLACED = ("state", "param_groups", "step", "zero_grad", *OPTIMIZER_HOOKS)


def snapshot(optimizer: Optimizer) -> Optimizer:
    """The optimizer's class, attributes and the parameters of its groups, as they are now; without state or hooks.

    What its attributes refer to is not copied: what a step of the user's class keeps in a list there, say, stays.
    """
    taken = object.__new__(type(optimizer))
    taken.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k not in _REPLACED})
    taken.param_groups = [{"params": list(group["params"])} for group in optimizer.param_groups]
    return taken


class ShellGroup(NamedTuple):
    """Tensors (with their ``grad`` set) and the hyperparameters to update them with."""

    tensors: list[Tensor]
    hyperparameters: dict[str, Any]


def loss_by(closure: Callable[[], Any] | None) -> Any:
    """The loss that the closure of a ``step`` computes, with gradients; ``None`` without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class StepCall:
    """A call of an optimizer's ``step``, with the arguments of whoever called it.

    Args:
        optimizer: whose class says what its ``step`` takes.
        args: of the call.
        kwargs: of the call.

    Raises:
        TypeError: the class's ``step`` does not take these arguments.
    """

    def __init__(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(type(optimizer).step).bind(optimizer, *args, **kwargs)
        self._args, self._kwargs = list(bound.args[1:]), bound.kwargs
        self._place = _place_of_closure(optimizer)

    def run_closure(self) -> Any:
        """Run the caller's closure, once; returns its loss. The class's ``step`` gets that from its closure then."""
        positional = self._place is not None and self._place < len(self._args)
        arguments: Any = self._args if positional else self._kwargs
        place = self._place if positional else "closure"
        closure = arguments[place] if positional else arguments.get(place)
        if closure is None:
            return None
        loss = loss_by(closure)
        arguments[place] = lambda: loss
        return loss

    def run(self, shell: Optimizer) -> None:
        """Run the class's ``step`` on a shell of the optimizer, which may be one of many."""
        step = type(shell).step
        # Torch's wrapper of hooks and profiler is around the class's own function.
        if inspect.isfunction(step) and getattr(step, "hooked", False):
            step = step.__wrapped__  # type: ignore[attr-defined]
        step(shell, *self._args, **self._kwargs)


def _place_of_closure(optimizer: Optimizer) -> int | None:
    """Where a closure is among the positional arguments of the optimizer's ``step``; ``None``: it has a name only.

    With ``*args`` it is the first, as of torch's own ``step``.
    """
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    for place, parameter in enumerate(parameters):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL or parameter.name == "closure":
            return None if parameter.kind is inspect.Parameter.KEYWORD_ONLY else place
    return None


def takes_closure(optimizer: Optimizer) -> bool:
    """Tell whether the optimizer's ``step`` takes a closure by its name."""
    parameters = inspect.signature(type(optimizer).step).parameters
    return "closure" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def trial_call(optimizer: Optimizer) -> StepCall:
    """A call as Lightning makes it, where the optimizer's ``step`` takes a closure."""
    call = StepCall(optimizer, **({"closure": lambda: torch.zeros(())} if takes_closure(optimizer) else {}))
    call.run_closure()
    return call


def run_step(
    optimizer: Optimizer,
    groups: Sequence[ShellGroup],
    state: dict[Tensor, dict[str, Any]],
    call: StepCall | None = None,
) -> Optimizer:
    """Update the tensors of ``groups`` and their ``state`` in place, by ``optimizer``'s rule; returns the shell.

    Args:
        optimizer: is not changed.
        groups: what to update.
        state: by tensor.
        call: of the optimizer's ``step``; ``None``: one without arguments.
    """
    shell = object.__new__(type(optimizer))
    shell.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k not in _REPLACED})
    shell.__dict__.update({hook: OrderedDict() for hook in OPTIMIZER_HOOKS})
    shell.param_groups = [{"params": group.tensors, **group.hyperparameters} for group in groups]
    shell.state = defaultdict(dict, state)
    call = call or StepCall(optimizer)
    with torch.no_grad():
        call.run(shell)
    state.update(shell.state)
    return shell


def steps_together(group: dict[str, Any], device: torch.device) -> bool:
    """Tell whether torch updates all tensors of a group at once, and so takes room for all of them.

    Args:
        group: its hyperparameters.
        device: that trains.
    """
    if (foreach := group.get("foreach")) is not None:
        return bool(foreach)
    return device.type in foreach_devices() and not group.get("fused") and not group.get("differentiable")


def in_form_for(device: torch.device, group: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters by which torch takes that form of the rule which it takes for parameters on ``device``.

    Where state rests must not change a bit. Of NAdam and RAdam the form for many tensors, which torch takes on most
    accelerators, rounds otherwise than that for one tensor, which it takes on the host.
    """
    tensors = any(isinstance(value, Tensor) for value in group.values())  # with these torch takes the latter everywhere
    free = "foreach" in group and group["foreach"] is None and not tensors
    return group | {"foreach": True} if free and steps_together(group, device) else group
