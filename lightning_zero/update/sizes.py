"""The memory that an optimizer needs for a parameter, measured by steps in trials."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.storage.live import LiveBytes
from lightning_zero.torch_private import READS_NUMBER, TorchDispatchMode, tree_leaves
from lightning_zero.update.rules import check_plain, fresh_state, portable
from lightning_zero.update.shell import ShellGroup, run_step, trial_call

_STEPS = 3
_SAMPLE, _SAMPLE_STEPS = 64, 7  # elements and steps of a trial on a sample. RAdam has another formula from step 6 on
_LARGEST = 1 << 20  # most elements of a parameter that is allocated because a step needs values

# Counts the memory that operators of a trial take, but not what is smaller than the sample: it does not grow with a
# parameter.
Passing = partial(LiveBytes, least=_SAMPLE)


class Sizes(NamedTuple):
    """Shapes and bytes of the memory that an optimizer needs for one parameter.

    Attributes:
        shapes: shapes of the tensors of its state, by name.
        state: bytes of the state's tensors with several elements.
        passing: temporary bytes that a step needs beside parameter, gradient and state.
    """

    shapes: Mapping[str, torch.Size]
    state: int
    passing: int


def sizes_of(
    optimizer: Optimizer, group: Mapping[str, Any], shape: torch.Size, dtype: torch.dtype, count: int = 1
) -> Sizes:
    """Measure the sizes for a parameter in a trial on the meta device. If a step reads a number there, it gets 1.

    If the optimizer cannot run on the meta device, the trial is made on the host. A parameter of more than 2^20
    elements is replaced by a smaller one there, and the bytes are scaled up.

    Args:
        optimizer: the optimizer, which is not changed.
        group: hyperparameters of the parameter.
        shape: shape of the parameter.
        dtype: dtype of the parameter.
        count: number of such parameters that are updated together; ``passing`` is for all of them.

    Raises:
        ValueError: the state has tensors of a class other than torch's plain one.
    """
    try:
        with _Answers():  # type: ignore[no-untyped-call]
            return _measured(optimizer, group, torch.empty(shape, dtype=dtype, device="meta"), count)
    except Exception:  # noqa: BLE001  (a step may need values in any way; with values it is known to run)
        numel = shape.numel()
        smaller = torch.Size(_shrunk(list(shape))) if numel > _LARGEST else shape
        with torch.random.fork_rng(devices=[]):
            found = _measured(optimizer, group, torch.ones(smaller, dtype=dtype, device="cpu"), count)
        factor = numel / max(smaller.numel(), 1)
        return found._replace(state=math.ceil(found.state * factor), passing=math.ceil(found.passing * factor))


def passing_bytes(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype, foreach: bool) -> int:
    """Temporary bytes per element that a step needs beside parameter, gradient and state, from a trial on the host.

    Args:
        optimizer: an element-wise optimizer, which is not changed.
        group: one of its parameter groups.
        dtype: dtype of the parameter.
        foreach: whether torch updates several tensors at a time.
    """
    if group.get("fused"):
        return 0
    plain = portable(group)
    if "foreach" in plain:
        plain["foreach"] = foreach
    parameter = torch.ones(_SAMPLE, dtype=dtype, device="cpu")
    parameter.grad = torch.ones_like(parameter)
    states = {parameter: fresh_state(optimizer, parameter)}
    run_step(optimizer, [ShellGroup([parameter], plain)], states, trial_call(optimizer))  # makes the state
    known = [parameter, parameter.grad, *(v for v in states[parameter].values() if isinstance(v, Tensor))]
    with Passing(known) as passing:
        for _ in range(1, _SAMPLE_STEPS):
            run_step(optimizer, [ShellGroup([parameter], plain)], states, trial_call(optimizer))
    most: int = -(-passing.most // _SAMPLE)
    return most


def _shrunk(shape: list[int]) -> list[int]:
    """Halves the longest dimensions of a shape until it has at most 2^20 elements."""
    while math.prod(shape) > _LARGEST:
        longest = shape.index(max(shape))
        shape[longest] = -(-shape[longest] // 2)
    return shape


def _measured(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, count: int) -> Sizes:
    parameters = [parameter, *(parameter.clone() for _ in range(1, count))]
    gradients = [torch.ones_like(each) for each in parameters]
    for each, gradient in zip(parameters, gradients, strict=True):
        each.grad = gradient
    states = {each: fresh_state(optimizer, each) for each in parameters}
    plain, most = portable(group), 0
    for _ in range(_STEPS):
        made_before = _large(states)
        with Passing([*parameters, *gradients, *made_before]) as passing:
            run_step(optimizer, [ShellGroup(parameters, plain)], states, trial_call(optimizer))
        held = sum(t.nbytes for t in _large(states)) - sum(t.nbytes for t in made_before)
        most = max(most, passing.most - held)
    check_plain(type(optimizer).__name__, states[parameter])  # large tensors may be of another class than small ones
    shapes = {k: v.shape for k, v in states[parameter].items() if isinstance(v, Tensor)}
    return Sizes(shapes, sum(t.nbytes for t in _large(states[parameter])), most)


def _large(state: Mapping[Any, Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(dict(state)) if isinstance(leaf, Tensor) and leaf.numel() > 1]


class _Answers(TorchDispatchMode):
    """A context in which a number that is read from a tensor without values is 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READS_NUMBER and args[0].is_meta:
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))
