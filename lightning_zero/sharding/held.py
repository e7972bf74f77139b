"""Redefines ``parameter.grad`` for parameters in buckets, so that it shows the averaged gradient.

Autograd accumulates the *local* gradient into its own slot, from which it is taken when it is reduced; most of the time
the slot is empty. Code that reads ``parameter.grad`` gets the value that the :class:`GradientSource` of the parameter
computes from the local and the sharded gradient. To this end the class of the parameter is a subclass with a property
``grad``; nothing else about the parameter changes, and nothing is computed until ``grad`` is read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, SupportsIndex
from weakref import WeakValueDictionary

from torch import Tensor
from torch.nn import Parameter

from lightning_zero.torch_private import pickled_parameter

_slot: Any = Tensor.grad  # the descriptor of autograd's slot; `Any`, since torch's stub does not declare it as one


class GradientSource(Protocol):
    """Computes ``parameter.grad`` when it is read, and takes over assignments to it."""

    def read_grad(self, parameter: Parameter) -> Tensor | None:
        """The value of ``parameter.grad``."""
        ...

    def assign_grad(self, parameter: Parameter, value: Tensor | None) -> None:
        """Takes over a value that is assigned to ``parameter.grad``."""
        ...


# By id of the parameter. A source keeps its parameters alive, so no other object can get one of these ids meanwhile.
_sources: WeakValueDictionary[int, GradientSource] = WeakValueDictionary()


_pickled_as: ContextVar[Mapping[int, Tensor] | None] = ContextVar("pickled_as", default=None)


@contextmanager
def pickled_as(values: Mapping[int, Tensor]) -> Iterator[None]:
    """Surrounds code that pickles modules: held parameters are pickled with these values, by id of the parameter."""
    token = _pickled_as.set(values)
    try:
        yield
    finally:
        _pickled_as.reset(token)


def local_grad(parameter: Parameter) -> Tensor | None:
    """The gradient that autograd has accumulated on this rank since the last reduction."""
    gradient: Tensor | None = _slot.__get__(parameter)
    return gradient


def set_local_grad(parameter: Parameter, value: Tensor | None) -> None:
    """Replaces :func:`local_grad`."""
    _slot.__set__(parameter, value)


class HeldParameter(Parameter):
    """A parameter whose ``grad`` comes from its :class:`GradientSource`, or from autograd's slot if it has none."""

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
        release_parameter(self)  # torch prints the name of every class but its own
        try:
            return repr(self)
        finally:
            self.__class__ = held

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        copy: Parameter = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        release_parameter(copy)
        return copy

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        values = (_pickled_as.get() or {}).get(id(self))
        if values is None:
            return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        own = {name: value for name, value in vars(self).items() if not name.startswith("_zero_")}
        return pickled_parameter(values, self.requires_grad, own)


@functools.cache
def _held_class(cls: type[Parameter]) -> type[Parameter]:
    # With the same name, so that user code sees no difference.
    return type(cls.__name__, (HeldParameter, cls), {"__module__": cls.__module__})


def hold_parameter(parameter: Parameter) -> None:
    """Let ``parameter.grad`` come from the parameter's source; see :func:`answer_for`."""
    if not isinstance(parameter, HeldParameter):
        parameter.__class__ = _held_class(type(parameter))


def release_parameter(parameter: Parameter) -> None:
    """Undo :func:`hold_parameter`; the parameter must not be marked as freed or pending."""
    if isinstance(parameter, HeldParameter):
        parameter.__class__ = type(parameter).__mro__[2]


def answer_for(parameters: Iterable[Parameter], source: GradientSource) -> None:
    """Make ``source`` the gradient source of ``parameters``; it must keep them alive."""
    _sources.update((id(parameter), source) for parameter in parameters)
