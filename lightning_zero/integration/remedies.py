"""Changes that take less memory, in the words of Lightning and Hydra, and the setting of a plan with each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lightning_zero.integration.names import STRATEGIES
from lightning_zero.integration.options import StrategyOptions
from lightning_zero.integration.precision import PrecisionName, ZeroPrecision
from lightning_zero.planning.memory import Setting
from lightning_zero.sharding import MixedPrecisionPolicy, ShardingPolicy
from lightning_zero.storage import Memory

# Flags by the names of Hydra's group.
_PRECISIONS: dict[str, PrecisionName] = {"bf16": "bf16-mixed", "bf16_true": "bf16-true"}

_MEMORIES: dict[str, Memory] = {"none": "device", "cpu": "host", "nvme": "disk"}


def setting_of(options: StrategyOptions, shard_size: int, precision: MixedPrecisionPolicy) -> Setting:
    """The setting that a plan depends on.

    Args:
        options: of the strategy.
        shard_size: of the run, which the options may leave open.
        precision: of the precision plugin.
    """
    return Setting(
        ShardingPolicy.from_stage(options.stage),
        shard_size,
        _MEMORIES[options.offload_optimizer],
        _MEMORIES[options.offload_params],
        options.nvme_buffer_bytes if options.uses_disk else 0,
        options.bucket_size_mb,
        options.persistence_numel,
        options.max_live_numel,
        options.prefetch_mb,
        options.overlap,
        precision,
        options.offload_fraction,
        options.master_layout == "split",
        options.staging_bytes,
        options.gradients_rest if options.uses_disk else None,
        options.update_in_backward,
    )


def candidates(
    options: StrategyOptions, now: Setting, default_size: int, world_size: int
) -> Iterator[tuple[str, Setting]]:
    """Changes that may take less memory: what to type, for Hydra, and the setting with it.

    Args:
        options: of the strategy.
        now: the setting of the run.
        default_size: of a shard group where the user chooses none.
        world_size: number of ranks.
    """

    def changed(shard_size: int = now.shard_size, **changes: Any) -> Setting:
        return setting_of(replace(options, **changes), shard_size, now.precision)

    on_device = {"offload_optimizer": "none", "offload_params": "none", "offload_fraction": 1.0}
    for name, arguments in STRATEGIES.items():
        if "nvme" in arguments.values() and (options.nvme_path is None or options.update_in_backward):
            continue  # nobody knows where, or it would be refused
        if StrategyOptions(**arguments, nvme_path=options.nvme_path).replicates:  # it takes the most
            continue
        part = {"offload_fraction": options.offload_fraction} if "offload_optimizer" in arguments else {}
        other = changed(default_size if options.replicates else now.shard_size, **{**on_device, **arguments, **part})
        if other != now:
            yield f"strategy={name}", other
    if options.offload_optimizer == "none" and now.sharding.shard_params:
        yield "strategy.offload_optimizer=cpu", changed(offload_optimizer="cpu")
    if options.uses_disk and options.offload_gradients != "nvme":
        yield "strategy.offload_gradients=nvme", changed(offload_gradients="nvme")
    if options.offload_fraction < 1:
        yield "strategy.offload_fraction=1", changed(offload_fraction=1.0)
    if options.offload_optimizer != "none" and options.master_layout != "split":
        yield "strategy.master_layout=split", changed(master_layout="split")
    if now.shard_size < world_size and not options.replicates:
        yield f"strategy.shard_size={world_size}", changed(world_size)
    if now.sharding.shard_params:
        yield "strategy.persistence_numel=0", changed(persistence_numel=0)
        yield "strategy.max_live_numel=0", changed(max_live_numel=0)
    else:
        yield "strategy.bucket_size_mb=1", changed(bucket_size_mb=1.0)
    if now.precision.param_dtype is None:
        for name, flag in _PRECISIONS.items():
            yield f"precision={name}", replace(now, precision=ZeroPrecision(flag).policy)


def activations(micro_batches: int | None) -> str:
    """Advice on the memory that no plan knows; ``None`` micro-batches: of an evaluation."""
    if micro_batches is None:
        return "Activations are in no plan: half the batch takes half of them."
    return (
        f"Activations are in no plan: half the batch with trainer.accumulate_grad_batches={2 * micro_batches} takes "
        "half of them, activation checkpointing of the blocks most."
    )
