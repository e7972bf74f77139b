"""Collectives of Lightning, which the strategy brings into one order with those of the engine."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor
from typing_extensions import override

from lightning_zero.integration.base import EngineStrategy

T = TypeVar("T")


class CollectiveStrategy(EngineStrategy):
    """Part of :class:`~lightning_zero.ZeroStrategy`: lets Lightning's collectives come after the engine's.

    In a step one rank may read a parameter and so issue gathers that were deferred, and a lane may issue the next
    unit's. Both must precede Lightning's collectives on all ranks: these block, and use another process group.
    """

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._issue_preceding()
        super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        self._issue_preceding()
        return super().broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        self._issue_preceding()
        return super().reduce(tensor, *args, **kwargs)

    @override
    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._issue_preceding()
        return super().all_gather(tensor, *args, **kwargs)

    def _issue_preceding(self) -> None:
        if self._in_step and self._mesh is not None:
            self._mesh.issue_preceding()
