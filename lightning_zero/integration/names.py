"""The names that ``strategy=`` of Trainer and Fabric takes, registered without importing their classes.

Importing the package therefore takes milliseconds; engine, kernels and Hydra are imported at their first use.
"""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_zero.integration.auto import ZeroAutoStrategy
    from lightning_zero.integration.fabric import ZeroFabricStrategy
    from lightning_zero.integration.private import StrategyRegistryType
    from lightning_zero.integration.strategy import ZeroStrategy

# Arguments of `ZeroStrategy` by name. Offloading moves the optimizer state to the host or a disk, at stage 3 also the
# parameters.
STRATEGIES: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero1_offload": {"stage": 1, "offload_optimizer": "cpu"},
    "zero2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "zero3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
    "zero1_nvme": {"stage": 1, "offload_optimizer": "nvme"},
    "zero2_nvme": {"stage": 2, "offload_optimizer": "nvme"},
    "zero3_nvme": {"stage": 3, "offload_optimizer": "nvme", "offload_params": "nvme"},
}
AUTO = "zero_auto"  # chooses one of these names when it knows the module
WITHOUT_AUTO = (
    f"strategy={AUTO!r} works with the Trainer, which shows it the module together with its optimizers before either "
    "is sharded; Fabric sets up one module after another. `lightning-zero estimate` says which name fits and is "
    "fastest: Fabric(strategy='zero2'), for one"
)
_PLACES = {"none": "", "cpu": ", state in host memory", "nvme": ", state on a disk"}


def register() -> None:
    """Register the names with Trainer and Fabric of ``lightning`` as soon as it is imported; this imports neither.

    In the registry of ``pytorch_lightning``, a copy of the same code with classes of its own, each name becomes an
    error that says what to import. The order in which the packages are imported does not matter.
    """
    _when_imported(
        "lightning.pytorch.strategies",
        lambda strategies: register_in(strategies.StrategyRegistry, make_strategy, make_auto_strategy),
    )
    _when_imported(
        "lightning.fabric.strategies",
        lambda strategies: register_in(strategies.STRATEGY_REGISTRY, make_fabric_strategy, refuse_auto),
    )
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


def register_in(registry: StrategyRegistryType, make: Callable[..., Any], make_auto: Callable[[], Any]) -> None:
    """Add the names to a registry of strategies, which then refuses names that are similar to them.

    Args:
        registry: of the Trainer or of Fabric.
        make: makes the registry's strategy from arguments.
        make_auto: makes the strategy that chooses, or raises an error that says why there is none.
    """
    for name, arguments in STRATEGIES.items():
        place = _PLACES[arguments.get("offload_optimizer", "none")]
        description = f"ZeRO stage {arguments['stage']}{place}"
        registry.register(name, make, description, override=True, **arguments)
    registry.register(AUTO, make_auto, "the ZeRO stage and places that are fastest within the memory", override=True)
    # The Trainer looks for a name in this list, and its own error for an unknown name does not list ours.
    registry.available_strategies = lambda: _Names(registry)  # type: ignore[method-assign]


class _Names(list[str]):
    """The registered names; looking for a name that is similar to ours raises an error that lists ours."""

    def __contains__(self, name: object) -> bool:
        found = super().__contains__(name)
        if not found and isinstance(name, str):
            close = difflib.get_close_matches(name, [*STRATEGIES, AUTO], n=1, cutoff=0.75)
            if close or name.startswith("zero"):
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise ValueError(
                    f"strategy={name!r} is not a strategy; {hint}The names of lightning_zero are: "
                    f"{', '.join([*STRATEGIES, AUTO])}. Options go to the class: "
                    "strategy=lightning_zero.ZeroStrategy(stage=2)"
                )
        return found


def _refuse_in(strategies: ModuleType) -> None:
    for name in (*STRATEGIES, AUTO):
        strategies.StrategyRegistry.register(name, _refuse_pytorch_lightning, override=True)


def make_strategy(**arguments: Any) -> ZeroStrategy:
    """Make the strategy of the Trainer."""
    from lightning_zero.integration.strategy import ZeroStrategy

    return ZeroStrategy(**arguments)


def make_auto_strategy() -> ZeroAutoStrategy:
    """Make the Trainer's strategy that chooses among the others."""
    from lightning_zero.integration.auto import ZeroAutoStrategy

    return ZeroAutoStrategy()


def refuse_auto() -> None:
    """Raise an error that says why Fabric has no strategy that chooses."""
    raise ValueError(WITHOUT_AUTO)


def make_fabric_strategy(**arguments: Any) -> ZeroFabricStrategy:
    """Make the strategy of Fabric."""
    from lightning_zero.integration.fabric import ZeroFabricStrategy

    return ZeroFabricStrategy(**arguments)


def _refuse_pytorch_lightning() -> None:
    raise ImportError(
        "lightning_zero works with the package `lightning`, not with `pytorch_lightning`: their classes do not mix. "
        "Write `import lightning.pytorch as pl` in the place of `import pytorch_lightning as pl`"
    )
