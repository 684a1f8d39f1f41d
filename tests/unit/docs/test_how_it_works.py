"""The pages "how it works" list real files, in an order in which each is reached from another."""

import ast
import re
from pathlib import Path

import pytest
from repository import ROOT

PAGES = sorted((ROOT / "docs" / "how-it-works").glob("*.md"))
LINE = re.compile(r"^(\d+)\. `([\w/]+\.py)` `([\w.]+)`: [A-Za-z'](?:.*port `(\w+)`|.*[^.])\.$")
MOST = {"rollout": 65, "weight-version": 25, "teacher-query": 30, "config-value": 19}
"""Files that each way may have: a new one takes the place of another."""


def steps_of(page: Path) -> list[tuple[str, str, str]]:
    """Return file, name and what an earlier file calls it: its port, or the end of its name."""
    lines = [line for line in page.read_text().splitlines() if re.match(r"\d+\.", line)]
    found = [LINE.match(line) for line in lines]
    assert None not in found, lines[found.index(None)]
    assert [int(one[1]) for one in found if one] == list(range(1, len(lines) + 1))
    return [(one[2], one[3], one[4] or one[3].rpartition(".")[2]) for one in found if one]


def imported_by(file: str) -> set[str]:
    """Return the modules of the project that a file imports, as files."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = node.module.removeprefix("composer_mesh").strip(".").replace(".", "/")
            found |= {f"{module}.py", *(f"{module}/{one.name}.py" for one in node.names)}
    return found


def defined_in(file: str) -> set[str]:
    """Return the functions, classes, methods and constants of a file."""
    tree = ast.parse((ROOT / file).read_text())
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            methods = (ast.FunctionDef, ast.AsyncFunctionDef)
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, methods)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.Assign):
            found |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    return found


def test_there_are_four_ways() -> None:
    assert {page.stem for page in PAGES} == set(MOST)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_file_is_reached_from_an_earlier_one(page: Path) -> None:
    steps = steps_of(page)
    assert len(steps) <= MOST[page.stem]
    for number, (file, name, called) in enumerate(steps):
        assert name in defined_in(file), f"{file} defines no {name}"
        earlier = [one for one, _, _ in steps[:number]]
        assert not earlier or any(
            file in imported_by(one) or re.search(rf"\b{called}\b", (ROOT / one).read_text())
            for one in earlier
        ), f"no earlier file imports {file} or names {called}"
