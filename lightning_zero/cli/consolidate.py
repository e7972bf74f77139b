"""`lightning-zero consolidate`: a checkpoint folder as one file."""

from __future__ import annotations

from pathlib import Path

from lightning_zero.checkpoint.errors import CheckpointError
from lightning_zero.cli.export import DTYPES
from lightning_zero.cli.text import complain, number, size
from lightning_zero.tools.consolidate import consolidate


def run(folder: Path, path: Path, *, dtype: str | None, overwrite: bool) -> int:
    """Consolidates, and prints what was written; returns the exit code."""
    try:
        written = consolidate(folder, path, dtype=None if dtype is None else DTYPES[dtype], overwrite=overwrite)
    except (CheckpointError, OSError) as error:
        return complain(error)
    print(
        f"{path}: {number(written.tensors, 'tensor')}, state of {number(written.optimizers, 'optimizer')}, "
        f"{size(written.bytes)}"
    )
    return 0
