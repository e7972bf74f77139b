"""Proposes mutants of a file: changes of one expression or statement, chosen by a seed from all possible ones."""

from __future__ import annotations

import ast
import builtins
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mutants.catalogue import Mutant

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}
# Functions whose names are exchanged because they do the opposite.
OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Change(NamedTuple):
    """A replacement of the source between two offsets; `kind` names the kind of change."""

    start: int
    end: int
    becomes: str
    kind: str
    where: str  # the function


class Changes(ast.NodeVisitor):
    """Collects the changes of a file."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.found: list[Change] = []
        self._lines = [0]
        for line in source.encode().splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._bytes = source.encode()
        self._functions: list[str] = []
        self.visit(ast.parse(source))

    def _offset(self, line: int, column: int) -> int:
        return len(self._bytes[: self._lines[line - 1] + column].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _add(self, start: int, end: int, becomes: str, kind: str) -> None:
        self.found.append(Change(start, end, becomes, kind, self._functions[-1] if self._functions else "module"))

    def _replace_between(self, left: ast.expr, right: ast.expr, old: str, new: str, kind: str) -> None:
        start = self._span(left)[1]
        place = self.source.index(old, start, self._span(right)[0])
        self._add(place, place + len(old), new, kind)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._functions.append(node.name.strip("_"))
        for child in node.body:  # not decorators and annotations
            self.visit(child)
        self._functions.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for child in node.body:  # not decorators
            self.visit(child)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # the argument of `zip`, where lengths are equal anyway
            self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skips invariants, since a change there fails by itself."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Skips errors, which are mostly text."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skips text."""

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if not isinstance(node.test, ast.Compare | ast.UnaryOp):
            start, end = self._span(node.test)
            self._add(start, end, f"not ({self.source[start:end]})", "negation")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            self._replace_between(left, right, *COMPARISONS[type(operator)], "comparison")
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if is_type(node):
            return
        if type(node.op) in OPERATORS and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            self._replace_between(node.left, node.right, *OPERATORS[type(node.op)], "operator")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self._replace_between(node.values[-2], node.values[-1], old, new, "boolean")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, end = self._span(node)
            operand = self._span(node.operand)
            self._add(start, end, self.source[operand[0] : operand[1]], "negation")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        start, end = self._span(node)
        if isinstance(node.value, bool):
            self._add(start, end, str(not node.value), "constant")
        elif isinstance(node.value, int):
            self._add(start, end, str(node.value + 1), "offset")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node.value, ast.Call):
            self._add(*self._span(node), "pass", "skipped-call")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in OPPOSITES:
            self._add(*self._span(node.func), OPPOSITES[node.func.id], "opposite")
        if len(node.args) > 1 and are_alike(*node.args[:2]):
            first, second = (self._span(argument) for argument in node.args[:2])
            texts = [self.source[slice(*span)] for span in (second, first)]
            self._add(first[0], second[1], texts[0] + self.source[first[1] : second[0]] + texts[1], "swapped-arguments")
        self.generic_visit(node)


def is_type(node: ast.expr) -> bool:
    """Whether an expression is a union of types, by the names in it: `int | None`, `Mapping | list`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return is_type(node.left) or is_type(node.right)
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in dir(builtins) or name[:1].isupper()


def are_alike(first: ast.expr, second: ast.expr) -> bool:
    """Whether two arguments may have the same type, so that exchanging them in a call need not fail at once."""
    variables = ast.Name | ast.Attribute | ast.Subscript
    plain = isinstance(first, variables) and isinstance(second, variables)
    return plain and ast.dump(first) != ast.dump(second) and not is_type(first) and not is_type(second)


def propose(package: Path, file: str, *, seed: int, count: int) -> Iterator[Mutant]:
    """Propose `count` mutants of a file of the package, as different in kind and place as possible, without killers."""
    source = (package / file).read_text()
    changes = Changes(source).found
    random.Random(f"{seed} {file}").shuffle(changes)
    kinds: dict[str, int] = {}
    for _ in range(min(count, len(changes))):
        change = min(changes, key=lambda each: (kinds.get(each.kind, 0), kinds.get(each.where, 0)))
        changes.remove(change)
        for name in (change.kind, change.where):
            kinds[name] = kinds.get(name, 0) + 1
        yield as_mutant(source, file, change)


def as_mutant(source: str, file: str, change: Change) -> Mutant:
    """The mutant for a change; its text includes as many whole lines around the change as make it unique."""
    start = source.rfind("\n", 0, change.start) + 1
    end = source.find("\n", change.end)
    while source.count(source[start:end]) > 1 and start:
        start = source.rfind("\n", 0, start - 1) + 1
    becomes = source[start : change.start] + change.becomes + source[change.end : end]
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", "-").replace("_", "-")
    name = f"{module}-{change.where.replace('_', '-')}-{change.kind}"
    return Mutant(name, file, source[start:end], becomes, change.kind.replace("-", " "))
