"""Where the tests' trainings run: in host memory, or with `pytest --simulated` on the simulated device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)

_types = ["cpu"]


def device() -> torch.device:
    """That a training uses which is not told another one."""
    return torch.device(_types[-1]) if _types[-1] == "cpu" else torch.device(_types[-1], 0)


def accelerator() -> str:
    """Its name for a Trainer."""
    return _types[-1]


@contextmanager
def trainings_on(type_of_device: str) -> Iterator[None]:
    """Inside, this process trains there."""
    _types.append(type_of_device)
    try:
        yield
    finally:
        _types.pop()


def placed(value: T) -> T:
    """The same on the device; what a module holds twice stays one, which `Module.to` forgets of buffers."""
    return _move(value) if isinstance(value, nn.Module) else moved(value, device())


def _move(module: M) -> M:
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id, with what has it: another one must not get it
    module._apply(lambda tensor: kept.setdefault(id(tensor), (tensor, tensor.to(device())))[1])
    return module


def moved(value: T, to: torch.device | str) -> T:
    """A batch, or whatever torch knows as a tree, with its tensors on a device."""
    result: T = tree_map(lambda leaf: leaf.to(to) if isinstance(leaf, torch.Tensor) else leaf, value)
    return result
