"""What follows an optimizer step by step stands still where a step is skipped: schedulers and averaged weights.

Lightning steps both after every optimizer step and does not ask whether it was one.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.types import LRSchedulerConfig

Skipped = Callable[[], bool]
Undo = Callable[[], None]


def hold_scheduler(config: LRSchedulerConfig, skipped: Skipped) -> Undo:
    """Make the scheduler's ``step`` do nothing while ``skipped()``; returns what gives its own methods back."""
    own_step, own_state_dict = config.scheduler.step, config.scheduler.state_dict

    def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        return None if skipped() else own_step(*args, **kwargs)

    # torch's schedulers save their whole `__dict__`, and with it these two methods.
    def state_dict(scheduler: Any) -> dict[str, Any]:
        ours = (step, state_dict)
        return {name: value for name, value in own_state_dict().items() if getattr(value, "__func__", None) not in ours}

    return replace_methods(config.scheduler, step, state_dict)


def hold_average(callback: WeightAveraging, skipped: Skipped) -> Undo:
    """Make the callback leave its average alone after a step while ``skipped()``; returns what undoes it."""
    own_should_update = callback.should_update

    def should_update(callback: WeightAveraging, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None and skipped():
            return False
        return own_should_update(step_idx=step_idx, epoch_idx=epoch_idx)

    return replace_methods(callback, should_update)


def replace_methods(target: Any, *functions: Callable[..., Any]) -> Undo:
    """Put the functions in the place of the methods of their names, on this object only; returns what undoes it."""
    names = [function.__name__ for function in functions]
    before = {name: target.__dict__[name] for name in names if name in target.__dict__}
    for name, function in zip(names, functions, strict=True):
        setattr(target, name, types.MethodType(function, target))

    def undo() -> None:
        for name in names:
            target.__dict__.pop(name, None)
        target.__dict__.update(before)

    return undo
