"""Ways to train among which a plan can choose: the names, and the options that matter for memory and time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_zero.integration import engines
from lightning_zero.integration.names import STRATEGIES
from lightning_zero.integration.options import StrategyOptions
from lightning_zero.integration.precision import PrecisionName, ZeroPrecision
from lightning_zero.integration.remedies import setting_of
from lightning_zero.planning.estimate import Choice

# The groups of Hydra by the flags of precision.
PRECISIONS: dict[PrecisionName, str] = {
    "32-true": "fp32",
    "64-true": "fp64",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16_true",
    "16-mixed": "fp16",
    "16-true": "fp16_true",
}
# Beside the names themselves: less memory for less speed, or a part of what a name moves.
_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("zero3", {"max_live_numel": 0}),
    ("zero3", {"offload_optimizer": "cpu"}),
    ("zero3_offload", {"max_live_numel": 0}),
)
REDUCED_HYDRA = "optimizer=cpu_adamw optimizer.master_layout=split optimizer.state_dtype=bfloat16"
REDUCED_PYTHON = 'lightning_zero.CPUAdamW(self.parameters(), master_layout="split", state_dtype=torch.bfloat16)'


def choices(gpus: int, nodes: int, precision: PrecisionName) -> Iterator[Choice]:
    """Yields all ways, the simplest first.

    Args:
        gpus: ranks of a machine.
        nodes: machines.
        precision: flag of the Trainer.
    """
    policy = ZeroPrecision(precision).policy
    tail = f"precision={PRECISIONS[precision]} trainer.devices={gpus}" + f" trainer.num_nodes={nodes}" * (nodes > 1)
    flags = f', precision="{precision}", devices={gpus}' + f", num_nodes={nodes}" * (nodes > 1)
    # What a disk can do no data sheet of the machine says.
    known = [name for name, arguments in STRATEGIES.items() if "nvme" not in arguments.values()]
    named: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in known]
    sizes = [None] if nodes == 1 else [None, gpus * nodes]
    for size in sizes:
        for name, changed in (*named, *_VARIANTS):
            extra = changed if size is None else {**changed, "shard_size": size}
            if size is not None and StrategyOptions(**STRATEGIES[name]).replicates:
                continue
            options = StrategyOptions(**{**STRATEGIES[name], **extra})
            setting = setting_of(options, engines.shard_size(options, nodes, gpus), policy)
            hydra = " ".join([f"strategy={name}", *(f"strategy.{key}={value}" for key, value in extra.items()), tail])
            python = f"L.Trainer(strategy={_python(name, extra)}{flags})"
            yield Choice(hydra, python, setting)
            if (
                setting.optimizer_memory == "host"
                and policy.param_dtype is not None
                and policy.param_dtype.itemsize == 2
            ):
                yield Choice(f"{hydra} {REDUCED_HYDRA}", f"{python}  # {REDUCED_PYTHON}", setting, reduced=True)


def _python(name: str, extra: dict[str, Any]) -> str:
    if not extra:
        return f'"{name}"'
    arguments = ", ".join(f"{key}={value!r}" for key, value in {**STRATEGIES[name], **extra}.items())
    return f"lightning_zero.ZeroStrategy({arguments})"
