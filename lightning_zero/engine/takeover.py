"""Methods of the user's optimizers and modules that act on shards from then on.

The objects stay what they are; only these methods are replaced, on the instance, and can be given back.
"""

from __future__ import annotations

import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class ShardedState(defaultdict[Tensor, dict[str, Any]]):
    """``optimizer.state`` while the state lies in shards: nothing to read, and an error that says what to do instead.

    What user code puts into it, for whole parameters, is taken over by the next step; clearing it clears the shards.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(dict)
        self.cleared = False
        self._name = type(optimizer).__name__

    def __missing__(self, parameter: Tensor) -> dict[str, Any]:
        raise RuntimeError(
            f"the state of {self._name} is sharded. Read it with trainer.strategy.optimizer_state(optimizer) on all "
            "ranks; assign optimizer.state[parameter] a whole parameter's state to set it, or call "
            "optimizer.state.clear()"
        )

    def clear(self) -> None:
        super().clear()
        self.cleared = True

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())  # a copy of the optimizer has no shards


class Target(Protocol):
    """What the methods call."""

    def step(self, optimizer: Optimizer) -> bool: ...
    def zero_grad(self, parameters: Iterable[Parameter], set_to_none: bool = True) -> None: ...
    def adopt_state(self, optimizer: Optimizer) -> None: ...


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    """The parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def take_over_optimizer(optimizer: Optimizer, target: Target) -> list[RemovableHandle]:
    """Replace ``step`` and ``zero_grad``; guard ``state_dict`` and ``load_state_dict``. Returns the guards' handles."""
    engine = weakref.ref(target)  # an optimizer that outlives the engine must not keep its buckets alive

    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        _alive(engine).step(optimizer)
        return loss

    def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
        _alive(engine).zero_grad(parameters_of(optimizer), set_to_none)

    # Not torch's wrapper that calls step hooks: the engine does so around the update, once it knows that there is one.
    method = types.MethodType(step, optimizer)
    # Schedulers warn unless `step` carries their mark; what it stands for, `_opt_called`, the engine sets.
    method.__func__._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = method  # type: ignore[method-assign]
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
    return [
        optimizer.register_state_dict_pre_hook(_refuse_state_dict),
        optimizer.register_load_state_dict_post_hook(lambda optimizer: _alive(engine).adopt_state(optimizer)),
    ]


def hide_state(optimizer: Optimizer) -> None:
    """Empty ``optimizer.state``, and notice what happens to it from now on."""
    optimizer.state = ShardedState(optimizer)


def state_was_edited(optimizer: Optimizer) -> bool:
    """Whether user code has written to the hidden state, cleared it, or put another one in its place."""
    state = optimizer.state
    return not isinstance(state, ShardedState) or state.cleared or bool(state)


def state_was_replaced(optimizer: Optimizer) -> bool:
    """Whether nothing of what the shards hold is part of the state any more."""
    state = optimizer.state
    return not isinstance(state, ShardedState) or state.cleared


def give_back_optimizer(optimizer: Optimizer) -> None:
    """The class's own methods again."""
    optimizer.state = defaultdict(dict, optimizer.state)
    for method in ("step", "zero_grad"):
        optimizer.__dict__.pop(method, None)


def take_over_module(module: nn.Module, target: Target) -> None:
    """Make ``zero_grad`` of one module, which also runs on its own, clear owned slices as well."""
    engine = weakref.ref(target)

    # Its name makes the bound method picklable, as a look-up on the unpickled module; a deep copy of the module has
    # parameters that no engine holds.
    def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
        type(module).zero_grad(module, set_to_none)
        if (alive := engine()) is not None:
            alive.zero_grad(module.parameters(), set_to_none)

    # Not by assignment, which torch.compile's wrapper passes on to the module inside.
    vars(module)["zero_grad"] = types.MethodType(zero_grad, module)


def give_back_module(module: nn.Module) -> None:
    """The class's own method again."""
    module.__dict__.pop("zero_grad", None)


def _refuse_state_dict(optimizer: Optimizer) -> None:
    raise RuntimeError(
        f"{type(optimizer).__name__}.state_dict() would be empty: the state is sharded. Use "
        "trainer.strategy.optimizer_state(optimizer) on all ranks, or a checkpoint of the Trainer"
    )


def _alive(reference: weakref.ref[Target]) -> Target:
    engine = reference()
    if engine is None:
        raise RuntimeError("this optimizer was attached to an engine that no longer exists; make a new optimizer")
    return engine
