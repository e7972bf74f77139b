"""The ways to train among which a plan can choose: the names, with options that matter for memory and time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_zero.integration import engines
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.integration.options import StrategyOptions
from lightning_zero.integration.precision import PrecisionName, ZeroPrecision
from lightning_zero.integration.remedies import setting_of
from lightning_zero.planning.estimate import Choice

# Options of Hydra's group `precision`, by the flag of the Trainer.
PRECISIONS: dict[PrecisionName, str] = {
    "32-true": "fp32",
    "64-true": "fp64",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16_true",
    "16-mixed": "fp16",
    "16-true": "fp16_true",
}
# Variants of the names: they take less memory and are slower, or offload only a part.
_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("zero3", {"max_live_numel": 0}),
    ("zero3", {"offload_optimizer": "cpu"}),
    ("zero3_offload", {"max_live_numel": 0}),
)
_FEW = {"max_live_numel": 0, "persistence_numel": 0}
_OFFLOADING: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name, options in STRATEGIES.items() if "offload_optimizer" in options),
    ("zero3", {"offload_optimizer": "cpu"}),
)
# Variants that take less memory at nearly the same speed: smaller buckets, no gathering ahead, no unsharded parameters.
_FINE: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {"bucket_size_mb": 1.0}) for name, options in STRATEGIES.items() if options["stage"] < 3),
    ("zero3", {"offload_optimizer": "cpu"}),
    *((name, {"max_live_numel": 0}) for name, options in STRATEGIES.items() if options["stage"] == 3),
    *((name, _FEW) for name, options in STRATEGIES.items() if options["stage"] == 3),
    ("zero3", {"offload_optimizer": "cpu", **_FEW}),
)
# Variants that leave a part on a device that has room for it, which shortens the update.
_PARTS: tuple[tuple[str, dict[str, Any]], ...] = tuple(
    (name, {**options, "offload_fraction": part}) for name, options in _OFFLOADING for part in (0.75, 0.5, 0.25)
)
# Variants that add up the gradients of micro-batches on a device that has room for it, which spares the host passes.
_COLLECTING: tuple[tuple[str, dict[str, Any]], ...] = tuple(
    (name, {**options, "accumulate_on_device": True})
    for name, options in (*_OFFLOADING, *_PARTS)
    if STRATEGIES[name]["stage"] >= 2
)
REDUCED_OVERRIDES = {
    "optimizer": "cpu_adamw",
    "optimizer.master_layout": "split",
    "optimizer.state_dtype": "bfloat16",
}
REDUCED_PYTHON = 'lightning_zero.CPUAdamW(self.parameters(), master_layout="split", state_dtype=torch.bfloat16)'


@dataclass(frozen=True)
class Way:
    """A name with options.

    Attributes:
        name: of the strategy.
        changed: options that differ from those of the name.
    """

    name: str
    changed: Mapping[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of :class:`~lightning_zero.ZeroStrategy`."""
        return {**STRATEGIES[self.name], **self.changed}

    @property
    def overrides(self) -> dict[str, Any]:
        """Hydra's overrides that select it."""
        return {"strategy": self.name} | {f"strategy.{key}": value for key, value in self.changed.items()}

    @property
    def python(self) -> str:
        """The expression of the strategy in Python."""
        if not self.changed:
            return f'"{self.name}"'
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"lightning_zero.ZeroStrategy({arguments})"


def ways(names: Sequence[str], variants: Sequence[tuple[str, Mapping[str, Any]]], gpus: int, nodes: int) -> list[Way]:
    """All names, and variants of them, sharded over the ranks of a machine and over all ranks; the simplest first.

    Args:
        names: of strategies.
        variants: names with options.
        gpus: ranks of a machine.
        nodes: machines.
    """
    found = [Way(name, changed) for name, changed in (*((name, {}) for name in names), *variants)]
    if nodes > 1:
        sharded = [way for way in found if STRATEGIES[way.name]["stage"]]
        found += [Way(way.name, {**way.changed, "shard_size": gpus * nodes}) for way in sharded]
    return found


def fine_ways(gpus: int, nodes: int, disk: bool, parts: bool, several: bool, fixed: Mapping[str, Any]) -> list[Way]:
    """All names, and variants that take less memory, the simplest first.

    Args:
        gpus: ranks of a machine.
        nodes: machines.
        disk: whether state may rest on a disk.
        parts: whether a part may stay on the device although the rest is offloaded; this needs a device with its own
            memory.
        several: whether a step has several micro-batches.
        fixed: options that every way has; no variant changes them.
    """
    names = [name for name, options in STRATEGIES.items() if disk or "nvme" not in options.values()]
    offered = (*_FINE, *(_PARTS if parts else ()), *(_COLLECTING if parts and several else ()))
    variants = [(name, changed) for name, changed in offered if name in names and not fixed.keys() & changed]
    found = ways(names, variants, gpus, 1 if "shard_size" in fixed else nodes)
    return [way for way in found if way.options["stage"] or fixed.get("shard_size", 1) == 1]


def choices(
    gpus: int,
    nodes: int,
    precision: PrecisionName,
    nvme_path: str | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> Iterator[Choice]:
    """Yields all ways, the simplest first.

    Args:
        gpus: ranks of a machine.
        nodes: machines.
        precision: flag of the Trainer.
        nvme_path: folder on a disk, where state may rest; None: there is none.
        fixed: options that every way has.
    """
    policy = ZeroPrecision(precision).policy
    common = {"precision": PRECISIONS[precision], "trainer.devices": gpus}
    if nodes > 1:
        common["trainer.num_nodes"] = nodes
    flags = f', precision="{precision}", devices={gpus}' + f", num_nodes={nodes}" * (nodes > 1)
    known = [name for name, arguments in STRATEGIES.items() if "nvme" not in arguments.values()]
    on_disk = [] if nvme_path is None else [(n, {"nvme_path": nvme_path}) for n in STRATEGIES if n not in known]
    for way in ways(known, (*_VARIANTS, *on_disk), gpus, nodes):
        way = Way(way.name, {**way.changed, **(fixed or {})})
        options = StrategyOptions(**way.options)
        setting = setting_of(options, engines.shard_size(options, nodes, gpus), policy)
        overrides = way.overrides | common
        python = f"L.Trainer(strategy={way.python}{flags})"
        yield Choice(overrides, python, setting)
        if setting.optimizer_memory != "device" and policy.param_dtype is not None and policy.param_dtype.itemsize == 2:
            yield Choice(overrides | REDUCED_OVERRIDES, f"{python}  # {REDUCED_PYTHON}", setting, reduced=True)
