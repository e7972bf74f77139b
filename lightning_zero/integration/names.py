"""The names that ``strategy=`` of Trainer and Fabric takes, and their place in a registry of strategies."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_zero.integration.private import StrategyRegistryType

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


def register_in(registry: StrategyRegistryType, make: Callable[..., Any]) -> None:
    """Add the names of :data:`STRATEGIES` to a registry, which then refuses names that are similar to them.

    Args:
        registry: of the Trainer or of Fabric.
        make: makes the registry's strategy from arguments.
    """
    for name, arguments in STRATEGIES.items():
        place = _PLACES[arguments.get("offload_optimizer", "none")]
        description = f"ZeRO stage {arguments['stage']}{place}"
        registry.register(name, make, description, override=True, **arguments)
    # The Trainer looks for a name in this list, and its own error for an unknown name does not list ours.
    registry.available_strategies = lambda: _Names(registry)  # type: ignore[method-assign]


def register_auto_in(registry: StrategyRegistryType, make: Callable[[], Any]) -> None:
    """Add :data:`AUTO` to a registry.

    Args:
        registry: of the Trainer or of Fabric.
        make: makes the strategy that chooses, or raises an error that says why there is none.
    """
    registry.register(AUTO, make, "the ZeRO stage and places that are fastest within the memory", override=True)


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


def refuse_auto() -> None:
    """Raise an error that says why Fabric has no strategy that chooses."""
    raise ValueError(WITHOUT_AUTO)
