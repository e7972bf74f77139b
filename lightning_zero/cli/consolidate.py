"""`lightning-zero consolidate`: a checkpoint as one ordinary file.

`--json` prints one object. Within a schema version fields are added, never renamed or removed.

- `schema`: 1
- `out`: the file
- everything else: see `lightning_zero.tools.consolidate.Consolidated`
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from lightning_zero.checkpoint.errors import CheckpointError
from lightning_zero.cli.export import DTYPES
from lightning_zero.cli.text import complain, number, print_json, size
from lightning_zero.tools.consolidate import consolidate

SCHEMA = 1


def run(source: Path, path: Path, *, dtype: str | None, overwrite: bool, as_json: bool = False) -> int:
    """Consolidates, and prints what was written; returns the exit code."""
    try:
        written = consolidate(source, path, dtype=None if dtype is None else DTYPES[dtype], overwrite=overwrite)
    except (CheckpointError, OSError) as error:
        return complain(error)
    if as_json:
        return print_json(SCHEMA, {"out": str(path)} | asdict(written))
    print(
        f"{path}: {number(written.tensors, 'tensor')}, state of {number(written.optimizers, 'optimizer')}, "
        f"{size(written.bytes)}"
    )
    return 0
