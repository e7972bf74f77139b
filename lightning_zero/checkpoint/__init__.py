"""Checkpoints: state by parameter name, unsharded, at full precision, in one file or in a folder of many.

Terms:
    record: an entry of a zip archive, with the bytes of one tensor's storage.
    slice: a range of a tensor's elements in the order of memory; :class:`~lightning_zero.checkpoint.shards.Slice` is
        one of a parameter that this rank owns.
    box: an N-dimensional part of a tensor, of which a folder by ``torch.distributed.checkpoint`` (DCP) consists; a
        slice is several.
    tile: as much of a slice as is read, copied or written at a time.
    source: holds the values of lazy tensors: the shards of an engine, or a checkpoint on the disk.
    draft: a file or folder under a temporary name, until it is complete.

The container of one file (``file``, ``remote_file``) and that of many (``folder``, ``folder_reader``) do not know each
other; they share archives, tiles, drafts and how all ranks learn of errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint import archive_reader, file, folder, folder_reader, remote_file, rng
from lightning_zero.checkpoint.archive_reader import give_back_pages
from lightning_zero.checkpoint.background import Background
from lightning_zero.checkpoint.commit import INCOMPLETE, Save, recover, recover_all, remove
from lightning_zero.checkpoint.errors import CheckpointError, together
from lightning_zero.checkpoint.remote import Location, RemotePath, locate
from lightning_zero.checkpoint.shards import fetch_for_first, follow_first, full_on_first
from lightning_zero.checkpoint.state import (
    FullPrecision,
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
    "check_optimizer_state_dict",
    "fetch_for_first",
    "follow_first",
    "full_on_first",
    "give_back_pages",
    "load",
    "load_module_state_dict",
    "load_optimizer_state_dict",
    "load_shadow_state_dict",
    "locate",
    "module_state_dict",
    "optimizer_state_dict",
    "recover_all",
    "remove",
    "rng",
    "state_for",
]

CONTAINERS: dict[str, Callable[..., Save | None]] = {"full": file.begin, "sharded": folder.begin}
# Those of a file system that is reached by a URL.
REMOTE_CONTAINERS: dict[str, Callable[..., Save]] = {"full": remote_file.begin, "sharded": folder.begin}


def begin(
    container: str,
    checkpoint: dict[str, Any],
    path: Location,
    engines: Sequence[Engine],
    world: Group,
    checksums: bool = True,
) -> Save | None:
    """Begin to write rank 0's ``checkpoint``. Collective.

    Args:
        container: one of :data:`CONTAINERS`.
        checkpoint: Lightning's, or for a file anything that :func:`torch.save` takes, with lazy tensors in it.
        path: what is there is replaced when the new one is complete and on the disk.
        engines: hold the values of the lazy tensors; none where there are none.
        world: all ranks.
        checksums: write the CRC-32 of every tensor, as :func:`torch.save` does; otherwise it is 0.

    Returns:
        The save; ``None``, with nothing written, where ranks would write one file and do not see it.

    Raises:
        CheckpointError: on all ranks, if one of them fails.
    """
    containers = REMOTE_CONTAINERS if isinstance(path, RemotePath) else CONTAINERS
    return containers[container](checkpoint, path, engines, world, checksums)


def load(path: Location, world: Group, weights_only: bool = True, checksums: bool = True) -> Any:
    """Read a checkpoint of any container, or one that :func:`torch.save` wrote. Collective.

    Args:
        path: of the file or the folder.
        world: all ranks; each verifies its share.
        weights_only: see :func:`torch.load`.
        checksums: read everything once and compare its checksums, where there are some.

    Returns:
        The checkpoint on the CPU; each rank reads only what it uses of its tensors.

    Raises:
        CheckpointError: on all ranks, where it is incomplete or damaged, or some do not see it.
        FileNotFoundError: on all ranks, where none sees it.
    """

    def is_folder() -> bool:
        if isinstance(path, Path):
            recover(path)
        return path.is_dir()

    what = f"read the checkpoint {path}"
    found = any(together(world, is_folder, what))
    if path.name.endswith(INCOMPLETE):
        raise CheckpointError(f"could not {what}: it was never completed; load the last complete one beside it")
    return (folder_reader if found else archive_reader).load(path, world, weights_only, checksums)
