"""The names that ``Trainer(strategy=...)`` takes, registered without importing what they stand for.

Importing the package costs milliseconds; engine, kernels and Hydra are imported by what uses them first.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import StrategyRegistry

if TYPE_CHECKING:
    from lightning.fabric.strategies.registry import _StrategyRegistry

    from lightning_zero.strategy import ZeroStrategy

# Arguments of `ZeroStrategy` by name. Offloading takes optimizer state to the host, at stage 3 the parameters too.
STRATEGIES: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero1_offload": {"stage": 1, "offload_optimizer": "cpu"},
    "zero2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "zero3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
}


_OTHER = "pytorch_lightning.strategies"


def register(registry: _StrategyRegistry = StrategyRegistry) -> None:
    """Make the names known to ``lightning.pytorch.Trainer``.

    In the registry of ``pytorch_lightning``, a copy of the same code with classes of its own, they become an error that
    says what to import, whichever of the two packages is imported first.
    """
    for name, arguments in STRATEGIES.items():
        offloads = ", state in host memory" if "offload_optimizer" in arguments else ""
        description = f"ZeRO stage {arguments['stage']}{offloads}"
        registry.register(name, _make_strategy, description, override=True, **arguments)
    if _OTHER in sys.modules:
        _refuse_in(sys.modules[_OTHER])
    elif not any(isinstance(finder, _AwaitOther) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AwaitOther())


class _AwaitOther(MetaPathFinder):
    """Sees the import of ``pytorch_lightning`` come, and leaves the names there once it is done."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _OTHER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_refuse(module: ModuleType) -> None:
                execute(module)
                _refuse_in(module)

            spec.loader.exec_module = execute_and_refuse  # type: ignore[method-assign]
        return spec


def _refuse_in(strategies: ModuleType) -> None:
    for name in STRATEGIES:
        strategies.StrategyRegistry.register(name, _refuse_pytorch_lightning, override=True)


def _make_strategy(**arguments: Any) -> ZeroStrategy:
    from lightning_zero.strategy import ZeroStrategy

    return ZeroStrategy(**arguments)


def _refuse_pytorch_lightning() -> None:
    raise ImportError(
        "lightning_zero works with the package `lightning`, not with `pytorch_lightning`: their classes do not mix. "
        "Write `import lightning.pytorch as pl` in the place of `import pytorch_lightning as pl`"
    )
