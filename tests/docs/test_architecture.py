"""The page on architecture: files and names of it exist, and every floor has its place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.pages import ROOT, text_of
from test_imports import LEVEL

_TEXTS = (".pyi", ".h", ".cpp", ".yaml", ".md")
PAGE = ROOT / "docs" / "architecture.md"
_PATH = re.compile(r"[\w./-]*/[\w./-]*|\w+\.(?:py|pyi|h|cpp|yaml|md)")


def passages(text: str) -> list[str]:
    """Paragraphs, items of lists and rows of tables: each names the files in which its names are."""
    return [passage for passage in re.split(r"\n\s*\n|\n(?=- |\d+\. |\|)", text) if "`" in passage]


def file_or_folder(path: str) -> Path:
    """What a path stands for, from the root of the repository or of the package."""
    for root in (ROOT, ROOT / "lightning_zero"):
        if (found := root / path).exists():
            assert found.is_dir() == path.endswith("/"), f"{path}: a folder ends in a slash, a file does not"
            return found
    raise AssertionError(f"{path} does not exist")


def definitions(path: Path) -> Iterator[str]:
    """Names that a file defines; of a Python file those of modules and classes (``Class.member``), else its words."""
    if path.is_dir():
        for inner in path.iterdir():
            if inner.suffix in (".py", *_TEXTS):
                yield from definitions(inner)
    elif path.suffix == ".py":
        yield from _defined(ast.parse(path.read_text()).body, "")
    elif path.suffix in _TEXTS:
        yield from re.findall(r"\w+", path.read_text())


def _defined(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _defined(node.body, f"{prefix}{node.name}.")
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from (prefix + name.id for name in names if isinstance(name, ast.Name))


def missing_names(passage: str) -> list[str]:
    """Names in a passage that no file defines that it names. The files exist, or this fails."""
    spans = re.findall(r"`([^`]+)`", passage)
    paths = [span for span in spans if _PATH.fullmatch(span)]
    defined = {name for path in paths for name in definitions(file_or_folder(path))}
    return [span for span in spans if span not in paths and span not in defined]


@pytest.mark.parametrize("passage", passages(text_of(PAGE)))
def test_files_and_names_exist(passage: str) -> None:
    assert missing_names(passage) == []


def test_every_floor_has_its_place() -> None:
    section = text_of(PAGE).partition("## Floors")[2].partition("\n\n- ")[2].partition("\n\n")[0]
    listed = [name.removesuffix("/").removesuffix(".py") for name in re.findall(r"`(\w+(?:/|\.py))`", section)]
    listed = [name for name in listed if name in LEVEL]
    assert set(listed) == set(LEVEL)
    assert sorted(listed, key=LEVEL.__getitem__) == listed


@pytest.mark.parametrize(
    "passage", ["`Bukket` (`sharding/bucket.py`)", "`Bucket.publishes` (`sharding/bucket.py`)", "`Bucket`"]
)
def test_a_wrong_name_is_found(passage: str) -> None:
    assert missing_names(passage)


@pytest.mark.parametrize("path", ["sharding/bukket.py", "sharding/bucket.py/", "conf/strategy"])
def test_a_wrong_path_is_found(path: str) -> None:
    with pytest.raises(AssertionError, match=path):
        missing_names(f"`{path}`")
