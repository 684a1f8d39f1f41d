"""The pages under docs/, taken apart: their code, their settings, the names that they mention."""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from typing import Any

from repository import ROOT

from composer_mesh.configs.schema import Config

QUICKSTART = ROOT / "configs" / "quickstart.toml"
FOLDERS = (
    "configs",
    "planning",
    "losses",
    "rollouts",
    "channels",
    "tasks",
    "mesh",
    "actors",
    "services",
    "plugins",
    "examples",
    "benchmarks",
)


@dataclass(frozen=True)
class Guide:
    """One page."""

    text: str

    @classmethod
    def read(cls, name: str) -> Guide:
        return cls((ROOT / "docs" / name).read_text(encoding="utf-8"))

    def blocks(self, language: str) -> list[str]:
        """The fenced blocks of a language, in order."""
        return re.findall(rf"^```{language}\n(.*?)^```$", self.text, re.MULTILINE | re.DOTALL)

    def inline(self) -> list[str]:
        """What stands between single backticks outside of blocks."""
        prose = re.sub(r"^```.*?^```$", "", self.text, flags=re.M | re.S)
        return re.findall(r"`([^`\n]+)`", prose)

    def names(self) -> set[str]:
        """The words with an underscore among what stands in backticks."""
        return {
            word for code in self.inline() for word in re.findall(r"[a-z]+(?:_[a-z0-9]+)+", code)
        }

    def links(self) -> list[str]:
        """What it points to inside the repository."""
        found = re.findall(r"\]\(([^)\s]+)\)", self.text)
        return [link for link in found if not link.startswith("http")]

    def headings(self) -> set[str]:
        """The anchors that others may point to."""
        titles = re.findall(r"^#+ (.+)$", self.text, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def as_a_run(toml: str) -> Config:
    """The quickstart with a block's settings over its own."""
    table = tomllib.loads(QUICKSTART.read_text(encoding="utf-8"))
    over = tomllib.loads(toml)
    if "mixture" in over.get("data", {}):
        del table["data"]["task"]
    return Config.model_validate(merged(table, over))


def merged(table: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    return table | {
        key: merged(table.get(key, {}), value) if isinstance(value, dict) else value
        for key, value in over.items()
    }


@cache
def names_in_code() -> set[str]:
    """What the sources define, read or spell as a key; what they only write about is left out."""
    tests = (path for kind in ("unit", "plugins") for path in (ROOT / "tests" / kind).rglob("*.py"))
    found = {"composer_mesh", *(path.stem for path in tests)}
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        found.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found |= set(re.findall(r"\w+", name_of(node)))
    return found


def name_of(node: ast.AST) -> str:
    """A name, an argument, or a string that can be a key: without spaces."""
    for field in ("id", "arg", "attr", "name", "value"):
        found = getattr(node, field, None)
        if isinstance(found, str) and not re.search(r"\s", found):
            return found
    return ""
