"""`lightning-zero import-deepspeed`: a DeepSpeed configuration as one of Hydra's, and what became of every key.

`--json` prints one object. Within a schema version fields are added, never renamed or removed.

- `schema`: 1
- `file`, `out`: the file that was read, and the one that was written; null where none was
- `groups`: the option of each Hydra group; `settings`: values by dotted keys
- `micro_batch`, `ranks`: samples that a rank takes at once, and the number of ranks; null: the file leaves it open
- `keys`: of every key `key`, `value`, `status`, `here`, `note`, `line`, `column`; a status is `kept`, `renamed`,
  `open`, `no_meaning`, `unsupported` or `unknown`
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lightning_zero.cli.text import complain, number, print_json, wide_console
from lightning_zero.config.deepspeed import to_yaml
from lightning_zero.migration import Import, MigrationError, Row, Status, import_deepspeed

SCHEMA = 1
TITLES = {
    Status.kept: ("Taken over", ""),
    Status.renamed: ("Taken over under another name", ""),
    Status.no_meaning: ("No meaning here", ""),
    Status.open: ("Left open in the file: to be given here", "yellow"),
    Status.unsupported: ("Not supported", "yellow"),
    Status.unknown: ("Unknown", "red"),
}


def run(
    path: Path,
    out: Path | None,
    *,
    devices: int | None,
    nodes: int | None,
    experiment: bool,
    strict: bool,
    dry_run: bool,
    overwrite: bool,
    as_json: bool = False,
) -> int:
    """Imports, writes and prints; returns the exit code."""
    out = out or Path(f"{path.stem}.yaml")
    try:
        if path.is_dir():
            raise MigrationError(f"{path} is a folder; expected a file such as ds_config.json.")
        if not dry_run:
            _check_out(path, out)
        imported = import_deepspeed(path, ranks=None if devices is None else devices * (nodes or 1))
        if imported.ranks is None and nodes is not None:
            imported = import_deepspeed(path, ranks=nodes)  # one on each, where the file leaves it open
        _set_ranks(imported, devices, nodes)
        refused = strict and bool(imported.of(Status.unsupported, Status.unknown))
        written = None if refused or dry_run else out
        if written is not None:
            _write(written, to_yaml(imported, experiment=experiment), overwrite)
    except (MigrationError, OSError) as error:
        return complain(error)
    if as_json:
        print_json(SCHEMA, _as_json(imported, path, written))
    else:
        wide_console().print(render(imported, written))
    if refused:
        return complain(ValueError(f"{path} has keys that are unknown or not supported, and --strict is given"))
    return 0


def _check_out(path: Path, out: Path) -> None:
    if out.suffix not in (".yaml", ".yml"):
        raise MigrationError(f"{out} is not the name of a YAML file, such as config.yaml.")
    if not out.parent.is_dir():
        raise MigrationError(f"{out.parent} is no folder: make it, or give another OUT.")
    if out.exists() and path.exists() and out.samefile(path):
        raise MigrationError(f"{out} is the file that is read: give another OUT.")


def _set_ranks(imported: Import, devices: int | None, nodes: int | None) -> None:
    """Sets the Trainer's ranks: those asked for, or those that the file's batch is for."""
    if imported.ranks is not None:
        if devices is None and imported.ranks % (nodes or 1):
            raise MigrationError(
                f"train_batch_size is for {imported.ranks} ranks, which {nodes} machines cannot share evenly: use "
                "another --nodes."
            )
        imported.settings["trainer.devices"] = devices or imported.ranks // (nodes or 1)
    if nodes is not None:
        imported.settings["trainer.num_nodes"] = nodes


def _write(path: Path, text: str, overwrite: bool) -> None:
    try:
        with path.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise MigrationError(f"{path} exists: give another OUT, or --overwrite.") from None


def _as_json(imported: Import, path: Path, out: Path | None) -> dict[str, Any]:
    return {
        "file": str(path),
        "out": None if out is None else str(out),
        "groups": imported.groups,
        "settings": imported.settings,
        "micro_batch": imported.micro_batch,
        "ranks": imported.ranks,
        "keys": [asdict(row) for row in imported.rows],
    }


def render(imported: Import, out: Path | None) -> RenderableType:
    """Renders the table for people, what needs attention last."""
    parts: list[RenderableType] = []
    for status, (title, style) in TITLES.items():
        if rows := imported.of(status):
            parts += [Text(title, style=f"bold {style}"), Padding(_table(rows), (0, 0, 1, 2), expand=False)]
    counts = ", ".join(
        f"{len(rows)} {title.split(':')[0].lower()}"
        for status, (title, _) in TITLES.items()
        if (rows := imported.of(status))
    )
    parts.append(Text(f"{number(len(imported.rows), 'key')}: {counts}"))
    if out is not None:
        parts.append(
            Text(f"{out}: {', '.join(f'{name}={option}' for name, option in imported.groups.items() if option)}")
        )
    return Group(*parts)


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("key", "value", "here", ""):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, (row.key, _value(row), row.here, row.note)))
    return table


def _value(row: Row) -> str:
    if isinstance(row.value, Mapping):
        return "{...}"
    return "" if row.value is None and row.line is None else json.dumps(row.value)
