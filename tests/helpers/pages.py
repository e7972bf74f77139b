"""Reads README and docs: their code blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(
    r"(?:^<!-- (?P<comment>.*?) -->\n+)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
SHELLS = ("sh", "bash", "shell", "console")
_REASON = re.compile(r"not tested: \w.{9,}")
_COMMAND = re.compile(r"(?:torchrun [^/]*?(?=examples/)|python |lightning-zero |make )")


class Block(NamedTuple):
    """A fenced code block of a page."""

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


def text_of(page: Path) -> str:
    """The text outside the blocks."""
    return _BLOCK.sub("", page.read_text())


def commands(page: Path) -> list[str]:
    """The commands in blocks and in the text between them, without comments.

    A shell block, or one that begins with a command, may contain only commands; an unknown line fails an assertion.
    """
    found = []
    for block in blocks(page):
        lines = [line for line in block.code.splitlines() if line.strip()]
        if block.tested and (block.language in SHELLS or (not block.language and _COMMAND.match(lines[0]))):
            for line in lines:
                assert _COMMAND.match(line), f"{page.name}: {line!r} is no command that the tests can run"
            found += lines
    spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text_of(page)))
    found += [span for span in spans if _COMMAND.match(span)]
    return [shlex.join(shlex.split(command, comments=True)) for command in found]
