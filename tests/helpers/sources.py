"""The sources of the package, parsed once for all tests of code style."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "lightning_zero"


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a source's syntax tree, in the order of `ast.walk`."""
    return tuple(ast.walk(ast.parse(source)))
