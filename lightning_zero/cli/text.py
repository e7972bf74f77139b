"""Facts and errors as text for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_LONGEST = 300  # characters of what other software says


def size(count: int | str | None) -> str:
    """Writes a number of bytes in a unit that suits it; words stay, None is "unknown"."""
    if not isinstance(count, int):
        return count or "unknown"
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024.0:
            break
        value, unit = value / 1024.0, larger
    return f"{value:.4g} {unit}"


def number(count: int, noun: str) -> str:
    """Writes a number with its noun: "1 tensor", "2 tensors"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def facts_table(facts: Mapping[str, str]) -> RenderableType:
    """Renders a line for each fact, its name before it."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def wide_console() -> Console:
    """Makes what prints tables: on a terminal as wide as it is; for other programs a row is a line."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000
    return console


def print_json(schema: int, facts: Mapping[str, Any]) -> int:
    """Prints the one object of `--json`, the version of its schema and the facts; returns the exit code."""
    print(json.dumps({"schema": schema} | dict(facts), indent=2))
    return 0


def complain(error: Exception) -> int:
    """Prints an error and what to do about it; returns the exit code."""
    print(f"error: {said(error)}", file=sys.stderr)
    return 1


def said(error: BaseException) -> str:
    """Writes what an error says; for one of the system the file comes first."""
    if isinstance(error, OSError) and error.strerror and error.filename and not error.__cause__:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def in_a_line(error: BaseException) -> str:
    """Writes the kind of an error of other software, and the beginning of what it says, as one line."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST].rsplit(' ', 1)[0]} ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
