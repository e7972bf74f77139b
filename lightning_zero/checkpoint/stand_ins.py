"""Tensors that stand for a module's parameters in a checkpoint: full, at full precision, whatever this rank holds.

They replace parameters in code that makes the module's state, which is torch's unless the module has its own
``state_dict``, and in modules that are pickled, such as those among the hyperparameters of another module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_zero.checkpoint.shards import masters
from lightning_zero.engine import Engine, Shadow
from lightning_zero.sharding.freed import is_metadata
from lightning_zero.sharding.held import pickled_as
from lightning_zero.torch_private import tree_map

StandIns = Mapping[int, Tensor]  # by id of the parameter or buffer
_ALIASES = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]  # a descriptor


def stand_ins(engine: Engine, shadow: Shadow | None = None) -> StandIns:
    """A lazy tensor for each parameter: its master, or its value in ``shadow``, which also has values of buffers."""
    weights = {id(p): v.tensor(i) for v in masters(engine, shadow) for i, p in enumerate(v.bucket.parameters)}
    return weights if shadow is None else weights | shadow.buffers


def state_dict_with(module: nn.Module, tensors: StandIns) -> Mapping[str, Any]:
    """Call ``module.state_dict()``, with each of ``tensors`` in place of the one that it stands for.

    Where the method reads values of a lazy tensor, that is collective.
    """
    with _Replacing(tensors):
        state: Mapping[str, Any] = module.state_dict()
    return state


def pickled_as_masters(engines: Sequence[Engine]) -> contextlib.AbstractContextManager[None]:
    """Make a context in which modules are pickled with lazy tensors as parameters, as :func:`stand_ins` gives them."""
    return pickled_as({key: tensor for engine in engines for key, tensor in stand_ins(engine).items()})


class _Replacing(TorchFunctionMode):
    """A mode in which functions, except of metadata, get stand-ins in place of tensors; aliases are the stand-ins."""

    def __init__(self, tensors: StandIns) -> None:
        self._tensors = tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_metadata(func):
            return func(*args, **kwargs)
        if func in _ALIASES and args and id(args[0]) in self._tensors:
            return self._tensors[id(args[0])]
        return func(*tree_map(self._replaced, args), **tree_map(self._replaced, kwargs))

    def _replaced(self, value: Any) -> Any:
        return self._tensors.get(id(value), value)
