"""Makes the store of optimizer state on a disk from the options, and warns of unsuitable disks."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero.integration.options import StrategyOptions
from lightning_zero.planning import Plan
from lightning_zero.sharding import Group, Mesh
from lightning_zero.storage import DiskError, DiskStore, Executor, TensorStore
from lightning_zero.storage.run_folder import FileSystem, RunFolder, file_system

_PROBED_BYTES = 1 << 29  # least state of a rank for a probe: with less, a step ends before a probe would
_PROBE_SECONDS = 1.0


def make_disk_store(
    options: StrategyOptions,
    mesh: Mesh,
    device: torch.device,
    executor: Executor,
    planned: Callable[[], Plan | None],
) -> DiskStore:
    """Make a rank's folder, with room for everything that the plan puts there. Collective.

    Args:
        options: of the strategy.
        mesh: the process groups.
        device: that trains.
        executor: of the disk's reads and writes.
        planned: returns the plan; ``None``: it is not known, and room is reserved as it is needed.

    Raises:
        DiskError: on all ranks, if one of them cannot make its folder or has no room.
    """
    assert options.nvme_path is not None
    base, plan = Path(options.nvme_path), planned()
    system = file_system(base)
    warn_of_memory(base, system)  # before it is taken
    here = socket.gethostname()
    (run, _), *_ = ranks = mesh.world.all_gather_object((_new_run(), here), "name the run")
    first = [node for _, node in ranks].index(here)  # the rank of this node that probes the disk
    store, failure, way = None, None, None
    try:
        folder = RunFolder(base, run, mesh.world.rank)
        store = DiskStore.in_folder(
            folder, executor, options.nvme_buffer_bytes, pin_for=device, checksums=options.nvme_checksums
        )
        if plan is not None:
            store.reserve(plan.held.disk)
            if mesh.world.rank == first and plan.held.disk >= _PROBED_BYTES:
                way = store.choose_way(_PROBE_SECONDS)
    except DiskError as error:
        failure = error
    outcome = None if failure is None else failure.args, way
    outcomes = mesh.world.all_gather_object(outcome, "make folders on the disks")
    _raise_together(failure, [arguments for arguments, _ in outcomes], str(base))
    assert store is not None
    if (found := outcomes[first][1]) is not None:
        store.opened.pool = found.pool()
    elsewhere = [RunFolder.place(base, run, rank) for rank, (_, node) in enumerate(ranks) if node != here]
    warn_of(base, system, store.opened.direct, elsewhere)
    if options.async_save:
        rank_zero_warn(
            "async_save=True copies the state that rests on the disk to host memory at each save. With "
            "async_save=False a checkpoint is written tile by tile"
        )
    mesh.world.all_gather_object(None, "look at the folders")  # no folder may be removed before all have looked
    return store


def reserve(store: TensorStore, world: Group, planned: Callable[[], Plan | None]) -> None:
    """Reserve room for everything that a plan puts into a store that an earlier run has made. Collective.

    Args:
        store: of optimizer state; one in memory needs no room on a disk.
        world: of all ranks.
        planned: see :func:`make_disk_store`.

    Raises:
        DiskError: on all ranks, if one of them has no room.
    """
    if not isinstance(store, DiskStore) or (plan := planned()) is None:
        return
    failure = None
    try:
        store.reserve(plan.held.disk)
    except DiskError as error:
        failure = error
    outcomes = world.all_gather_object(None if failure is None else failure.args, "reserve room on the disks")
    _raise_together(failure, outcomes, str(store.opened.path))


def _raise_together(failure: DiskError | None, outcomes: Sequence[tuple[Any, ...] | None], path: str) -> None:
    """Raise this rank's failure, or the first one of the others, whose arguments are ``outcomes``."""
    if failure is not None:
        raise failure
    for rank, arguments in enumerate(outcomes):
        if arguments is not None:
            code, message, *_ = arguments
            raise DiskError(code, f"rank {rank}: {message}", path)


def _new_run() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def warn_of_memory(base: Path, system: FileSystem) -> None:
    """Warn of a path whose files take host memory."""
    if system.in_memory:
        rank_zero_warn(
            f"nvme_path={str(base)!r} is on {system.kind}, a file system in host memory, so that the state takes host "
            "memory there. Choose a folder on a local disk, or offload_optimizer='cpu'"
        )


def warn_of(base: Path, system: FileSystem, direct: bool, elsewhere: list[Path]) -> None:
    """Warn of a path that is slow.

    Args:
        base: the path.
        system: the file system of the path.
        direct: whether it supports ``O_DIRECT``.
        elsewhere: folders of ranks on other nodes; on a local disk none of them exists here.
    """
    if system.on_network or any(folder.exists() for folder in elsewhere):
        kind = f"on {system.kind}" if system.on_network else "shared by several nodes"
        rank_zero_warn(
            f"nvme_path={str(base)!r} is {kind}: all optimizer state crosses the network twice in every step. Choose a "
            "folder on a local disk of each node"
        )
    elif not direct and not system.in_memory:
        rank_zero_warn(
            f"the file system of nvme_path={str(base)!r} ({system.kind or 'unknown'}) refuses O_DIRECT. Therefore "
            "optimizer state goes through the page cache, which is slower and takes memory that the system frees only "
            "under pressure. ext4 and XFS on a local disk support O_DIRECT"
        )
