"""The base of the parts of the strategy: its options and the engine that it drives."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from lightning_zero.engine import Engine
from lightning_zero.integration.options import NAMES, StrategyOptions
from lightning_zero.integration.patches import Undo
from lightning_zero.sharding import Mesh, ShardingPolicy


class EngineStrategy(DDPStrategy):
    """Base of the parts that :class:`~lightning_zero.ZeroStrategy` is made of.

    Each option is an attribute of its name, too; none can be assigned.
    """

    _options: StrategyOptions
    _policy: ShardingPolicy
    _undo: list[Undo]  # for what was replaced on objects that outlive the fit
    _engine: Engine | None = None
    _mesh: Mesh | None = None

    @property
    def options(self) -> StrategyOptions:
        """The options, as they were given to the constructor."""
        return self._options

    @property
    def engine(self) -> Engine:
        """The engine that shards the module; exists from ``setup`` on."""
        if self._engine is None:
            raise RuntimeError(
                "this Trainer's strategy holds no shards: they exist from the start of Trainer.fit, validate, test or "
                "predict until strategy.release(). Save checkpoints and read optimizer state before the release"
            )
        if self._engine.released:
            raise RuntimeError(
                "another Trainer has taken over this module, and with it the weights; the optimizer state of this one "
                "is gone. Save its checkpoint before the other Trainer runs, or save the other's"
            )
        return self._engine


def _read_only(name: str) -> property:
    def read(strategy: EngineStrategy) -> Any:
        return getattr(strategy.options, name)

    def refuse(strategy: EngineStrategy, value: object) -> None:
        raise AttributeError(
            f"{name}={value!r} comes too late: options are fixed when the strategy is made; use "
            f"{type(strategy).__name__}({name}={value!r})"
        )

    return property(read, refuse, doc=f"The option ``{name}``.")


for _name in NAMES:
    if not hasattr(EngineStrategy, _name):  # Lightning's class has some
        setattr(EngineStrategy, _name, _read_only(_name))
