"""Tensors that forward leaves on modules, as an auxiliary loss is: backward may enter there."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from lightning_zero.torch_private import registered_modules

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class LeftTensors:
    """Finds the tensors among the attributes of a module and of all inside it, alone and in lists and tuples.

    It looks again on every call at modules of user classes, which may assign in any forward. A module of ``torch.nn``
    that has its class's own attributes only, and no tensor among them, is looked at again when it has got more, as from
    a hook. The tree is walked again when a module in it has other children.

    Args:
        module: the outermost one.
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
    for value in vars(module).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            for element in value:
                if isinstance(element, Tensor):
                    yield element


def _is_plain(module: nn.Module) -> bool:
    """Whether its class is torch's own, and it has no tensors nor an attribute that others of its class lack."""
    cls = type(module)
    if not cls.__module__.startswith("torch.nn.modules."):
        return False
    own = set(_OF_EVERY_MODULE)
    for base in cls.__mro__:
        own.update(vars(base).get("__constants__", ()), vars(base).get("__annotations__", ()))
    return vars(module).keys() <= own and next(_tensors_of(module), None) is None
