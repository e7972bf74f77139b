"""`lightning-zero inspect`: the contents of a checkpoint.

`--json` prints one object. Within a schema version fields are added, never renamed or removed; null means that the
checkpoint does not say. A name that ends in `bytes` counts bytes.

- `schema`: 1
- everything else: see `lightning_zero.tools.contents.Contents`
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_zero.checkpoint.errors import CheckpointError
from lightning_zero.cli.text import complain, facts_table, number, print_json, size
from lightning_zero.tools.contents import Contents, OptimizerInfo, describe

SCHEMA = 1


def run(path: Path, *, as_json: bool = False) -> int:
    """Prints what the checkpoint holds; returns the exit code."""
    try:
        contents = describe(path)
    except (CheckpointError, OSError) as error:
        return complain(error)
    if as_json:
        print_json(SCHEMA, asdict(contents))
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = 1000  # for other programs a row is a line
        console.print(render(contents))
    return 0


def render(contents: Contents) -> RenderableType:
    """Renders the contents for people."""
    parts: list[RenderableType] = [facts_table(_facts(contents)), ""]
    parts += [
        Text(f"Weights: {_weights(contents)}", style="bold"),
        Padding(_tensors(contents), (0, 0, 1, 2), expand=False),
    ]
    for index, optimizer in enumerate(contents.optimizers):
        parts.append(Text(f"Optimizer {index}", style="bold"))
        parts += [Padding(part, (0, 0, 1, 2), expand=False) for part in (_groups(optimizer), _state(optimizer))]
    parts.append(Text(f"total {size(contents.weights_bytes + contents.optimizer_bytes)} in tensors"))
    return Group(*parts)


def _facts(contents: Contents) -> dict[str, str]:
    known = {
        "file": f"{contents.file}, {size(contents.file_bytes)}",
        "step": contents.global_step,
        "epoch": contents.epoch,
        "Lightning": contents.lightning_version,
        "written by": ", ".join(f"{key} {value}" for key, value in (contents.written_by or {}).items()) or None,
        "loss scale": contents.loss_scale,
        "skipped steps": contents.skipped_steps,
        "callbacks": ", ".join(contents.callbacks) or None,
        "no tensors": ", ".join(contents.other_entries) or None,
        "not read": ", ".join(contents.opaque) or None,
        "keys": ", ".join(contents.keys),
    }
    return {name: str(value) for name, value in known.items() if value is not None}


def _weights(contents: Contents) -> str:
    return f"{number(len(contents.tensors), 'tensor')}, {size(contents.weights_bytes)}"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in ("bytes", "parameters") else "left")
    return table


def _tensors(contents: Contents) -> Table:
    table = _table("name", "shape", "dtype", "bytes", "")
    for tensor in contents.tensors:
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        same = f"same as {tensor.same_as}" if tensor.same_as else ""
        table.add_row(*map(Text, (tensor.name, shape, tensor.dtype, str(tensor.bytes), same)))
    return table


def _groups(optimizer: OptimizerInfo) -> Table:
    table = _table("group", "parameters", "hyperparameters")
    for index, group in enumerate(optimizer.groups):
        values = ", ".join(f"{name}={value}" for name, value in group.hyperparameters.items())
        table.add_row(str(index), str(len(group.parameters)), Text(values))
    return table


def _state(optimizer: OptimizerInfo) -> Table:
    table = _table("state", "parameters", "dtype", "bytes")
    for entry in optimizer.state:
        table.add_row(Text(entry.name), str(entry.parameters), ", ".join(entry.dtypes), str(entry.bytes))
    return table
