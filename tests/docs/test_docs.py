"""README and docs: their Python compiles and names what exists, their commands are taken, their tables are complete.

A block that cannot be checked has a line above it that says why: `<!-- not tested: it needs ... -->`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from hydra import compose, initialize_config_dir
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

import lightning_zero.callbacks
from lightning_zero.cli import app
from lightning_zero.config import StrategyConf

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(
    r"(?:^<!-- (?P<comment>.*?) -->\n+)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_REASON = re.compile(r"not tested: \w.{9,}")
_COMMAND = re.compile(r"(?:torchrun [^/]*?(?=examples/)|python |lightning-zero |make )")


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    code: str
    tested: bool


def blocks(page: Path) -> list[Block]:
    found = []
    for block in _BLOCK.finditer(page.read_text()):
        if block["comment"] is not None:
            assert _REASON.fullmatch(block["comment"]), f"{page.name}: {block['comment']!r} gives no reason"
        found.append(Block(block["language"], block["code"], tested=block["comment"] is None))
    return found


def commands(page: Path) -> list[str]:
    """Of blocks and of the text between them."""
    lines = [line for block in blocks(page) if block.tested for line in block.code.splitlines()]
    spans = re.findall(r"`([^`]+)`", _BLOCK.sub("", page.read_text()))
    return [text for text in (*lines, *(span.replace("\n", " ") for span in spans)) if _COMMAND.match(text)]


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


# -- commands --


def check_verb(arguments: list[str]) -> None:
    """The command line's own parser takes them; nothing runs."""
    group: Any = typer.main.get_command(app)
    with group.make_context("lightning-zero", list(arguments)) as context:
        name, command, rest = group.resolve_command(context, list(arguments))
        if rest:  # else the text mentions the verb
            command.make_context(name, rest, parent=context)


def check_script(script: str, overrides: list[str]) -> None:
    """The configuration of an example composes with these overrides."""
    path = ROOT / script
    assert path.is_file(), script
    if "--help" in overrides:
        return
    with initialize_config_dir(str(path.parent / "conf"), version_base="1.3"):
        compose(path.stem, overrides=[o for o in overrides if o != "--multirun"])


def check_target(arguments: list[str]) -> None:
    """The Makefile has the target, and a configuration of the demonstration composes."""
    target, *settings = arguments
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(rf"^{re.escape(target)}:.*\n(?:\t(.*)\n)?", makefile, re.MULTILINE)
    assert recipe, target
    overrides = " ".join(value.removeprefix("ARGS=") for value in settings if value.startswith("ARGS="))
    if target == "demo":
        _, script, *given = shlex.split((recipe[1] or "").replace("$(ARGS)", overrides))
        check_script(script, given)


def check_module(arguments: list[str]) -> None:
    """There is such a module, and it has these options."""
    source = (ROOT / arguments[0].replace(".", "/")).with_suffix(".py").read_text()
    for option in arguments[1:]:
        if option.startswith("--"):
            assert f'"{option}"' in source, option


@functools.cache  # pages repeat commands
def check(command: str) -> None:
    program, *arguments = shlex.split(command, comments=True)
    if program == "lightning-zero":
        check_verb(arguments)
    elif program == "make":
        check_target(arguments)
    elif program == "python" and arguments[0] == "-m":
        check_module(arguments[1:])
    else:
        at = next(number for number, word in enumerate(arguments) if word.endswith(".py"))
        check_script(arguments[at], arguments[at + 1 :])


def test_pages_have_commands() -> None:
    assert [page.stem for page in PAGES if commands(page)] == [
        *("README", "callbacks", "checkpoints", "examples", "faq", "hydra", "index", "migrate-deepspeed"),
        *("migrate-fsdp", "optimizers", "strategies"),
    ]


@each_page()
def test_commands_are_taken(page: Path) -> None:
    for command in dict.fromkeys(commands(page)):
        try:
            check(command)
        except Exception as error:
            error.add_note(command)
            raise


@pytest.mark.parametrize(
    "command",
    [
        "lightning-zero inspekt last.ckpt",
        "lightning-zero export last.ckpt out/ --layout hf",
        "python examples/gpt2/train.py strategy=zero4",
        "python examples/gpt2/train.py optimizer.learning_rate=1",
        "python examples/gpt3/train.py",
        'make demo ARGS="strategy=zero4"',
        "make tset",
        "python -m benchmarks.cifar10_strategies --dta data/cifar-10",
    ],
)
def test_a_command_that_is_not_there_is_found(command: str) -> None:
    with pytest.raises(Exception, match=r"inspekt|layout|zero4|learning_rate|gpt3|tset|--dta"):
        check(command)


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
    text = _BLOCK.sub("", (ROOT / "docs" / page).read_text())
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
