"""The result of a migration: what became of every key, and the groups and settings that say the same here."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """The fates of a key."""

    kept = "kept"
    renamed = "renamed"
    open = "open"  # "auto": to be given here
    no_meaning = "no_meaning"
    unsupported = "unsupported"
    unknown = "unknown"


@dataclass(frozen=True)
class Row:
    """A key of the file, and what became of it.

    Attributes:
        key: its dotted path.
        value: as the file has it; None for a default that the file leaves out.
        status: what became of it.
        here: what says the same, as a dotted key of the Hydra groups; "" if nothing does.
        note: why, or what to do.
        line: of the value in the file; None in a dictionary.
        column: the same.
    """

    key: str
    value: Any
    status: Status
    here: str = ""
    note: str = ""
    line: int | None = None
    column: int | None = None


@dataclass
class Import:
    """A configuration, taken over.

    Attributes:
        name: of the file; "" for a dictionary.
        rows: what became of every key, in the file's order, then of defaults that it relies on.
        groups: the chosen option of each Hydra group.
        settings: values by dotted keys below the groups, `data` and `trainer`.
        sources: the keys of the file that the settings come from.
        micro_batch: samples of a rank in a micro-batch; None if the file leaves it open.
        ranks: number of ranks that the batch is for; None if the file leaves it open.
    """

    name: str
    rows: list[Row] = field(default_factory=list)
    groups: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    micro_batch: int | None = None
    ranks: int | None = None

    def of(self, *status: Status) -> list[Row]:
        """Picks the rows of a status."""
        return [row for row in self.rows if row.status in status]

    def below(self, prefix: str) -> dict[str, Any]:
        """Picks the settings below a dotted prefix, by the rest of their keys."""
        start = f"{prefix}."
        return {key.removeprefix(start): value for key, value in self.settings.items() if key.startswith(start)}
