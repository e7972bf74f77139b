"""Shells: objects that apply an optimizer's rule to tensors other than the optimizer's own.

A shell is an object of the optimizer's own class and has its attributes, but groups and state that we make. A step of
it runs the class's ``step`` and nothing else: there are no hooks, no profiler record and no scheduler's mark, and the
groups of the user's optimizer are never used.
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

_REPLACED = ("state", "param_groups", "step", "zero_grad", "load_state_dict", *OPTIMIZER_HOOKS)


def snapshot(optimizer: Optimizer) -> Optimizer:
    """Copies the optimizer's class, attributes and the parameters of its groups as they are now; no state, no hooks.

    Objects to which the attributes refer are not copied. For example, entries that a step of the user's class adds to a
    list are kept.
    """
    taken = object.__new__(type(optimizer))
    taken.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k not in _REPLACED})
    taken.param_groups = [{"params": list(group["params"])} for group in optimizer.param_groups]
    return taken


def without_state(optimizer: Optimizer) -> Optimizer:
    """Makes a shell with the optimizer's groups and without state, for methods of its class that need none."""
    shell = snapshot(optimizer)
    shell.__dict__.update({hook: OrderedDict() for hook in OPTIMIZER_HOOKS})
    shell.param_groups, shell.state = [dict(group) for group in optimizer.param_groups], defaultdict(dict)
    return shell


class ShellGroup(NamedTuple):
    """Tensors, whose ``grad`` is set, and the hyperparameters with which they are updated."""

    tensors: list[Tensor]
    hyperparameters: dict[str, Any]


def loss_by(closure: Callable[[], Any] | None) -> Any:
    """Runs the closure of a ``step`` with gradients enabled and returns its loss; ``None`` without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class StepCall:
    """A call of an optimizer's ``step``, with the arguments of its caller.

    Args:
        optimizer: the optimizer, whose class defines the parameters of ``step``.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Raises:
        TypeError: the class's ``step`` does not take these arguments.
    """

    def __init__(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(type(optimizer).step).bind(optimizer, *args, **kwargs)
        self._args, self._kwargs = list(bound.args[1:]), bound.kwargs
        self._place = _place_of_closure(optimizer)

    def run_closure(self) -> Any:
        """Run the caller's closure and return its loss.

        The closure that the class's ``step`` gets afterwards only returns this loss.
        """
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
        """Run the class's ``step`` on a shell of the optimizer. One call may be run on many shells."""
        step = type(shell).step
        # Torch wraps the class's own function to call hooks and the profiler. The function itself is wanted here.
        if inspect.isfunction(step) and getattr(step, "hooked", False):
            step = step.__wrapped__  # type: ignore[attr-defined]
        step(shell, *self._args, **self._kwargs)


def _place_of_closure(optimizer: Optimizer) -> int | None:
    """The index of the closure among the positional arguments of the optimizer's ``step``; ``None``: keyword only.

    If ``step`` takes ``*args``, the first of these is the closure, as in torch's own ``step``.
    """
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    for place, parameter in enumerate(parameters):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL or parameter.name == "closure":
            return None if parameter.kind is inspect.Parameter.KEYWORD_ONLY else place
    return None


def takes_closure(optimizer: Optimizer) -> bool:
    """Tell whether the optimizer's ``step`` takes a closure as a keyword argument."""
    parameters = inspect.signature(type(optimizer).step).parameters
    return "closure" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def trial_call(optimizer: Optimizer) -> StepCall:
    """Makes a call of ``step`` for a trial: with a closure, as Lightning does, if ``step`` takes one."""
    call = StepCall(
        optimizer,
        **({"closure": lambda: torch.zeros((), dtype=torch.float32, device="cpu")} if takes_closure(optimizer) else {}),
    )
    call.run_closure()
    return call


def run_step(
    optimizer: Optimizer,
    groups: Sequence[ShellGroup],
    state: dict[Tensor, dict[str, Any]],
    call: StepCall | None = None,
) -> Optimizer:
    """Update the tensors of ``groups`` and their ``state`` in place by ``optimizer``'s rule; returns the shell.

    Args:
        optimizer: gives the class and the attributes; it is not changed.
        groups: tensors to update, and hyperparameters.
        state: the state of each tensor; new state is added to it.
        call: the call of the optimizer's ``step``; ``None``: a call without arguments.
    """
    shell = object.__new__(type(optimizer))
    shell.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k not in _REPLACED})
    shell.__dict__.update({hook: OrderedDict() for hook in OPTIMIZER_HOOKS})
    shell.param_groups = [{"params": group.tensors, **group.hyperparameters} for group in groups]
    refused = [group for group in shell.param_groups if group.get("capturable") and _on_host(group["params"])]
    for group in refused:  # torch refuses it in host memory, which is in no graph of the device
        group["capturable"] = False
    shell.state = defaultdict(dict, state)
    call = call or StepCall(optimizer)
    with torch.no_grad():
        call.run(shell)
    for group in refused:
        group["capturable"] = True
    state.update(shell.state)
    return shell


def _on_host(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.device.type == "cpu" for tensor in tensors)


def steps_together(group: dict[str, Any], device: torch.device) -> bool:
    """Tell whether torch updates all tensors of a group at once, and so needs temporary memory for all of them.

    Args:
        group: hyperparameters of the group.
        device: the device that trains.
    """
    if (foreach := group.get("foreach")) is not None:
        return bool(foreach)
    return device.type in foreach_devices() and not group.get("fused") and not group.get("differentiable")


def in_form_for(device: torch.device, group: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters with which torch uses the implementation that it uses for parameters on ``device``.

    The memory in which state rests must not change a bit of the result. Torch's NAdam and RAdam have an implementation
    for many tensors, used on most accelerators, which rounds otherwise than the one for single tensors, used on the
    host.
    """
    tensors = any(isinstance(value, Tensor) for value in group.values())  # with these, torch never uses the former
    free = "foreach" in group and group["foreach"] is None and not tensors
    return group | {"foreach": True} if free and steps_together(group, device) else group
