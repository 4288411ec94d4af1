"""Fenced code blocks of Markdown pages, and the commands in those of a shell."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
#: Every page that a user reads, but for those of docs/reference, which are generated.
PAGES = sorted(
    str(page.relative_to(ROOT))
    for folder in ("", "docs", "docs/how_to", "examples")
    for page in (ROOT / folder).glob("**/*.md" if folder == "examples" else "*.md")
    if page.name != "CHANGELOG.md"
)
#: The pages whose blocks take longest.
LONG = {
    *(f"docs/{name}.md" for name in ("analysis", "compare", "diagnose", "export", "search", "tasks", "training")),
    *(f"docs/how_to/{name}.md" for name in ("lora", "mixtures", "nanogpt", "rl", "trainer")),
}
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line that it begins on, its language ("" if none is named) and its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """Return the blocks of ``page`` in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 2, found["language"], found["text"])
        for found in _FENCE.finditer(text)
    ]


def pages_with(*languages: str) -> list[Any]:
    """Return the pages that have a block in one of ``languages`` as parameters of a test."""
    found = [page for page in PAGES if any(block.language in languages for block in blocks(page))]
    return [pytest.param(page, marks=pytest.mark.long if page in LONG else ()) for page in found]


def of_language(*languages: str) -> list[Block]:
    """Return the blocks of all pages that are in one of ``languages``."""
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


def commands(block: Block) -> list[list[str]]:
    """Return the words of each command of a shell block; comments and prompts are left out."""
    text = block.text.replace("\\\n", " ")
    lines = (shlex.split(line, comments=True) for line in text.splitlines())
    return [line[1:] if line[0] == "$" else line for line in lines if line]
