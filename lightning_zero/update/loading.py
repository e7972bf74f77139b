"""Reads state dicts of optimizers: the state of parameters, with all its digits, and what a user's class adds to it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.update.rules import ELEMENT_WISE
from lightning_zero.update.shell import without_state

_OF_TORCH = ("state", "param_groups")  # the entries of torch's own state dicts


def saved_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> list[tuple[Tensor, dict[str, Any]]]:
    """Lists the parameters of an optimizer for which a state dict has state, with that state."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # Lengths need not be checked here, because torch refuses groups of other lengths.
    return [(p, state_dict["state"][k]) for k, p in zip(keys, parameters, strict=False) if k in state_dict["state"]]


def in_torchs_form(
    optimizer: Optimizer, parameter: Tensor, state: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """Gives scalars of a parameter's loaded state the form and place that torch's ``load_state_dict`` gives them.

    Torch's classes count steps in a tensor, but files of torch before 1.12 and of other packages have a number. The
    count is on the host unless a fused or capturable update reads it on the device; all other scalars are there.

    Args:
        optimizer: has the parameter.
        parameter: whose state it is.
        state: the parameter's state, by name.
        device: that updates the parameter.
    """
    step = state.get("step")
    if isinstance(step, int | float) and isinstance(optimizer, tuple(ELEMENT_WISE)):
        state = state | {"step": torch.tensor(float(step), dtype=torch.float32, device="cpu")}
    scalars = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.dim() == 0}
    if (count := scalars.pop("step", None)) is not None and device.type != "cpu":
        group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), {})
        if group.get("fused") or group.get("capturable"):
            state = state | {"step": count.detach().to(device, torch.float32)}
    return state | {name: value.detach().to(device) for name, value in scalars.items()}


@contextlib.contextmanager
def keeping_digits(optimizer: Optimizer) -> Iterator[None]:
    """Give state that ``optimizer.load_state_dict`` loads inside the context the dtype in which it was saved.

    Torch converts it to the dtype of its parameter. For a 16-bit parameter that would round fp32 moments, and in fp16
    small second moments would become zero, after which an update is far too large.
    """
    loaded: dict[str, Any] = {}

    def note(_: Optimizer, state_dict: dict[str, Any]) -> None:  # after the hooks of others, which may replace it
        loaded.update(state_dict)

    def restore(optimizer: Optimizer) -> None:  # before the hooks of others, which see what will be used
        for parameter, saved in saved_states(optimizer, loaded):
            own = optimizer.state[parameter]
            own.update({name: value.detach() for name, value in saved.items() if _rounded(value, own.get(name))})

    handles = (
        optimizer.register_load_state_dict_pre_hook(note),
        optimizer.register_load_state_dict_post_hook(restore, prepend=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _rounded(saved: Any, own: Any) -> bool:
    """Whether ``own`` is ``saved`` with fewer digits or less range, and not what its class has made of it."""
    if not isinstance(saved, Tensor) or not isinstance(own, Tensor) or saved.dtype == own.dtype:
        return False
    if not (saved.is_floating_point() and own.is_floating_point()):
        return False
    if torch.promote_types(saved.dtype, own.dtype) == own.dtype:  # it holds every value
        return False
    return saved.shape == own.shape and bool(saved.detach().to(own).equal(own))


def own_entries(optimizer: Optimizer) -> dict[str, Any]:
    """Give what the ``state_dict`` of a user's class adds to torch's, such as a count of steps that is an attribute.

    It runs on a shell without state, since the state is in shards.
    """
    if type(optimizer).state_dict is Optimizer.state_dict:
        return {}
    try:
        state_dict = type(optimizer).state_dict(without_state(optimizer))
    except Exception as error:  # noqa: BLE001  # all that torch would save is saved nevertheless
        warnings.warn(
            f"{type(optimizer).__name__}.state_dict() fails where there is no state ({error!r}). Checkpoints lack what "
            "it adds to the state and the groups. Let it add what needs no state",
            stacklevel=2,
        )
        return {}
    return {key: value for key, value in state_dict.items() if key not in _OF_TORCH}


def load_own_entries(optimizer: Optimizer, own: Mapping[str, Any]) -> None:
    """Pass the entries of :func:`own_entries` to the ``load_state_dict`` of a user's class, without any state."""
    if own and type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        number = itertools.count()
        groups = [{**group, "params": [next(number) for _ in group["params"]]} for group in optimizer.param_groups]
        try:
            optimizer.load_state_dict({**copy.deepcopy(dict(own)), "state": {}, "param_groups": groups})
        except Exception as error:  # noqa: BLE001  # all that torch would load is loaded nevertheless
            warnings.warn(
                f"{type(optimizer).__name__}.load_state_dict() fails where there is no state ({error!r}). What it "
                f"reads beside state and groups, {', '.join(map(repr, own))}, is not restored. Let it read what needs "
                "no state",
                stacklevel=2,
            )
