"""README and docs: their Python compiles and names what exists, their tables are complete.

A block that cannot be checked has a line above it that says why: `<!-- not tested: it needs ... -->`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from helpers.pages import PAGES, ROOT, blocks, text_of
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

import lightning_zero.callbacks
from lightning_zero.config.schemas import StrategyConf


def named(dotted: str) -> Any:
    """What a dotted name stands for."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(dotted)


def each_page() -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


# -- Python --


def imports(tree: ast.AST) -> dict[str, Any]:
    """The names that a block imports, and what they stand for."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                module = importlib.import_module(alias.name)
                found[alias.asname or alias.name] = module
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                found[alias.asname or alias.name] = getattr(module, alias.name)
    return found


def check_keywords(tree: ast.AST, known: dict[str, Any]) -> None:
    """Calls of this package's classes and functions have arguments of these names."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        first, _, rest = ast.unparse(node.func).partition(".")
        called = known.get(first)
        for part in filter(None, rest.split(".")):
            called = getattr(called, part, None)
        if not getattr(called, "__module__", "").startswith("lightning_zero"):
            continue
        parameters = inspect.signature(called).parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            assert {k.arg for k in node.keywords} <= set(parameters), ast.unparse(node)


@each_page()
def test_python_blocks_compile_and_name_what_exists(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python" and block.tested:
            tree = ast.parse(block.code)
            compile(tree, str(page), "exec")
            check_keywords(tree, {"lightning_zero": lightning_zero} | imports(tree))


@each_page()
def test_names_of_the_package_exist(page: Path) -> None:
    for dotted in re.findall(r"\blightning_zero(?:\.[A-Za-z_]\w*)+", page.read_text()):
        named(dotted)


# -- links and tables --


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    anchors = {
        re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.*)", text, re.MULTILINE)
    }
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" not in link:
            assert (ROOT / path).is_file() if path else anchor in anchors, link


def test_the_navigation_has_every_page() -> None:
    listed = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in PAGES[1:])


def code_of(page: str) -> set[str]:
    """The words that a page's text writes as code."""
    text = text_of(ROOT / "docs" / page)
    return {word for span in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", span)}


@pytest.mark.parametrize(
    ("page", "strategy"), [("migrate-deepspeed.md", DeepSpeedStrategy), ("migrate-fsdp.md", FSDPStrategy)]
)
def test_every_argument_of_the_other_strategy_has_a_counterpart(page: str, strategy: type) -> None:
    arguments = {p.name for p in inspect.signature(strategy).parameters.values() if p.kind is not p.VAR_KEYWORD}
    assert arguments <= code_of(page)


def test_every_option_of_the_strategy_is_explained() -> None:
    ours = {field.name for field in fields(StrategyConf) if not field.name.startswith("_")} - {"process_group_backend"}
    assert ours <= code_of("strategies.md")


def test_every_option_of_the_groups_is_listed() -> None:
    groups = ("strategy", "precision", "optimizer", "scheduler", "trainer", "logger", "callbacks")
    assert {path.stem for group in groups for path in (ROOT / "conf" / group).glob("*.yaml")} <= code_of("hydra.md")


def test_every_callback_has_a_section() -> None:
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs" / "callbacks.md").read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(lightning_zero.callbacks.__all__)
