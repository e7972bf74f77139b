"""The engines of a process that hold parameters."""

from __future__ import annotations

import itertools
import weakref
from typing import Generic, Protocol, TypeVar


class Numbered(Protocol):
    """An engine, as far as its place among others goes."""

    number: int


E = TypeVar("E", bound=Numbered)


class Registry(Generic[E]):
    """Knows engines for as long as somebody refers to them."""

    def __init__(self) -> None:
        self._held: weakref.WeakSet[E] = weakref.WeakSet()
        self._numbers = itertools.count()

    def add(self, engine: E) -> int:
        """Note an engine; returns its number."""
        self._held.add(engine)
        return next(self._numbers)

    def discard(self, engine: E) -> None:
        """Forget an engine, which holds nothing any more."""
        self._held.discard(engine)

    def in_order(self) -> list[E]:
        """The engines in the order of their making: the same on all ranks."""
        return sorted(self._held, key=lambda engine: engine.number)
