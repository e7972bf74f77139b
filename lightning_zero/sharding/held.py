"""The ``grad`` attribute of a parameter that a bucket holds.

Autograd accumulates into its own slot, from which gradients are taken when they are reduced. So the slot holds the
*local* gradient, and most of the time it is empty. Code that reads ``parameter.grad`` gets a value that the parameter's
:class:`GradientSource` makes from the local and the sharded gradient. For this, the parameter gets a subclass with a
property ``grad`` as its class. Nothing else changes, and it costs no time until ``grad`` is read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor
from torch.nn import Parameter

_slot: Any = Tensor.grad  # autograd's; torch's stub has no descriptor there


class GradientSource(Protocol):
    """Computes and sets the ``grad`` of parameters."""

    def read_grad(self, parameter: Parameter) -> Tensor | None:
        """The value of ``parameter.grad``."""
        ...

    def assign_grad(self, parameter: Parameter, value: Tensor | None) -> None:
        """Takes over a value that is assigned to ``parameter.grad``."""
        ...


# By id of the parameter. A source keeps its parameters alive, so no other object can have the id in the meantime.
_sources: WeakValueDictionary[int, GradientSource] = WeakValueDictionary()


def local_grad(parameter: Parameter) -> Tensor | None:
    """The gradient that autograd has accumulated on this rank since the last reduction."""
    gradient: Tensor | None = _slot.__get__(parameter)
    return gradient


def set_local_grad(parameter: Parameter, value: Tensor | None) -> None:
    """Replaces :func:`local_grad`."""
    _slot.__set__(parameter, value)


class HeldParameter(Parameter):
    """A parameter whose ``grad`` comes from a :class:`GradientSource`, or from autograd if it has no source."""

    @property
    def grad(self) -> Tensor | None:
        source = _sources.get(id(self))
        return local_grad(self) if source is None else source.read_grad(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        source = _sources.get(id(self))
        if source is None:
            set_local_grad(self, value)
        else:
            source.assign_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = type(self)
        release_parameter(self)  # for other classes than its own, torch would print the class's name
        try:
            return repr(self)
        finally:
            self.__class__ = held

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        copy: Parameter = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        release_parameter(copy)
        return copy


@functools.cache
def _held_class(cls: type[Parameter]) -> type[Parameter]:
    # It has the same name, so that user code sees the same class name.
    return type(cls.__name__, (HeldParameter, cls), {"__module__": cls.__module__})


def hold_parameter(parameter: Parameter) -> None:
    """Make ``parameter.grad`` come from a source."""
    if not isinstance(parameter, HeldParameter):
        parameter.__class__ = _held_class(type(parameter))


def release_parameter(parameter: Parameter) -> None:
    """Undo :func:`hold_parameter`; the parameter must not be freed."""
    if isinstance(parameter, HeldParameter):
        parameter.__class__ = type(parameter).__mro__[2]


def answer_for(parameters: Iterable[Parameter], source: GradientSource) -> None:
    """Make ``source`` the source of the parameters; it must keep them alive."""
    _sources.update((id(parameter), source) for parameter in parameters)
