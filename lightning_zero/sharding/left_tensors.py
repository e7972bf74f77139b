"""Finds tensors that a forward stores on modules, such as an auxiliary loss: backward may begin at them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_zero.torch_private import registered_modules

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CONTAINERS = (list, tuple, dict)
_DEPTH = 3  # of containers in containers, some of which may hold themselves


class LeftTensors:
    """Iterates over the tensors in attributes of a module and of its submodules.

    A tensor is found alone and in lists, tuples and dictionaries, up to three in one another.

    Modules of user classes are searched in every iteration, since any forward may assign attributes. A module of
    ``torch.nn`` that has only the attributes of its class, and no tensor among them, is searched again only after it
    got further attributes, for example from a hook. The module tree is walked again after a module in it got other
    children.

    Args:
        module: the outermost module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tree: list[tuple[nn.Module, list[nn.Module | None]]] = []  # with their children
        self._quiet: list[tuple[nn.Module, int]] = []  # with the number of their attributes
        self._others: list[nn.Module] = []

    def __iter__(self) -> Iterator[Tensor]:
        if self._is_outdated():
            self._look_around()
        for module in self._others:
            yield from _tensors_of(module)

    def _is_outdated(self) -> bool:
        for module, children in self._tree:
            if list(registered_modules(module).values()) != children:
                return True
        return not self._tree or any(len(vars(module)) != number for module, number in self._quiet)

    def _look_around(self) -> None:
        modules = list(self._module.modules())
        self._tree = [(module, list(registered_modules(module).values())) for module in modules]
        self._quiet = [(module, len(vars(module))) for module in modules if _is_plain(module)]
        self._others = [module for module in modules if not _is_plain(module)]


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, _CONTAINERS) and name not in _OF_EVERY_MODULE:
            yield from _tensors_in(value, _DEPTH)


def _tensors_in(container: Any, depth: int) -> Iterator[Tensor]:
    for element in tuple(container.values()) if isinstance(container, dict) else container:  # threads may add some
        if isinstance(element, Tensor):
            yield element
        elif depth > 1 and isinstance(element, _CONTAINERS):
            yield from _tensors_in(element, depth - 1)


def _is_plain(module: nn.Module) -> bool:
    """Whether the module's class is one of ``torch.nn``, and it has no tensors and no attributes beyond its class's."""
    cls = type(module)
    if not cls.__module__.startswith("torch.nn.modules."):
        return False
    own = set(_OF_EVERY_MODULE)
    for base in cls.__mro__:
        own.update(vars(base).get("__constants__", ()), vars(base).get("__annotations__", ()))
    return vars(module).keys() <= own and next(_tensors_of(module), None) is None
