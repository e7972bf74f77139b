"""The list of mutants: read from TOML, checked against the package and the tests, and written as TOML."""

from __future__ import annotations

import ast
import dataclasses
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class StaleError(ValueError):
    """Raised for entries that no longer fit the package or the tests; the message names each of them."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A wrong change: `text`, which occurs once in `file` of the package, is replaced by `becomes`.

    `breaks` describes the resulting defect; `killed_by` are the node ids of tests, each of which must fail.
    """

    id: str
    file: str
    text: str
    becomes: str
    breaks: str = ""
    killed_by: tuple[str, ...] = ()

    def plant(self, package: Path) -> None:
        """Change the file in the copy of the package at `package`."""
        path = package / self.file
        path.write_text(path.read_text().replace(self.text, self.becomes))

    def toml(self) -> str:
        """The entry in the format of the catalogue's files."""
        fields = dataclasses.asdict(self)
        killers = "".join(f'\n    "{node}",' for node in fields.pop("killed_by"))
        lines = [f"{name} = {quoted(value)}" for name, value in fields.items()]
        return "\n".join(["[[mutant]]", *lines, f"killed_by = [{killers}\n]"]) + "\n"


def quoted(value: str) -> str:
    """A TOML string; text with several lines, quotes or backslashes becomes a literal string."""
    if not any(character in value for character in '\n"\\'):
        return f'"{value}"'
    assert "'''" not in value
    return f"'''\n{value}'''"


def read(folder: Path) -> list[Mutant]:
    """All entries of the files in `folder`, in the order of the files' names."""
    entries: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.toml")):
        entries += tomllib.loads(path.read_text())["mutant"]
    return [Mutant(**entry | {"killed_by": tuple(entry["killed_by"])}) for entry in entries]


def check(mutants: Iterable[Mutant], package: Path, root: Path) -> None:
    """Raise StaleError for entries whose text or tests are not found; node ids are relative to `root`."""
    mutants = list(mutants)
    names = Counter(mutant.id for mutant in mutants)
    wrong = [f"{name}: used by {count} entries" for name, count in names.items() if count > 1]
    tests: dict[Path, set[str]] = {}
    for mutant in mutants:
        wrong += [f"{mutant.id}: {what}" for what in wrong_text(mutant, package)]
        wrong += [f"{mutant.id}: {what}" for what in wrong_tests(mutant, root, tests)]
    if wrong:
        raise StaleError("the list of mutants is stale; mend or remove these entries:\n  " + "\n  ".join(wrong))


def wrong_text(mutant: Mutant, package: Path) -> list[str]:
    path = package / mutant.file
    if not path.is_file():
        return [f"{path} does not exist"]
    source = path.read_text()
    if (count := source.count(mutant.text)) != 1:
        return [f"its text occurs {count} times in {mutant.file}, not once"]
    try:
        compile(source.replace(mutant.text, mutant.becomes), mutant.file, "exec")
    except SyntaxError as error:
        return [f"what it becomes is no Python: {error}"]
    return ["it becomes the text that it replaces"] if mutant.text == mutant.becomes else []


def wrong_tests(mutant: Mutant, root: Path, tests: dict[Path, set[str]]) -> list[str]:
    """Problems with tests that do not exist; `tests` caches the names of tests by file."""
    wrong = [] if mutant.killed_by else ["no test kills it"]
    for node in mutant.killed_by:
        file, _, name = node.partition("::")
        path = root / file
        if path not in tests:
            tests[path] = functions(path.read_text()) if path.is_file() else set()
        if name.split("[")[0].split("::")[-1] not in tests[path]:
            wrong.append(f"no test {node}")
    return wrong


def functions(source: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
