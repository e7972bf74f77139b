"""The containers of a checkpoint: one file, or a folder of many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_zero.checkpoint import full, sharded, stored
from lightning_zero.checkpoint.saving import Save, recover, together
from lightning_zero.engine import Engine, Group

CONTAINERS: dict[str, Callable[..., Save | None]] = {"full": full.begin, "sharded": sharded.begin}


def begin(
    container: str, checkpoint: dict[str, Any], path: Path, engine: Engine | None, world: Group, checksums: bool = True
) -> Save | None:
    """Begin to write rank 0's ``checkpoint``. Collective.

    Args:
        container: one of :data:`CONTAINERS`.
        checkpoint: Lightning's, with lazy tensors in it.
        path: what is there is replaced when the new one is complete and on the disk.
        engine: holds the values of the lazy tensors; ``None``: there are none.
        world: all ranks.
        checksums: write the CRC-32 of every tensor.

    Returns:
        What writes it; ``None``, with nothing written, where ranks would write one file and do not see it.

    Raises:
        CheckpointError: on all ranks, if one of them fails.
    """
    return CONTAINERS[container](checkpoint, path, engine, world, checksums)


def load(path: Path, world: Group, weights_only: bool = True, checksums: bool = True) -> Any:
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
        recover(path)
        return path.is_dir()

    read = stored.load if any(together(world, is_folder, f"read the checkpoint {path}")) else full.load
    return read(path, world, weights_only, checksums)
