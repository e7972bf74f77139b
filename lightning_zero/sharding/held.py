"""The ``grad`` of a parameter that buckets hold.

Autograd accumulates into a slot of its own, from which gradients are taken when they are reduced: what it holds is the
*local* gradient, which most of the time is none. Code that asks a parameter for its ``grad`` gets what the
:class:`GradientSource` of the parameter makes of that and of the sharded gradient. So that it is asked, the parameter
is of a subclass with a property of that name; nothing else of it is different, and nothing costs time until it is read.
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
    """Answers for the ``grad`` of parameters."""

    def read_grad(self, parameter: Parameter) -> Tensor | None:
        """The value of ``parameter.grad``."""
        ...

    def assign_grad(self, parameter: Parameter, value: Tensor | None) -> None:
        """Takes over what is assigned to ``parameter.grad``."""
        ...


# By id of the parameter. A source keeps its parameters alive: no other object has the id as long as it is there.
_sources: WeakValueDictionary[int, GradientSource] = WeakValueDictionary()


def local_grad(parameter: Parameter) -> Tensor | None:
    """The gradient that autograd has accumulated on this rank since the last reduction."""
    gradient: Tensor | None = _slot.__get__(parameter)
    return gradient


def set_local_grad(parameter: Parameter, value: Tensor | None) -> None:
    """Replaces :func:`local_grad`."""
    _slot.__set__(parameter, value)


class HeldParameter(Parameter):
    """A parameter whose ``grad`` is answered for by a :class:`GradientSource`; without one it is autograd's."""

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
        release_parameter(self)  # torch writes the class's name for every other than its own
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
    # Of the same name: to user code it is the parameter that it was.
    return type(cls.__name__, (HeldParameter, cls), {"__module__": cls.__module__})


def hold_parameter(parameter: Parameter) -> None:
    """Have ``parameter.grad`` ask a source."""
    if not isinstance(parameter, HeldParameter):
        parameter.__class__ = _held_class(type(parameter))


def release_parameter(parameter: Parameter) -> None:
    """Undo :func:`hold_parameter`; the parameter is not freed."""
    if isinstance(parameter, HeldParameter):
        parameter.__class__ = type(parameter).__mro__[2]


def answer_for(parameters: Iterable[Parameter], source: GradientSource) -> None:
    """Make ``source`` the one that is asked; it must keep the parameters alive."""
    _sources.update((id(parameter), source) for parameter in parameters)
