"""Whether the state that one optimizer saved is what another one needs, found out before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from lightning_zero.optim import ShardUpdater

KIND = "class"  # an optimizer state dict's entry: the name of the optimizer's class; torch's own has none
WEIGHTS_ALONE = (
    "or load the weights alone: model = Model.load_from_checkpoint(path), then trainer.fit(model) without ckpt_path"
)
# Counted by some optimizers, for some dtypes of their state, and 0 for those that do not find it; what a CPU optimizer
# keeps of the weights, which come with the module.
_NOT_COMPARED = {"step", "master", "remainder"}
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}  # may not run where names are looked up


def check_kind(
    updater: ShardUpdater, saved: Mapping[str, Any], keys: Mapping[int, Any], names: Mapping[int, str]
) -> None:
    """Raise unless an optimizer can go on with a state dict whose groups match its own.

    One of its own class can. Of another, or an unknown one (plain torch's), the state must have the names that this
    optimizer's has under the saved hyperparameters: Adam's fits AdamW and the CPU optimizers.

    Args:
        updater: drives the optimizer.
        saved: the state dict.
        keys: of the saved state, by id of the parameter.
        names: of the parameters, by id.

    Raises:
        ValueError: says what differs.
    """
    optimizer, kind = updater.optimizer, saved.get(KIND)
    name = type(optimizer).__name__
    for group, old in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        states = [(p, saved["state"][keys[id(p)]]) for p in group["params"] if keys.get(id(p)) in saved["state"]]
        for parameter, state in states:
            _check_shapes(updater, parameter, state, names[id(parameter)])
        if kind == name:
            continue
        writer = kind or "the optimizer that wrote the checkpoint"
        rule = group | {key: value for key, value in old.items() if key not in _IMPLEMENTATION}
        needed = updater.state_names(rule) - _NOT_COMPARED if states else frozenset()
        for parameter, state in states:
            found = {key for key, value in state.items() if isinstance(value, Tensor)} - _NOT_COMPARED
            if found != needed:
                raise ValueError(
                    f"{writer} keeps {_listed(found)} of {names[id(parameter)]}, {name} keeps {_listed(needed)}; "
                    f"configure the optimizer that was saved, {WEIGHTS_ALONE}"
                )
        # Before the first step there is no state to tell.
        if kind is not None and (missing := {key for key in _numbers(optimizer.defaults) if key not in old}):
            raise ValueError(
                f"{writer} has no {_listed(missing)}, which {name} needs; configure the optimizer that was saved, "
                f"{WEIGHTS_ALONE}"
            )


def _check_shapes(updater: ShardUpdater, parameter: Parameter, state: Mapping[str, Any], name: str) -> None:
    for key in sorted(updater.per_element & state.keys()):
        value = state[key]
        if isinstance(value, Tensor) and value.shape != parameter.shape:
            raise ValueError(
                f"{key} of {name} has shape {tuple(value.shape)} in the checkpoint, the parameter "
                f"{tuple(parameter.shape)}; configure the groups in the order in which they were saved, {WEIGHTS_ALONE}"
            )


def _numbers(defaults: Mapping[str, Any]) -> list[str]:
    """Hyperparameters of the update rule; others choose between implementations, and versions of torch add some."""
    return [
        key for key, value in defaults.items() if isinstance(value, int | float | tuple) and not isinstance(value, bool)
    ]


def _listed(names: set[str] | frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "no state"
