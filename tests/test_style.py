"""Size and wording of the package's sources: files, classes, docstrings."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "lightning_zero"
MOST_LINES = 500
MOST_METHODS = 25
# Classes with more public methods than that; the docstring of each, or of a base, says why, in a sentence on its
# "public methods".
LARGE_CLASSES = frozenset({"Engine", "ZeroAutoStrategy", "ZeroStrategy"})
METHODS = (FunctionType, property, classmethod, staticmethod, functools.cached_property)
VAGUE = re.compile(r"(What|Where|How|Those|Before|After|Around|Between|Inside|For|Of|By|Its|As|Like|If|Nothing)\b")
FACTORIES = ("arange", "as_tensor", "empty", "full", "ones", "rand", "randint", "randn", "randperm", "tensor", "zeros")


def files() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def modules() -> Iterator[ModuleType]:
    names = (".".join(("lightning_zero", *Path(path).with_suffix("").parts)) for path in files())
    return (importlib.import_module(name.removesuffix(".__init__")) for name in names)


def own_bases(class_: type) -> list[type]:
    """The class and those of its bases that the package defines: the parts of what is one object."""
    return [base for base in class_.__mro__ if base.__module__.partition(".")[0] == "lightning_zero"]


def public_methods(class_: type) -> set[str]:
    """Names of the methods and properties that a class and its bases in the package define."""
    defined = [name for base in own_bases(class_) for name, value in vars(base).items() if isinstance(value, METHODS)]
    return {name for name in defined if not name.startswith("_")}


def large_classes(module: ModuleType) -> Iterator[type]:
    """Classes that a module defines, with too many public methods."""
    classes = [value for value in vars(module).values() if inspect.isclass(value)]
    own = [class_ for class_ in classes if class_.__module__ == module.__name__ and class_.__name__[0] != "_"]
    return (class_ for class_ in own if len(public_methods(class_)) > MOST_METHODS)


def vague_docstrings(source: str) -> list[str]:
    """Names of what has a docstring that opens with neither a verb nor a noun."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    documented = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds) and ast.get_docstring(node)]
    vague = [node for node in documented if VAGUE.match(str(ast.get_docstring(node)))]
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
    large = [class_ for module in modules() for class_ in large_classes(module)]
    assert {class_.__name__ for class_ in large} == LARGE_CLASSES
    for class_ in large:
        assert any("public methods" in (base.__doc__ or "") for base in own_bases(class_)), class_


def test_large_classes_and_vague_docstrings_are_found() -> None:
    module = ModuleType("lightning_zero.module")
    methods = {f"method_{number}": lambda self: None for number in range(MOST_METHODS)}
    most = type("Most", (), {"__module__": module.__name__, **methods})
    large = type("Large", (most,), {"__module__": module.__name__, "one_more": lambda self: None})
    vars(module).update(Most=most, Large=large)
    assert [class_.__name__ for class_ in large_classes(module)] == ["Large"]
    assert vague_docstrings('"""What it is."""\ndef right():\n    """Gathers it."""') == ["the module"]
    assert vague_docstrings('"""Formats."""\ndef wrong():\n    """Before a step: gather it."""') == ["wrong"]
    assert vague_docstrings('"""How it is done."""\nclass Wrong:\n    """Where it lies."""') == ["the module", "Wrong"]
