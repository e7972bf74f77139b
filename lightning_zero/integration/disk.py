"""The store of optimizer state on a disk, made as the options say, with what a user should know of that disk."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero.integration.options import StrategyOptions
from lightning_zero.planning import Plan
from lightning_zero.sharding import Mesh
from lightning_zero.storage import DiskError, DiskStore, Executor
from lightning_zero.storage.run_folder import FileSystem, RunFolder, file_system

_PROBED_BYTES = 1 << 29  # of a rank's state: with less a step is over before a better way of transfers was found
_PROBE_SECONDS = 1.0


def make_disk_store(
    options: StrategyOptions,
    mesh: Mesh,
    device: torch.device,
    executor: Executor,
    planned: Callable[[], Plan | None],
) -> DiskStore:
    """Make a rank's folder, with room for all that it is planned to hold there. Collective.

    Args:
        options: of the strategy.
        mesh: the process groups.
        device: that trains.
        executor: of the disk's reads and writes.
        planned: what the rank will hold; ``None``: nobody knows, and room is looked for as it is needed.

    Raises:
        DiskError: on all ranks, where one of them cannot have its folder, or the room.
    """
    assert options.nvme_path is not None
    base, plan = Path(options.nvme_path), planned()
    here = socket.gethostname()
    (run, _), *_ = ranks = mesh.world.all_gather_object((_new_run(), here), "name the run")
    first = [node for _, node in ranks].index(here)  # the rank of this node that looks for the best way of transfers
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
    if failure is not None:
        raise failure
    for rank, (arguments, _) in enumerate(outcomes):
        if arguments is not None:
            code, message, *_ = arguments
            raise DiskError(code, f"rank {rank}: {message}", str(base))
    assert store is not None
    if (found := outcomes[first][1]) is not None:
        store.opened.pool = found.pool()
    elsewhere = [RunFolder.place(base, run, rank) for rank, (_, node) in enumerate(ranks) if node != here]
    warn_of(base, file_system(base), store.opened.direct, elsewhere)
    mesh.world.all_gather_object(None, "look at the folders")  # before one of them may be removed
    return store


def _new_run() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def warn_of(base: Path, system: FileSystem, direct: bool, elsewhere: list[Path]) -> None:
    """Say what makes the disk a bad place.

    Args:
        base: the path.
        system: that it is on.
        direct: whether it takes ``O_DIRECT``.
        elsewhere: folders of ranks of other nodes, which should not be seen from here.
    """
    if system.in_memory:
        rank_zero_warn(
            f"nvme_path={str(base)!r} is on {system.kind}: what should rest on a disk takes host memory there. Choose "
            "a folder on a local disk, or offload_optimizer='cpu'"
        )
    elif system.on_network or any(folder.exists() for folder in elsewhere):
        kind = f"on {system.kind}" if system.on_network else "shared by several nodes"
        rank_zero_warn(
            f"nvme_path={str(base)!r} is {kind}: all optimizer state crosses the network twice in every step. Choose a "
            "folder on a local disk of each node"
        )
    elif not direct:
        rank_zero_warn(
            f"the file system of nvme_path={str(base)!r} ({system.kind or 'unknown'}) refuses O_DIRECT: optimizer "
            "state goes through the page cache, which is slower and takes memory that the system gives back under "
            "pressure. ext4 and XFS on a local disk do not"
        )
