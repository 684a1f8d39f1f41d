"""What a wheel installs says nothing of the repository, which its users do not have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT

from composer_mesh.configs.reference import keys
from composer_mesh.configs.schema import Config

PACKAGE = ROOT / "src" / "composer_mesh"
OF_THE_REPOSITORY = re.compile(
    r"\b(docs|configs|examples|benchmarks)/[\w-]+\.|`make \w|\bmake quickstart"
)
DATA = ("*.toml", "*.template", "*.html", "*.js", "*.css")


def folders() -> list[Path]:
    """The folders of the package; links are named, as they are not followed by a search."""
    return [one.resolve() for one in PACKAGE.iterdir() if one.is_dir() and one.name[0] != "_"]


def messages(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Texts of a module with their lines; docstrings are for readers of the repository."""
    docstrings = {
        id(node.value)
        for node in ast.walk(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(module):
        if not isinstance(node, ast.Constant) or id(node) in docstrings:
            continue
        if isinstance(node.value, str):
            yield node.lineno, node.value


@pytest.mark.plugins
def test_no_message_names_a_path_of_the_repository() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text[:80]}"
        for folder in folders()
        for path in folder.rglob("*.py")
        for line, text in messages(ast.parse(path.read_text(encoding="utf-8")))
        if OF_THE_REPOSITORY.search(text)
    ]
    assert found == []


@pytest.mark.plugins
def test_no_shipped_file_names_a_path_of_the_repository() -> None:
    shipped = [path for folder in folders() for kind in DATA for path in folder.rglob(kind)]
    assert len(shipped) > 40
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in shipped
        for match in OF_THE_REPOSITORY.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_no_explanation_of_a_key_names_a_path_of_the_repository() -> None:
    assert [one.path for one in keys(Config) if OF_THE_REPOSITORY.search(one.text)] == []
