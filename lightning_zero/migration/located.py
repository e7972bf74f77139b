"""JSON that remembers where it stands: the line and column of every key, for messages about its value."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined]  # the stubs leave it out
from pathlib import Path
from typing import Any, NamedTuple

Key = tuple[str, ...]

_LITERALS = {"true": True, "false": False, "null": None, "Infinity": float("inf"), "-Infinity": float("-inf")}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.])")
_WORD = re.compile(r"[^\s,:{}\[\]\"]+")
_LONGEST_NUMBER, _DEEPEST = 400, 100
_BLANK = re.compile(r"[ \t\r\n]*")
_COMMENT = re.compile(r"//|/\*|#")


class MigrationError(ValueError):
    """A configuration that cannot be taken over: where it fails, and what to change there."""


class Place(NamedTuple):
    """Line and column of a character, from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Document:
    """A configuration with the places of its keys' values.

    Attributes:
        values: the configuration.
        name: of its file; "" for a dictionary of a program.
        places: of the value of each key, by the path to it; none for a dictionary.
    """

    values: dict[str, Any]
    name: str = ""
    places: Mapping[Key, Place] = field(default_factory=dict)

    def error(self, path: Key, message: str) -> MigrationError:
        """Makes an error about the value at a path: "ds_config.json:4:14: zero_optimization.stage ..."."""
        place = self.places.get(path)
        where = f"{self.name}:{place.line}:{place.column}: " if place else ""
        return MigrationError(f"{where}{'.'.join(path)}{message}")


def load(source: str | Path | Mapping[str, Any]) -> Document:
    """Reads a JSON file, or takes a dictionary as it is.

    Raises:
        MigrationError: the file is no JSON object; the message has line and column.
        OSError: it cannot be read.
    """
    if isinstance(source, Mapping):
        return Document(json_like(source))
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise MigrationError(f"{path}: byte {error.start} is no UTF-8: save the file as UTF-8 text.") from None
    return parse(text, str(path))


def json_like(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a mapping and those in it; every key must be a text."""
    copied = {}
    for key, value in values.items():
        if not isinstance(key, str):
            raise MigrationError(f"the key {key!r} is a {type(key).__name__}: keys of a configuration are texts.")
        copied[key] = json_like(value) if isinstance(value, Mapping) else value
    return copied


def parse(text: str, name: str) -> Document:
    """Parses a text that must be one JSON object.

    Raises:
        MigrationError: it is not; the message has line and column.
    """
    reader = _Reader(text, name)
    values = reader.read()
    return Document(values, name, reader.places)


class _Reader:
    """Reads values at a position that moves on; `places` fills as it goes."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name, self.index = text, name, 0
        self.places: dict[Key, Place] = {}

    def read(self) -> dict[str, Any]:
        if self._next() != "{":
            raise self._error("a configuration is a JSON object: it begins with '{'")
        values = self._object(())
        if rest := self._next():
            raise self._error(f"{rest!r} after the end of the object: remove it, or a '}}' before it")
        return values

    def _place(self, index: int) -> Place:
        before = self.text[:index]
        return Place(before.count("\n") + 1, index - before.rfind("\n"))

    def _error(self, message: str, index: int | None = None) -> MigrationError:
        place = self._place(self.index if index is None else index)
        return MigrationError(f"{self.name}:{place.line}:{place.column}: {message}.")

    def _next(self) -> str:
        """Moves to the next character that is not blank; returns it, or "" at the end."""
        match = _BLANK.match(self.text, self.index)
        assert match is not None
        self.index = match.end()
        if _COMMENT.match(self.text, self.index):
            raise self._error("a comment, which JSON does not have: remove it")
        return self.text[self.index : self.index + 1]

    def _value(self, path: Key) -> Any:
        if len(path) > _DEEPEST:
            raise self._error(f"more than {_DEEPEST} objects and arrays in one another")
        first = self._next()
        self.places[path] = self._place(self.index)
        if first == "{":
            return self._object(path)
        if first == "[":
            return self._array(path)
        if first == '"':
            return self._string()
        if number := _NUMBER.match(self.text, self.index):
            if len(number[0]) > _LONGEST_NUMBER:
                raise self._error(f"a number of {len(number[0])} characters; at most {_LONGEST_NUMBER} are read")
            self.index = number.end()
            return json.loads(number[0])
        word = _WORD.match(self.text, self.index)
        if word is None:
            raise self._error(f"expected a value, got {first!r}" if first else "the file ends where a value should be")
        if word[0] not in _LITERALS:
            hint = ": texts stand in double quotes" if not word[0][:1].isdigit() else ""
            hint = f": JSON writes {word[0].lower()}" if word[0].lower() in _LITERALS else hint
            raise self._error(f"{word[0]!r} is no JSON value{hint}")
        self.index = word.end()
        return _LITERALS[word[0]]

    def _string(self) -> str:
        try:
            value, self.index = scanstring(self.text, self.index + 1, True)
        except json.JSONDecodeError as error:
            raise self._error(f"a text with an error ({error.msg.lower()}): it ends with '\"'", error.pos) from None
        return str(value)

    def _object(self, path: Key) -> dict[str, Any]:
        values: dict[str, Any] = {}
        self.index += 1
        first = self._next()
        while first != "}":
            if first != '"':
                raise self._error(f"expected a key in double quotes, got {first!r}" if first else "a '}' is missing")
            start = self.index
            key = self._string()
            if key in values:
                raise self._error(f"the key {key!r} is here a second time: keep one of them", start)
            if self._next() != ":":
                raise self._error(f"expected ':' after the key {key!r}")
            self.index += 1
            values[key] = self._value((*path, key))
            first = self._comma("}")
        self.index += 1
        return values

    def _array(self, path: Key) -> list[Any]:
        values: list[Any] = []
        self.index += 1
        first = self._next()
        while first != "]":
            values.append(self._value((*path, str(len(values)))))
            first = self._comma("]")
        self.index += 1
        return values

    def _comma(self, end: str) -> str:
        """Moves over the comma between two items to the next; returns its first character, or the end's."""
        found = self._next()
        if found == end:
            return found
        if found != ",":
            raise self._error(f"expected ',' or {end!r}, got {found!r}" if found else f"a {end!r} is missing")
        comma = self.index
        self.index += 1
        if (found := self._next()) == end:
            raise self._error(f"a comma before {end!r}, which JSON does not allow: remove it", comma)
        return found
