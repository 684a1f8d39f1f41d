"""The code blocks of the README, of docs/ and of the examples' pages, fenced or indented.

A comment before a block, `<!-- not run: REASON -->`, leaves it out of what tests run.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from repository import ROOT

MARK = re.compile(r"<!-- not run: (.+) -->\s*$")
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^|(?<=\n\n))((?: {4,}\S.*\n+)+)")
COMMAND = re.compile(r"^\s*(?:\$ )?((?:composer-mesh|make|nox|pip|python3?) .*)$", re.MULTILINE)
OPTIONAL = re.compile(r" \[-[^]]*\](\.\.\.)?")
SEPARATORS = {"&&", "||", "|", ";", "&"}


@dataclass(frozen=True)
class Block:
    """A block, with the reason why it is not run, where there is one."""

    page: str
    line: int
    language: str
    text: str
    not_run: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    found = (path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*.md"))
    return [ROOT / "README.md", *sorted(found)]


@cache
def blocks() -> list[Block]:
    """All blocks, in their order."""
    return [block for path in pages() for block in _blocks(path)]


def _blocks(path: Path) -> Iterator[Block]:
    page, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    for found in FENCED.finditer(text):
        yield _block(page, text, found.start(), found[2], found[3])
    prose = FENCED.sub(lambda one: "\n" * one[0].count("\n"), text)
    for found in INDENTED.finditer(prose):
        first = found[1].lstrip().partition("\n")[0]
        language = "toml" if re.fullmatch(r"\[\[?[a-z_.]+\]\]?", first) else ""
        yield _block(page, prose, found.start(1), language, found[1])


def _block(page: str, text: str, start: int, language: str, code: str) -> Block:
    marked = MARK.search(text[:start])
    line = text[:start].count("\n") + 1
    return Block(page, line, language, textwrap.dedent(code), marked[1] if marked else "")


def commands() -> list[tuple[Block, list[str]]]:
    """Every command line of the blocks as its words, without comments and optional parts."""
    shown = [one for one in blocks() if one.language in ("", "sh", "console", "text")]
    return [
        (block, words)
        for block in shown
        if not block.not_run
        for line in COMMAND.findall(block.text.replace("\\\n", " "))
        for words in _words(line)
    ]


def _words(line: str) -> Iterator[list[str]]:
    words: list[str] = []
    for word in [*shlex.split(OPTIONAL.sub("", line), comments=True), ";"]:
        if word not in SEPARATORS:
            words.append(word)
        elif words:
            yield words
            words = []
