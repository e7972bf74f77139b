"""Registers the names of strategies with Trainer and Fabric, without importing the classes.

Importing the package therefore takes milliseconds; engine, kernels and Hydra are imported at their first use.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_zero.integration.names import AUTO, STRATEGIES, refuse_auto, register_auto_in, register_in

if TYPE_CHECKING:
    from lightning_zero.integration.auto import ZeroAutoStrategy
    from lightning_zero.integration.fabric import ZeroFabricStrategy
    from lightning_zero.integration.strategy import ZeroStrategy


def register() -> None:
    """Register the names with Trainer and Fabric of ``lightning`` as soon as it is imported; this imports neither.

    In the registry of ``pytorch_lightning``, a copy of the same code with classes of its own, each name becomes an
    error that says what to import. The order in which the packages are imported does not matter.
    """
    _when_imported("lightning.pytorch.strategies", _register_with_trainer)
    _when_imported("lightning.fabric.strategies", _register_with_fabric)
    _when_imported("pytorch_lightning.strategies", _refuse_in)


def _when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    if name in sys.modules:
        act(sys.modules[name])
    elif not any(isinstance(finder, _Await) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Await(name, act))


class _Await(MetaPathFinder):
    """Waits for the import of a module, and calls a function with the module after it."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self.name, self.act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self.act(module)

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def _register_with_trainer(strategies: ModuleType) -> None:
    register_in(strategies.StrategyRegistry, _make_strategy)
    register_auto_in(strategies.StrategyRegistry, _make_auto_strategy)


def _register_with_fabric(strategies: ModuleType) -> None:
    register_in(strategies.STRATEGY_REGISTRY, _make_fabric_strategy)
    register_auto_in(strategies.STRATEGY_REGISTRY, refuse_auto)


def _refuse_in(strategies: ModuleType) -> None:
    for name in (*STRATEGIES, AUTO):
        strategies.StrategyRegistry.register(name, _refuse_pytorch_lightning, override=True)


def _make_strategy(**arguments: Any) -> ZeroStrategy:
    from lightning_zero.integration.strategy import ZeroStrategy

    return ZeroStrategy(**arguments)


def _make_auto_strategy() -> ZeroAutoStrategy:
    from lightning_zero.integration.auto import ZeroAutoStrategy

    return ZeroAutoStrategy()


def _make_fabric_strategy(**arguments: Any) -> ZeroFabricStrategy:
    from lightning_zero.integration.fabric import ZeroFabricStrategy

    return ZeroFabricStrategy(**arguments)


def _refuse_pytorch_lightning() -> None:
    raise ImportError(
        "lightning_zero works with the package `lightning`, not with `pytorch_lightning`: their classes do not mix. "
        "Write `import lightning.pytorch as pl` in the place of `import pytorch_lightning as pl`"
    )
