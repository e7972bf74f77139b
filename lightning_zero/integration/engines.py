"""Makes process groups, stores and engines from the options, for the strategies of Trainer and Fabric."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_zero import numa, ops
from lightning_zero.engine import ActivationLimits, Engine
from lightning_zero.integration import private, remedies
from lightning_zero.integration.disk import make_disk_store
from lightning_zero.integration.options import StrategyOptions
from lightning_zero.integration.precision import ZeroPrecision
from lightning_zero.integration.pretrained import read_in_slices
from lightning_zero.planning import Plan
from lightning_zero.planning.memory import Memory
from lightning_zero.sharding import BucketPlacement, Mesh, ShardingPolicy, sharded_init
from lightning_zero.sharding.layout import imbalance_of
from lightning_zero.sharding.partition import MAX_IMBALANCE
from lightning_zero.storage import DeviceStore, Executor, HostStore, TensorStore, device_type, reuse_freed_memory
from lightning_zero.update import block_of, kept_whole
from lightning_zero.update.attached import parameters_of


def default_shard_size(num_nodes: int, num_processes: int) -> int:
    """The number of ranks of a node, or the number of nodes if each has one rank."""
    return num_processes if num_processes > 1 else num_nodes


def shard_size(options: StrategyOptions, num_nodes: int, num_processes: int) -> int:
    """Number of ranks that share one copy of the state."""
    if options.replicates:
        return 1
    return default_shard_size(num_nodes, num_processes) if options.shard_size is None else options.shard_size


def check_world_size(num_nodes: int, num_processes: int, caller: str) -> None:
    """Raise a :class:`ValueError` if the process group has another number of ranks than ``caller`` expects."""
    expected, actual = num_nodes * num_processes, torch.distributed.get_world_size()
    if expected != actual:
        raise ValueError(
            f"the process group has {actual} ranks, the {caller} expects devices x num_nodes = {expected}: a "
            f"process keeps the group of its first {caller}. Start a new process, or call "
            f"torch.distributed.destroy_process_group() before the next {caller}"
        )


def keep_near(devices: Sequence[torch.device], number: int, root: Path = Path("/")) -> None:
    """Keep the kernels of a rank on the cores of the NUMA node to which its device is attached, if this is known.

    Args:
        devices: the devices of all ranks of the machine.
        number: the number of this rank on the machine.
        root: the folder that contains ``sys``.
    """
    addresses = [device_type(device).pci_address(device) for device in devices]
    nodes = [None if address is None else numa.node_of(address, root) for address in addresses]
    ops.keep_near(numa.share_of(nodes, number, os.sched_getaffinity(0)) if any(nodes) else ())


def make_mesh(
    options: StrategyOptions, num_nodes: int, num_processes: int, local_rank: int, devices: Sequence[torch.device]
) -> Mesh:
    """Make the process groups of all ranks. Collective."""
    ops.share_cores(num_processes, local_rank)  # the ranks of a machine update at the same time
    keep_near(devices, local_rank)
    if any(device_type(device).shares_host_memory for device in devices):
        reuse_freed_memory()
    mesh = Mesh.create(shard_size(options, num_nodes, num_processes), timedelta(seconds=options.timeout))
    if options.shard_size is None and not options.replicates and num_nodes > 1:
        rank_zero_info(f"ZeroStrategy: {_describe_choice(mesh, num_nodes)}")
    return mesh


def _describe_choice(mesh: Mesh, num_nodes: int) -> str:
    """Says by which ranks the default shards over several nodes, and what else could be chosen."""
    if mesh.replica.size == 1:
        return (
            f"shard_size={mesh.shard.size}, the number of nodes, each of which has one rank: gathers and reductions "
            "cross the network between them"
        )
    return (
        f"shard_size={mesh.shard.size}, the ranks of a node: each of the {num_nodes} nodes holds a copy of everything "
        f"that is sharded. shard_size={mesh.world.size} shards over all ranks, with less memory and more traffic "
        "between nodes"
    )


@contextlib.contextmanager
def init_in_shards(options: StrategyOptions, mesh: Mesh, device: torch.device) -> Iterator[None]:
    """Shard parameters as they are created inside; see :func:`~lightning_zero.sharding.sharded_init.sharded_init`.

    Pretrained weights are read in slices; see :func:`~lightning_zero.integration.pretrained.read_in_slices`.
    """
    on_host = device_type(device).shares_host_memory or options.offload_params != "none"
    with (
        sharded_init(mesh, device, HostStore() if on_host else DeviceStore(device)),
        read_in_slices(mesh.world),
    ):
        yield


def release(engine: Engine) -> None:
    """Releases an engine, so that its module has ordinary parameters at full precision, and reports so. Collective."""
    engine.release()
    policy = engine.placement.precision
    # Of a whole module in 16 bits; otherwise its dtype was never reported as another.
    if policy.cast_buffers and policy.param_dtype is not None and policy.needs_master(policy.param_dtype):
        private.report(engine.module, dtype=torch.float32)


def make_engine(
    module: nn.Module,
    mesh: Mesh,
    options: StrategyOptions,
    precision: ZeroPrecision,
    device: torch.device,
    executor: Executor,
    optimizers: Sequence[Optimizer] | None,
    trains: bool = True,
    planned: Callable[[], Plan | None] = lambda: None,
) -> Engine:
    """Shard a module. Collective.

    Args:
        module: see :class:`~lightning_zero.engine.Engine`, as for ``optimized``.
        mesh: the process groups.
        options: of the strategy.
        precision: dtypes, and the loss scaler.
        device: that trains.
        executor: of copies and of work beside the training.
        optimizers: they will update some parameters of the module, and may also have others; ``None``: not known yet.
        trains: make masters; otherwise the engine holds only the shards in the dtype of the computation.
        planned: see :func:`~lightning_zero.integration.disk.make_disk_store`.
    """
    policy = ShardingPolicy.from_stage(options.stage)
    held = {id(p) for p in module.parameters()}
    optimized = [p for o in optimizers or () for p in parameters_of(o) if id(p) in held]
    whole = [p for p in parameters_kept_whole(options, optimizers or (), device) if id(p) in held]
    stores = _stores(options, mesh, device, executor, planned)
    engine = Engine(
        module,
        BucketPlacement(
            mesh,
            policy,
            precision.policy,
            device,
            *stores,
            executor,
            trains=trains,
            block=block_of(optimizers or ()),
            offload_fraction=options.offload_fraction,
            split_masters=options.master_layout == "split",
            gradients_rest=options.gradients_rest,
            accumulate_on_device=options.accumulate_on_device,
        ),
        optimized=None if optimizers is None else optimized,
        units=options.units,
        bucket_size_mb=options.bucket_size_mb,
        persistence_numel=options.persistence_numel,
        max_live_numel=options.max_live_numel,
        prefetch_mb=options.prefetch_mb,
        check_steps=options.check_steps,
        detect_data_edits=options.detect_data_edits,
        scaler=precision.shared_scaler,
        skip_nonfinite=options.skip_nonfinite,
        max_consecutive_skips=options.max_consecutive_skips,
        whole=whole,
        update_in_backward=options.update_in_backward,
        activations=activation_limits(options),
    )
    if (uneven := imbalance_of(bucket.layout for bucket in engine.buckets)) > MAX_IMBALANCE:
        rank_zero_warn(
            f"ZeroStrategy: the optimizer needs whole parameters, and over {mesh.shard.size} ranks they lie unevenly: "
            f"the fullest shards hold {uneven:.0%} more than the average, and memory and traffic grow accordingly. "
            "To reduce this, use a smaller shard_size, larger units at stage 3, a stage below 3, or an element-wise "
            "optimizer for the largest parameters"
        )
    engine.ends_steps = True
    return engine


@contextlib.contextmanager
def ending_steps(engine: Engine, reads: bool = True) -> Iterator[None]:
    """Ends the steps made inside at its exit; those that user code makes outside end where they are made.

    Args:
        engine: makes the steps.
        reads: see :meth:`Engine.end_step`.
    """
    engine.ends_steps = False
    try:
        yield
    finally:
        engine.ends_steps = True
    engine.end_step(reads)


def activation_limits(options: StrategyOptions) -> ActivationLimits | None:
    """The limits that say which saved tensors rest in host memory; ``None``: no tensor does."""
    return ActivationLimits(int(options.activation_offload_mb * 2**20)) if options.activation_offload else None


def parameters_kept_whole(
    options: StrategyOptions, optimizers: Iterable[Optimizer], device: torch.device
) -> list[Parameter]:
    """See :func:`~lightning_zero.update.kept_whole`."""
    return kept_whole(optimizers, device if options.offload_optimizer == "none" else HostStore.device)


def describe_memory(
    module: nn.Module,
    optimizers: Sequence[Optimizer] | None,
    options: StrategyOptions,
    precision: ZeroPrecision,
    device: torch.device,
    ranks: tuple[int, int, int],
    micro_batches: int,
    dtypes: Mapping[int, torch.dtype],
    trains: bool = True,
    clips_by_value: bool = False,
    averages: Sequence[TensorStore | None] = (),
    halved: str = remedies.BY_HAND,
) -> Memory:
    """Collects the inputs of plans, for the options of the run and for others that take less memory.

    Args:
        module: to be trained, before or after an engine has sharded it.
        optimizers: of its parameters; ``None``: for an evaluation.
        options: of the strategy.
        precision: of the run.
        device: that trains.
        ranks: number of nodes, processes on each, and the number of this rank.
        micro_batches: backward passes per step.
        dtypes: see :class:`~lightning_zero.planning.memory.Memory`.
        trains: see there.
        clips_by_value: see there.
        averages: see there.
        halved: see :func:`~lightning_zero.integration.remedies.activations`.
    """
    num_nodes, num_processes, rank = ranks
    world_size = num_nodes * num_processes
    setting = remedies.setting_of(options, shard_size(options, num_nodes, num_processes), precision.policy)
    default_size = default_shard_size(num_nodes, num_processes)
    return Memory(
        module=module,
        trains=trains,
        optimizers=optimizers or (),
        micro_batches=micro_batches,
        clips_by_value=clips_by_value,
        averages=averages,
        setting=setting,
        dtypes=dtypes,
        units=options.units,
        native=options.native_optimizer,
        device=device,
        world_size=world_size,
        rank=rank,
        candidates=list(remedies.candidates(options, setting, default_size, world_size)),
        hint=remedies.activations(None if optimizers is None else halved),
    )


def _stores(
    options: StrategyOptions,
    mesh: Mesh,
    device: torch.device,
    executor: Executor,
    planned: Callable[[], Plan | None],
) -> tuple[TensorStore, TensorStore]:
    """The stores of optimizer state, and of parameter shards. Collective."""
    stores: dict[str, TensorStore] = {"cpu": HostStore(pin_for=device), "none": DeviceStore(device)}
    if options.uses_disk:
        stores["nvme"] = make_disk_store(options, mesh, device, executor, planned)
    return stores[options.offload_optimizer], stores[options.offload_params]
