"""The form of a classification: what a key's value must be, and what becomes of it here."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes:
        words: what an error says was expected.
        fits: whether a value is of the kind.
    """

    words: str
    fits: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return not math.isnan(value)
    return isinstance(value, int) and not isinstance(value, bool) and not is_beyond_floats(value)


def is_beyond_floats(value: object) -> bool:
    """Whether a value is a whole number that no float can hold."""
    return isinstance(value, int) and abs(value) > sys.float_info.max


def _is_whole(value: object) -> bool:
    return _is_number(value) and float(value).is_integer()  # type: ignore[arg-type]  # 5e8 is a whole number, too


def one_of(*words: str) -> Kind:
    """Makes the kind of a text that is one of a few, in any case."""
    return Kind(f"one of {', '.join(words)}", lambda value: isinstance(value, str) and value.lower() in words)


BOOL = Kind("true or false", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number >= 0", lambda value: _is_whole(value) and value >= 0)
WHOLE = Kind("a whole number", _is_whole)
NUMBER = Kind("a number", _is_number)
FRACTION = Kind("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
AMOUNT = Kind("a number >= 0", lambda value: _is_number(value) and value >= 0)
TEXT = Kind("a text", lambda value: isinstance(value, str))
LIST = Kind("a list", lambda value: isinstance(value, list | tuple))
BETAS = Kind(
    "two numbers, such as [0.9, 0.999]",
    lambda value: isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value)),
)
OBJECT = Kind("an object: {...}", lambda value: isinstance(value, Mapping))
ANY = Kind("anything", lambda value: True)
DTYPE = one_of("fp16", "bf16", "fp32", "float16", "bfloat16", "float32")


def same(value: Any) -> Any:
    """Takes a value over as it is."""
    return value


@dataclass(frozen=True)
class Key:
    """A key of a configuration, classified: exactly one of `here`, `moot`, `remedy` says what becomes of it.

    Attributes:
        name: the key; of a table's entry, the dotted path to it.
        kind: what its value must be. "auto" and null always may stand there.
        here: the dotted key of the Hydra groups that takes the value over.
        moot: why the value has no meaning here.
        remedy: what to do instead, for what this package does not have.
        as_here: values that ask for what happens here anyway.
        convert: turns the value into that of `here`.
        computed: the translation says what becomes of it, from other keys, too.
        stages: stages at which the key has a meaning; others: no meaning.
        auto: the argument of Hugging Face's Trainer that "auto" stands for.
        auto_here: what stands here for the same as "auto" there, without a setting.
        note: a remark on a value that is taken over.
        inside: of an object that is classified as a whole, its known keys; None: any.
        switched: an object that is off unless an `enabled` in it is true.
    """

    name: str
    kind: Kind
    here: str = ""
    moot: str = ""
    remedy: str = ""
    as_here: tuple[Any, ...] = ()
    convert: Callable[[Any], Any] = same
    computed: bool = False
    stages: frozenset[int] = frozenset({0, 1, 2, 3})
    auto: str = ""
    auto_here: str = ""
    note: str = ""
    inside: frozenset[str] | None = frozenset()
    switched: bool = False

    def at(self, number: int) -> bool:
        """Whether the key has a meaning at a stage of this number."""
        return number in self.stages


def under(prefix: str, keys: Iterable[Key], stages: Iterable[int] = ()) -> dict[str, Key]:
    """Makes a table of keys below a prefix, by their paths; `stages` is for those that name none."""
    table = {}
    for key in keys:
        path = f"{prefix}.{key.name}" if prefix else key.name
        limited = replace(key, stages=frozenset(stages)) if stages and len(key.stages) == 4 else key
        assert path not in table, path
        table[path] = replace(limited, name=path)
    return table


def block(name: str, inside: str | None, *, switched: bool = True, moot: str = "", remedy: str = "") -> Key:
    """Makes an object that is classified as a whole.

    Args:
        name: the key.
        inside: its known keys, separated by blanks; None: any.
        switched: it is off unless an `enabled` in it is true.
        moot: why it has no meaning here.
        remedy: what to do instead.
    """
    known = None if inside is None else frozenset(inside.split())
    return Key(name, OBJECT, moot=moot, remedy=remedy, inside=known, switched=switched)
