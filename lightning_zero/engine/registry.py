"""A registry of the engines of a process that hold parameters."""

from __future__ import annotations

import itertools
import weakref
from typing import Generic, Protocol, TypeVar


class Numbered(Protocol):
    """An object with a number, as far as the registry needs to know an engine."""

    number: int


E = TypeVar("E", bound=Numbered)


class Registry(Generic[E]):
    """Keeps weak references to engines, and numbers them."""

    def __init__(self) -> None:
        self._held: weakref.WeakSet[E] = weakref.WeakSet()
        self._numbers = itertools.count()

    def add(self, engine: E) -> int:
        """Add an engine and return its number."""
        self._held.add(engine)
        return next(self._numbers)

    def discard(self, engine: E) -> None:
        """Remove an engine that no longer holds parameters."""
        self._held.discard(engine)

    def in_order(self) -> list[E]:
        """The engines in the order in which they were made, which is the same on all ranks."""
        return sorted(self._held, key=lambda engine: engine.number)
