"""How the package's parts depend on each other, read from their sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "lightning_zero"
# From the top down: a part imports parts below it (or itself).
ORDER = (
    ("cli", "hydra_app"),
    ("callbacks", "config"),
    (
        "strategy",
        "memory",
        "registration",
    ),  # names are registered without importing the class; it unregisters itself by them
    ("precision", "whole_weights", "schedulers", "loading"),
    ("standstill", "multirun"),
    ("checkpoint",),
    ("optim",),
    ("engine",),
    ("ops",),
    ("cgroups", "version"),
)
LEVEL = {part: level for level, parts in enumerate(ORDER) for part in parts}
FACADE = {"hydra_app"}  # may import public names from the package itself
# What needs no collective: is there a process group, and how large is it?
QUERIES = frozenset("is_available is_initialized get_rank get_world_size is_gloo_available is_nccl_available".split())
STORES = frozenset("PrefixStore TCPStore".split())
FORMATS = "torch.distributed.checkpoint."  # files


class Import(NamedTuple):
    """A module that is imported, or a name from it, anywhere in a file, functions included."""

    name: str
    line: int


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The first folder or module below the package; "" for the package's own `__init__`."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports(source: str) -> Iterator[Import]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from (Import(f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def wrong_imports(source: str, part: str) -> list[str]:
    """Imports by a file of ``part`` that run upward in the order, or that the engine may not make."""
    wrong = []
    for name, line in imports(source):
        root, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if root == "lightning_zero":
            if target not in LEVEL:
                legal = part in FACADE or not target
            else:
                legal = target == part or LEVEL[target] >= LEVEL[part]
            if not legal:
                wrong.append(f"line {line}: {part} imports {name}")
        elif part in ("engine", "ops", "optim") and root in ("lightning", "pytorch_lightning", "hydra", "omegaconf"):
            wrong.append(f"line {line}: {part} imports {name}")
    return wrong


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def communication(source: str) -> list[str]:
    """Uses of `torch.distributed` other than questions about the process group."""
    tree = ast.parse(source)
    found = [name for name, _ in imports(source) if name.startswith("torch.distributed")]
    found = [name for name in found if name.rpartition(".")[2] not in QUERIES | STORES and not name.startswith(FORMATS)]
    for node in ast.walk(tree):
        name = dotted(node)
        if name.startswith("torch.distributed.") and name.count(".") == 2 and name.rpartition(".")[2] not in QUERIES:
            found.append(f"line {node.lineno}: {name}")  # type: ignore[attr-defined]
    return found


def stages_compared(source: str) -> set[str]:
    """Functions that compare something called `stage`; what depends on the stage is asked of a policy."""
    found = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                operands = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
                operands += [node.subject] if isinstance(node, ast.Match) else []
                if any(dotted(operand).rpartition(".")[2] == "stage" for operand in operands):
                    found.add(function.name)
    return found


def test_every_part_has_a_place() -> None:
    assert {part for path in files() if (part := part_of(path)) not in ("", "conf")} == set(LEVEL)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downward(path: Path) -> None:
    source, part = path.read_text(), part_of(path)
    assert not part or not wrong_imports(source, part)


def test_only_one_module_communicates() -> None:
    found = {str(path.relative_to(PACKAGE)): communication(path.read_text()) for path in files()}
    assert [name for name, uses in found.items() if uses] == ["engine/collectives.py"]


def test_no_stage_is_compared_outside_the_policies() -> None:
    """But where the strategy checks what it was given."""
    found = {str(path.relative_to(PACKAGE)): stages_compared(path.read_text()) for path in files()}
    assert {name: functions for name, functions in found.items() if functions} == {
        "engine/policies.py": {"from_stage"},
        "strategy.py": {"__init__", "_check_shard_size", "_check_stores"},
    }


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("engine", "import lightning.pytorch as pl"),
        ("engine", "def f():\n    from lightning_zero.optim import make_updater"),
        ("engine", "from lightning_zero import optim"),
        ("engine", "import lightning_zero.strategy"),
        ("ops", "from lightning_zero.engine import Bucket"),
        ("optim", "if TYPE_CHECKING:\n    from lightning_zero.checkpoint import state"),
        ("strategy", "from lightning_zero.callbacks import GradientMonitor"),
        ("engine", "from lightning_zero import gathered_parameters"),
    ],
)
def test_upward_imports_are_found(part: str, source: str) -> None:
    assert wrong_imports(source, part)


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "torch.distributed.barrier()",
    ],
)
def test_communication_is_found(source: str) -> None:
    assert communication(source)


@pytest.mark.parametrize("test", ["stage == 3", "self.stage >= 2", "3 == policy.stage"])
def test_compared_stages_are_found(test: str) -> None:
    assert stages_compared(f"def f():\n    return {test}") == {"f"}
