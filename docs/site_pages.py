"""Pages of the site that are not files: the overview, the reference, the list of decisions.

MkDocs calls the `on_…` functions (mkdocs.yml). Links that leave docs/ become the path as text,
since the site has documentation only.
"""

import argparse
import ast
import os
import posixpath
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
os.environ["COLUMNS"] = "100"

from composer_mesh.configs import plugins  # noqa: E402
from composer_mesh.configs.reference import Key, keys  # noqa: E402
from composer_mesh.configs.schema import Config  # noqa: E402
from composer_mesh.services.commands.parser import Command  # noqa: E402

LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Put every decision into the navigation."""
    found = sorted((ROOT / "docs/decisions").glob("*.md"), key=lambda one: one.name != "README.md")
    config.nav[-1] = {"Decisions": [f"decisions/{one.name}" for one in found]}
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here."""
    for path, text in (
        ("index.md", (ROOT / "README.md").read_text()),
        ("reference/config.md", "\n".join(config_page())),
        ("reference/commands.md", "\n".join(commands_page())),
        ("reference/api.md", "\n".join(api_page())),
    ):
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Keep links within the site, and show the paths of those that leave it."""
    folder = posixpath.dirname(page.file.src_uri)

    def kept(match: "re.Match[str]") -> str:
        image, text, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        path, mark, heading = target.partition("#")
        base = "" if page.file.src_uri == "index.md" else posixpath.join("docs", folder)
        absolute = posixpath.normpath(posixpath.join(base, path))
        if absolute == "README.md":
            absolute = "docs/index.md"
        if absolute.startswith("docs/"):
            inside = posixpath.relpath(absolute, posixpath.join("docs", folder))
            return f"{image}[{text}]({inside}{mark}{heading})"
        return text if text.strip("`") == absolute else f"{text} (`{absolute}`)"

    return LINK.sub(kept, markdown)


def config_page() -> Iterator[str]:
    """Every key of a config, a section for each table."""
    yield "# Config keys\n"
    yield "Written by the schema; `composer-mesh explain KEY` prints the same.\n"
    found = keys(Config)
    for top in (one for one in found if "." not in one.path):
        yield f"## {top.path}\n\n{top.text}\n"
        rows = [one for one in found if one.path.split(".")[0].removesuffix("[]") == top.path]
        yield from _table(rows if len(rows) == 1 else rows[1:])


def _table(rows: Iterable[Key]) -> Iterator[str]:
    yield "| key | value | meaning |\n|---|---|---|"
    for one in rows:
        only = f" (type {', '.join(one.types)})" if one.types and one.path[-5:] != ".type" else ""
        yield f"| `{one.path}`{only} | {_cell(one.value)} | {_cell(one.text)} |"
    yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def commands_page() -> Iterator[str]:
    """The help of every command."""
    yield "# Commands\n"
    for name, one in plugins.own("commands").items():
        made: Command = one.load()
        parser = argparse.ArgumentParser(prog=f"composer-mesh {name}", allow_abbrev=False)
        made.add(parser)
        yield f"## {name}\n\n{made.about}\n\n```text\n{parser.format_help()}```\n"


def api_page() -> Iterator[str]:
    """The public names, as their docstrings describe them."""
    yield "# Python API\n\nImport these names from `composer_mesh`.\n"
    stub = ast.parse((ROOT / "src/composer_mesh/__init__.pyi").read_text())
    names = {
        name.name: one.module
        for one in stub.body
        if isinstance(one, ast.ImportFrom) and one.module
        for name in one.names
    }
    for name, module in sorted(names.items()):
        yield f"::: composer_mesh.{module}.{name}\n"
