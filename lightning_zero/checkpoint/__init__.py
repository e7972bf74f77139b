"""Checkpoints: state by parameter name, unsharded and at full precision, in one file or in a folder of files.

Terms:
    record: an entry of a zip archive; it contains the bytes of one tensor's storage.
    slice: a range of a tensor's elements in memory order; :class:`~lightning_zero.checkpoint.shards.Slice` is a slice
        of a parameter that this rank owns.
    box: an N-dimensional part of a tensor. ``torch.distributed.checkpoint`` (DCP) stores tensors in boxes; a slice
        consists of several boxes.
    tile: the part of a slice that is read, copied or written at a time.
    source: holds the values of lazy tensors: the shards of an engine, or a checkpoint on a disk.
    draft: a file or folder under a temporary name, until it is complete.
    container: the form of a checkpoint on a disk, a file or a folder.

The container of one file (``file``, ``remote_file``) and that of a folder (``folder``, ``folder_reader``) do not import
each other. They share archives, tiles, drafts and the exchange of errors between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint import archive_reader, file, folder, folder_reader, remote_file, rng
from lightning_zero.checkpoint.archive_reader import give_back_pages
from lightning_zero.checkpoint.background import Background
from lightning_zero.checkpoint.commit import INCOMPLETE, Save, completed_at, recover, recover_all, remove
from lightning_zero.checkpoint.errors import CheckpointError, together
from lightning_zero.checkpoint.remote import Location, RemotePath, locate, locate_first
from lightning_zero.checkpoint.shards import fetch_for_first, follow_first, full_on_first
from lightning_zero.checkpoint.stand_ins import pickled_as_masters
from lightning_zero.checkpoint.state import (
    FullPrecision,
    check_module_state_dict,
    check_optimizer_state_dict,
    load_module_state_dict,
    load_optimizer_state_dict,
    load_shadow_state_dict,
    module_state_dict,
    optimizer_state_dict,
    state_for,
)
from lightning_zero.engine import Engine
from lightning_zero.sharding import Group

__all__ = [
    "CONTAINERS",
    "Background",
    "CheckpointError",
    "FullPrecision",
    "Save",
    "begin",
    "check_module_state_dict",
    "check_optimizer_state_dict",
    "completed_at",
    "fetch_for_first",
    "follow_first",
    "full_on_first",
    "give_back_pages",
    "load",
    "load_module_state_dict",
    "load_optimizer_state_dict",
    "load_shadow_state_dict",
    "locate",
    "locate_first",
    "module_state_dict",
    "optimizer_state_dict",
    "pickled_as_masters",
    "recover_all",
    "remove",
    "rng",
    "state_for",
]

CONTAINERS: dict[str, Callable[..., Save]] = {"full": file.begin, "sharded": folder.begin}
# The containers on file systems that are reached by a URL.
REMOTE_CONTAINERS: dict[str, Callable[..., Save]] = {"full": remote_file.begin, "sharded": folder.begin}


def begin(
    container: str,
    checkpoint: dict[str, Any],
    path: Location,
    engines: Sequence[Engine],
    world: Group,
    checksums: bool = True,
) -> Save:
    """Begin to write rank 0's ``checkpoint``. Collective.

    Args:
        container: one of :data:`CONTAINERS`.
        checkpoint: Lightning's checkpoint or, for a file, anything that :func:`torch.save` accepts; it may contain lazy
            tensors.
        path: path of the checkpoint; an older one there is replaced when the new one is complete and on the disk.
        engines: the engines that hold the values of the lazy tensors; empty if there are none.
        world: the group of all ranks.
        checksums: write the CRC-32 of every tensor, as :func:`torch.save` does; otherwise 0 is written.

    Raises:
        CheckpointError: a rank has failed; raised on all ranks.
    """
    folder_reader.open_local_files()
    containers = REMOTE_CONTAINERS if isinstance(path, RemotePath) else CONTAINERS
    return containers[container](checkpoint, path, engines, world, checksums)


def load(path: Location, world: Group, weights_only: bool = True, checksums: bool = True) -> dict[str, Any]:
    """Read a checkpoint of any container, or one that :func:`torch.save` wrote. Collective.

    Args:
        path: path of the file or folder.
        world: the group of all ranks; each rank verifies a part of the checksums.
        weights_only: see :func:`torch.load`.
        checksums: read the whole checkpoint once and compare its checksums, if it has any.

    Returns:
        The checkpoint on the CPU; each rank reads only the parts of the tensors that it uses.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or holds no dictionary, or some ranks do not see it;
            raised on all ranks.
        FileNotFoundError: no rank sees it; raised on all ranks.
    """

    def is_folder() -> bool:
        if isinstance(path, Path):
            recover(path)
        return path.is_dir()

    what = f"read the checkpoint {path}"
    found = any(together(world, is_folder, what))
    if path.name.endswith(INCOMPLETE):
        raise CheckpointError(f"could not {what}: it was never completed; load the last complete one beside it")
    loaded = (folder_reader if found else archive_reader).load(path, world, weights_only, checksums)
    if not isinstance(loaded, dict):
        raise CheckpointError(
            f"could not {what}: it holds a {type(loaded).__name__}, and a checkpoint is a dictionary. Give the path of "
            "a checkpoint; torch.load reads other objects"
        )
    return loaded
