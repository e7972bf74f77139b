"""Size and wording of the package's sources: files, classes, docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "lightning_zero"
MOST_LINES = 500
MOST_METHODS = 25
# Classes with more public methods than that; the docstring of each says why, in a sentence on its "public methods".
LARGE_CLASSES = frozenset({"Engine"})
FACTORIES = ("arange", "as_tensor", "empty", "full", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros")


def files() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def public_methods(class_: ast.ClassDef) -> list[str]:
    """Names of the methods and properties that a class itself defines, each once."""
    defined = [node.name for node in class_.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [name for name in dict.fromkeys(defined) if not name.startswith("_")]


def large_classes(source: str) -> Iterator[ast.ClassDef]:
    classes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    return (class_ for class_ in classes if class_.name[0] != "_" and len(public_methods(class_)) > MOST_METHODS)


def vague_docstrings(source: str) -> list[str]:
    """Names of what has a docstring that opens with "What", in the place of a verb or a noun."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    documented = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds) and ast.get_docstring(node)]
    vague = [node for node in documented if str(ast.get_docstring(node)).startswith("What")]
    return [getattr(node, "name", "the module") for node in vague]


def tensors_by_default(source: str, keyword: str) -> list[int]:
    """Lines with new tensors whose device or dtype is the user's default one: `torch.zeros(3)`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    new = [call for call in calls if any(ast.unparse(call.func) == f"torch.{name}" for name in FACTORIES)]
    return [call.lineno for call in new if not {keyword, None} & {argument.arg for argument in call.keywords}]


@pytest.mark.parametrize("keyword", ["device", "dtype"])
def test_memory_is_on_a_stated_device_in_a_stated_dtype(keyword: str) -> None:
    """The default dtype is the process's, and 16-bit modes change it in a forward, beside which updates run.

    A command is a process of its own, and an imagined model belongs where it is made.
    """
    own = [path for path in files() if not path.startswith("cli/") and path != "planning/transformer.py"]
    found = {path: lines for path in own if (lines := tensors_by_default((PACKAGE / path).read_text(), keyword))}
    assert found == {}
    assert tensors_by_default(f"torch.zeros(3)\ntorch.ones(3, {keyword}=x)\ntorch.tensor(1.0)", keyword) == [1, 3]


def test_a_file_has_one_subject() -> None:
    sources = {path: (PACKAGE / path).read_text() for path in files()}
    assert [path for path, source in sources.items() if len(source.splitlines()) > MOST_LINES] == []
    assert {path: vague for path, source in sources.items() if (vague := vague_docstrings(source))} == {}


def test_a_class_has_one_job_or_says_why_not() -> None:
    large = [class_ for path in files() for class_ in large_classes((PACKAGE / path).read_text())]
    assert {class_.name for class_ in large} == LARGE_CLASSES
    for class_ in large:
        assert "public methods" in (ast.get_docstring(class_) or ""), class_.name


def test_large_classes_and_vague_docstrings_are_found() -> None:
    methods = "\n".join(f"    def method_{number}(self): ..." for number in range(MOST_METHODS + 1))
    (large,) = large_classes(f"class Large:\n{methods}\nclass Small:\n    def method(self): ...")
    assert large.name == "Large"
    assert vague_docstrings('"""What it is."""\ndef right():\n    """Gathers it."""') == ["the module"]
