"""Compares a document with the table of keys: checks names and types, makes a row of every key, copies plain values."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_zero.migration.deepspeed_keys import KEYS
from lightning_zero.migration.keys import Key, is_beyond_floats
from lightning_zero.migration.located import Document, MigrationError
from lightning_zero.migration.report import Import, Row, Status

AUTO = "auto"


class Classification:
    """Fills an `Import` by the table; a subclass decides what depends on several keys.

    Args:
        document: the configuration.

    Attributes:
        result: the import.
        values: values by path, of keys that are neither null nor "auto".
        parts: of every path in the document, the keys that lead to the value.
        auto: paths of the keys that are "auto".
        rows: rows by path.
        number: the stage.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self.result = Import(document.name)
        self.values: dict[str, Any] = {}
        self.parts: dict[str, tuple[str, ...]] = {}
        self.auto: list[str] = []
        self.rows: dict[str, Row] = {}
        self.number = 0

    # -- reading ------------------------------------------------------------------------------------------------

    def _flatten(self, values: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[str]:
        """Checks names and types; yields the paths in the file's order."""
        for name, value in values.items():
            parts = (*above, name)
            path = self._path(parts)
            yield path
            key = KEYS.get(path)
            if key is None:
                self._unknown(path, value)
            elif value is None:
                self._row(path, Status.no_meaning, note="null: not set")
            elif value == AUTO:
                self.auto.append(path)
            elif not key.kind.fits(value):
                raise self.document.error(parts, f"={_shown(value)} must be {key.kind.words}.{_hint(value)}")
            else:
                self.values[path] = value
                if isinstance(value, Mapping) and key.computed:
                    yield from self._flatten(value, parts)
                elif isinstance(value, Mapping) and key.inside is not None:
                    yield from self._inside(key, value, parts)

    def _inside(self, key: Key, value: Mapping[str, Any], parts: tuple[str, ...]) -> Iterator[str]:
        assert key.inside is not None
        for name, item in value.items():
            if name not in key.inside:
                path = self._path((*parts, name))
                yield path
                self._unknown(path, item, [f"{key.name}.{known}" for known in sorted(key.inside)])

    def _path(self, parts: tuple[str, ...]) -> str:
        """Makes the path to a value; quotes names with a dot, which no key has."""
        path = ".".join(f'"{part}"' if "." in part else part for part in parts)
        self.parts[path] = parts
        return path

    def _unknown(self, path: str, value: Any, known: list[str] | None = None) -> None:
        *above, name = self.parts[path]
        if name.startswith(("_", "/", "#")) or name.lower().startswith("comment"):
            self._row(path, Status.no_meaning, note="a comment")
            return
        near = nearest(".".join((*above, name)), known)
        hint = f"did you mean {near}? " if near else ""
        said = "DeepSpeed has no such key"
        if "." in name:
            said = "DeepSpeed reads a dot in a name as a part of it: write objects in one another"
        self._row(path, Status.unknown, note=hint + said, value=value)

    def _row(self, path: str, status: Status, here: str = "", note: str = "", value: Any = None) -> None:
        place = self.document.places.get(self.parts.get(path, ()))
        line, column = place or (None, None)
        self.rows[path] = Row(path, self.values.get(path, value), status, here, note, line, column)

    def _error(self, path: str, message: str) -> MigrationError:
        return self.document.error(self.parts[path], message)

    def _check_names(self) -> None:
        """Refuses two names of one setting."""
        for old, new in (
            ("bfloat16", "bf16"),
            ("zero_optimization.cpu_offload", "zero_optimization.offload_optimizer"),
            ("zero_optimization.cpu_offload_param", "zero_optimization.offload_param"),
            ("zero_optimization.cpu_offload_params", "zero_optimization.offload_param"),
        ):
            if self.values.get(old) and self.values.get(new):
                raise self._error(old, f" is an old name of {new}, which is there, too: keep {new}.")

    # -- rows from the table --------------------------------------------------------------------------------------

    def _classify(self, key: Key, value: Any) -> None:
        """Makes the row of a value, and its setting."""
        if not key.at(self.number):
            stages = " and ".join(map(str, sorted(key.stages))) if len(key.stages) < 3 else "1 to 3"
            stages = "0 to 2" if key.stages == {0, 1, 2} else stages
            self._row(key.name, Status.no_meaning, note=f"it is for stage {stages}; this file has stage {self.number}")
        elif reason := self._out_of_use(key):
            self._row(key.name, reason[0], note=reason[1])
        elif value in key.as_here or (key.switched and not _is_on(value)):
            self._row(key.name, Status.kept, note="as it is here")
        elif key.moot:
            self._row(key.name, Status.no_meaning, note=key.moot)
        elif key.remedy:
            self._row(key.name, Status.unsupported, note=key.remedy)
        else:
            self._set(key.name, key.here, key.convert(value), key.note)

    def _out_of_use(self, key: Key) -> tuple[Status, str] | None:
        """Tells whether another key switches this one off, and why; None if it is in use."""
        raise NotImplementedError

    def _set(self, path: str, here: str, value: Any, note: str = "", status: Status | None = None) -> None:
        """Sets a value here, and makes its row."""
        known = self.result.settings.get(here, value)
        if known != value:
            other = self.result.sources[here]
            raise self._error(path, f"={self.values[path]} contradicts {other}={self.values[other]}: keep one of them.")
        self.result.settings[here] = value
        self.result.sources[here] = path
        named = Status.kept if path.rpartition(".")[2] == here.rpartition(".")[2] else Status.renamed
        changed = f"={value}" if value != self.values.get(path) else ""
        self._row(path, status or named, f"{here}{changed}", note)

    def _open(self, path: str) -> None:
        """Makes the row of an "auto"."""
        key = KEYS[path]
        if not key.at(self.number):
            self._row(path, Status.no_meaning, note=f"it is not for stage {self.number}", value=AUTO)
        elif key.auto_here:
            self._row(path, Status.renamed, key.here, key.auto_here, AUTO)
        elif key.here:
            source = f"Hugging Face's Trainer has it from {key.auto}; " if key.auto else ""
            self._row(path, Status.open, key.here, f"{source}give it here", AUTO)
        else:
            self._row(path, Status.no_meaning, note=key.moot or "DeepSpeed's default", value=AUTO)


def nearest(path: str, known: list[str] | None = None) -> str:
    """Names the known key that a path is nearest to, or "".

    Its neighbours come first, then keys of the same name elsewhere, then all.
    """
    above, _, name = path.rpartition(".")
    keys = list(KEYS) if known is None else known
    neighbours = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == above}
    if close := difflib.get_close_matches(name, neighbours, n=1, cutoff=0.7):
        return neighbours[close[0]]
    if elsewhere := [key for key in keys if key.rpartition(".")[2] == name]:
        return elsewhere[0]
    names = {key.rpartition(".")[2]: key for key in keys}
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return names[close[0]] if close else ""


def _is_on(value: Any) -> bool:
    """Whether an object, or one in it, has `enabled: true`."""
    if not isinstance(value, Mapping):
        return False
    return value.get("enabled") is True or any(map(_is_on, value.values()))


def _shown(value: Any) -> str:
    return "{...}" if isinstance(value, Mapping) else repr(value)


def _hint(value: Any) -> str:
    if is_beyond_floats(value):
        return " It is beyond the numbers of 64 bits."
    return " A list is a space for the autotuner: choose one of them." if isinstance(value, list | tuple) else ""
