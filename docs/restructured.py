"""The roles and simple tables of reStructuredText in docstrings, as Markdown for mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|attr|mod):`(~?)([^`]+)`")
_RULE = re.compile(r"^ *=+(?: +=+)+ *$")


class Restructured(griffe.Extension):
    """Rewrites every docstring when its object is loaded."""

    def on_instance(self, *, node: Any, obj: griffe.Object, agent: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A docstring in Markdown: roles become code, literals single backticks, tables have bars."""
    text = "\n".join(_tables(text.splitlines()))  # first: the columns stand where they were written
    text = _ROLE.sub(lambda role: f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`", text)
    return text.replace("``", "`")


def _tables(lines: list[str]) -> list[str]:
    """The same lines, each simple table (rule, heads, rule, rows, rule) as one of Markdown."""
    rules = [number for number, line in enumerate(lines) if _RULE.match(line)]
    for top, middle, bottom in reversed(list(zip(rules[::3], rules[1::3], rules[2::3], strict=True))):
        spans = [match.span() for match in re.finditer("=+", lines[top])]
        starts = [start for start, _ in spans]
        ends = [*starts[1:], None]
        rows = [
            [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]
            for line in (*lines[top + 1 : middle], *lines[middle + 1 : bottom])
        ]
        table = ["| " + " | ".join(row) + " |" for row in rows]
        lines[top : bottom + 1] = [table[0], "|" + "---|" * len(starts), *table[1:]]
    return lines
