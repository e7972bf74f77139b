"""`lightning-zero export`: the weights of a checkpoint as safetensors, for other programs.

`--json` prints one object. Within a schema version fields are added, never renamed or removed.

- `schema`: 1
- `directory`: the folder
- everything else: see `lightning_zero.tools.export.Exported`
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
import typer

from lightning_zero.checkpoint.errors import CheckpointError
from lightning_zero.cli.text import complain, number, print_json, size
from lightning_zero.planning.devices import parse_size
from lightning_zero.tools.export import Layout, export

SCHEMA = 1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LISTED = 5  # names of a kind that are printed at most


def run(
    path: Path,
    directory: Path,
    layout: Layout,
    *,
    dtype: str | None,
    strip_prefix: str,
    max_shard_size: str,
    config: Path | None,
    overwrite: bool,
    as_json: bool = False,
) -> int:
    """Exports, and prints what was written; returns the exit code."""
    try:
        limit = parse_size(max_shard_size)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--max-shard-size") from None
    if config is not None and layout != "hf":
        raise typer.BadParameter("only --format hf writes a configuration", param_hint="--config")
    try:
        exported = export(
            path,
            directory,
            layout,
            dtype=None if dtype is None else DTYPES[dtype],
            strip_prefix=strip_prefix,
            max_shard_bytes=limit,
            config=config,
            overwrite=overwrite,
        )
    except (CheckpointError, OSError) as error:
        return complain(error)
    if as_json:
        return print_json(SCHEMA, {"directory": str(directory)} | asdict(exported))
    files = exported.files[0] if len(exported.files) == 1 else number(len(exported.files), "file")
    print(f"{directory}: {files}, {number(exported.tensors, 'tensor')}, {size(exported.bytes)}, verified")
    if exported.prefix:
        print(f"stripped: {exported.prefix}")
    for name, kept in exported.tied.items():
        print(f"tied: {name} is {kept}, stored once")
    _list("left out, beginning otherwise", exported.outside)
    _list("left out, no tensor", exported.extra)
    if layout == "hf" and exported.common_prefix:
        print(
            f"note: all names begin with {exported.common_prefix!r}; if that is where the LightningModule keeps its "
            "model, from_pretrained needs --strip-prefix (up to there) to find the weights"
        )
    return 0


def _list(what: str, names: list[str]) -> None:
    if names:
        rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        print(f"{what}: {', '.join(names[:_LISTED])}{rest}")
