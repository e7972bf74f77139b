"""A strategy from a DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero.integration.names import STRATEGIES
from lightning_zero.integration.precision import ZeroPrecision
from lightning_zero.migration import Import, Status, import_deepspeed
from lightning_zero.update import DynamicLossScaler, StaticLossScaler

_NAMES = {
    "fp32": "32-true",
    "fp16": "16-mixed",
    "bf16": "bf16-mixed",
    "fp16_true": "16-true",
    "fp16_static": "16-true",
    "bf16_true": "bf16-true",
}


class FromDeepSpeed:
    """Gives the strategy a constructor that takes a DeepSpeed configuration."""

    @classmethod
    def from_deepspeed(
        cls, config: str | Path | Mapping[str, Any], *, ranks: int | None = None, **options: Any
    ) -> Self:
        """Make a strategy from a DeepSpeed configuration, with its precision.

        If it names none, or "auto", that is ``Trainer(precision=...)``, as under Lightning's strategy for DeepSpeed.

        A warning lists the keys that are not supported or unknown, and those that belong to a precision where the file
        names none. Clipping, accumulation, batch size, optimizer and scheduler are not options of a strategy; a message
        says where to set them. ``lightning-zero import-deepspeed`` prints a table of all keys, and writes all of them
        as a Hydra configuration.

        Args:
            config: path of a ``ds_config.json``, or the dictionary.
            ranks: number of ranks over which ``train_batch_size`` is split; default: as the file implies, or 1.
            options: options of this class, which override those of the file.

        Raises:
            ValueError: the file is not JSON, a value has a wrong type, or settings contradict each other.
            OSError: the file cannot be read.
        """
        imported = import_deepspeed(config, ranks=ranks)
        settings = STRATEGIES[imported.groups["strategy"]] | imported.below("strategy") | options
        if "precision_plugin" not in options:
            settings |= _precision(imported)
        _report(imported)
        return cls(**settings)


def _precision(imported: Import) -> dict[str, ZeroPrecision]:
    """Make the plugin, as an option of the strategy; without a precision in the file there is none."""
    group = imported.groups.get("precision")
    arguments = imported.below("precision")
    if group is None:
        _warn_of_open_precision(imported, arguments)
        return {}
    if group == "fp32" and not arguments:
        return {}
    arguments["precision"] = _NAMES[group]
    scaler = imported.below("precision.scaler")
    plain: dict[str, Any] = {name: value for name, value in arguments.items() if not name.startswith("scaler.")}
    if group.startswith("fp16"):
        plain["scaler"] = StaticLossScaler(**scaler) if "scale" in scaler else DynamicLossScaler(**scaler)
    return {"precision_plugin": ZeroPrecision(**plain)}


def _warn_of_open_precision(imported: Import, arguments: Mapping[str, Any]) -> None:
    if not arguments:
        return
    keys = ", ".join(imported.sources[f"precision.{name}"] for name in arguments)
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    rank_zero_warn(
        f'{imported.name or "the DeepSpeed configuration"} leaves the precision to the Trainer, as "auto"; these '
        f"settings, which belong to one, are not applied: {keys}. To apply them, pass "
        f"precision_plugin=ZeroPrecision(..., {given}) with a precision such as 'bf16-mixed'"
    )


def _report(imported: Import) -> None:
    source = imported.name or "the DeepSpeed configuration"
    if rows := imported.of(Status.unsupported, Status.unknown):
        listed = "; ".join(f"{row.key}: {row.note}" for row in rows)
        rank_zero_warn(f"these settings of {source} are not taken over: {listed}")
    if rows := imported.of(Status.open):
        rank_zero_info(
            f'{source} leaves the values of these to the program, as "auto": {", ".join(row.key for row in rows)}'
        )
    elsewhere = [f"{name}={value!r}" for name, value in imported.below("trainer").items()]
    wanted = [f"Trainer({', '.join(elsewhere)})"]
    if imported.micro_batch is not None:
        wanted.append(f"DataLoader(batch_size={imported.micro_batch})")
    for section in ("optimizer", "scheduler"):
        if imported.groups.get(section) is not None:
            given = ", ".join(f"{name}={value!r}" for name, value in imported.below(section).items())
            wanted.append(f"{section} {imported.groups[section] or ''}({given})")
    rank_zero_info(
        f"ZeroStrategy.from_deepspeed: {source} has settings that a strategy cannot apply: {'; '.join(wanted)}"
    )
