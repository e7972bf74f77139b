"""Changes of options that take less memory, as Hydra overrides, each with its setting for a plan."""

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

_STAGING_MB = 32  # enough for copies to overlap, if not at full speed

BY_HAND = "twice as many micro-batches in a step"  # goes with half the batch where user code accumulates gradients

_MEMORIES: dict[str, Memory] = {"none": "device", "cpu": "host", "nvme": "disk"}


def setting_of(options: StrategyOptions, shard_size: int, precision: MixedPrecisionPolicy) -> Setting:
    """The setting that a plan depends on.

    Args:
        options: of the strategy.
        shard_size: number of ranks in a shard group of the run; the options may leave it open.
        precision: of the precision plugin.
    """
    return Setting(
        sharding=ShardingPolicy.from_stage(options.stage),
        shard_size=shard_size,
        optimizer_memory=_MEMORIES[options.offload_optimizer],
        params_memory=_MEMORIES[options.offload_params],
        disk_buffer_bytes=options.nvme_buffer_bytes if options.uses_disk else 0,
        bucket_size_mb=options.bucket_size_mb,
        persistence_numel=options.persistence_numel,
        max_live_numel=options.max_live_numel,
        prefetch_mb=options.prefetch_mb,
        overlap=options.overlap,
        precision=precision,
        offload_fraction=options.offload_fraction,
        split_masters=options.master_layout == "split",
        in_flight_bytes=options.in_flight_bytes,
        staging_bytes=options.staging_bytes,
        gradients_rest=options.gradients_rest if options.uses_disk else None,
        update_in_backward=options.update_in_backward,
        accumulate_on_device=options.accumulate_on_device,
    )


def candidates(
    options: StrategyOptions, now: Setting, default_size: int, world_size: int
) -> Iterator[tuple[str, Setting]]:
    """Yields changes that may take less memory: the Hydra override, and the setting with it.

    Args:
        options: of the strategy.
        now: the setting of the run.
        default_size: default size of a shard group.
        world_size: number of ranks.
    """

    def changed(shard_size: int = now.shard_size, **changes: Any) -> Setting:
        return setting_of(replace(options, **changes), shard_size, now.precision)

    for name, arguments in STRATEGIES.items():
        if "nvme" in arguments.values() and (options.disk_path is None or options.update_in_backward):
            continue  # no path is known, or the strategy would be refused
        if StrategyOptions(**arguments, nvme_path=options.nvme_path).replicates:  # it takes the most memory
            continue
        also: dict[str, Any] = {}  # options that this strategy would refuse as they are
        if "offload_optimizer" not in arguments and options.offload_fraction < 1:
            also["offload_fraction"] = 1
        if "nvme" not in arguments.values() and options.offload_gradients not in (
            "auto",
            arguments.get("offload_optimizer"),
        ):
            also["offload_gradients"] = "auto"
        size = default_size if options.replicates else now.shard_size
        other = changed(size, **{"offload_optimizer": "none", "offload_params": "none", **arguments, **also})
        if other != now:
            yield " ".join([f"strategy={name}", *(f"strategy.{key}={value}" for key, value in also.items())]), other
    if options.offload_optimizer == "none" and now.sharding.shard_params:
        yield "strategy.offload_optimizer=cpu", changed(offload_optimizer="cpu")
    if options.uses_disk and options.offload_gradients != "nvme":
        yield "strategy.offload_gradients=nvme", changed(offload_gradients="nvme")
    if options.offload_optimizer != "none" and options.overlap and options.staging_buffer_mb > _STAGING_MB:
        yield f"strategy.staging_buffer_mb={_STAGING_MB}", changed(staging_buffer_mb=_STAGING_MB)
    if options.overlap and options.max_in_flight_mb > 0 and world_size > 1:
        yield "strategy.max_in_flight_mb=0", changed(max_in_flight_mb=0.0)
    if options.accumulate_on_device:
        yield "strategy.accumulate_on_device=false", changed(accumulate_on_device=False)
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


def activations(halved: str | None) -> str:
    """Advice on activations, which a plan does not include.

    Args:
        halved: what goes with half the batch, so that a step stays the same; ``None``: for an evaluation.
    """
    if halved is None:
        return "The plan does not include activations: half the batch needs half of their memory."
    return (
        f"The plan does not include activations: half the batch with {halved} needs half of their memory, and "
        "activation checkpointing of the blocks saves most of it."
    )
