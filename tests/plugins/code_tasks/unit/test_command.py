"""The command that makes coding tasks: refusals, the split of packages, the file and the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.plugins.code_tasks.command.command import (
    MakeOptions,
    MakeRefused,
    Results,
    held_out,
    make_code_tasks_command,
    table_of,
)
from composer_mesh.plugins.code_tasks.making.make import Made

HERE = Path(__file__)
OPTIONS = MakeOptions(
    sources=("toolz",),
    output=Path("tasks.jsonl"),
    limit=None,
    jobs=None,
    heldout=(),
    packages=(),
    folders=(),
    indexes=(),
    suite_s=240.0,
    generated=4,
    bugs=0,
    rename=False,
    check=None,
    sample=None,
    gradings=1,
)


def made(name: str, tasks: int = 2) -> Made:
    rows: list[dict[str, Any]] = [
        {
            "name": f"{name}/{number}",
            "kind": "function",
            "lines": number + 3,
            "fail_to_pass": ["t"],
            "cases": [],
        }
        for number in range(tasks)
    ]
    return Made(name, "1", [{"tree": name}, *rows], 9, 5, {"no test": 3}, 2.0, 8, rows)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"sources": ()}, "name a SOURCE"),
        ({"sources": ("toolz", "toolz")}, "toolz is named twice"),
        ({"output": None}, "--output is None"),
        ({"output": Path("tasks.txt")}, "ends in .jsonl"),
        ({"output": Path("no/such/folder/tasks.jsonl")}, "has no folder"),
        ({"limit": 0}, "--limit is 0: give 1 or more"),
        ({"generated": 9}, "--generated is 9: give 0 to 8"),
        ({"bugs": -1}, "--bugs is -1: give 0 to 100"),
        ({"gradings": 0}, "--gradings is 0"),
        ({"check": Path("tasks.jsonl")}, "name no SOURCE"),
        (
            {"check": HERE, "sources": (), "output": HERE},
            "name another file for --output",
        ),
        ({"check": Path("none.jsonl"), "sources": (), "output": None}, "is no file"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_a_box_is_made(
    changed: dict[str, Any], says: str
) -> None:
    with pytest.raises(MakeRefused, match=says):
        make_code_tasks_command(replace(OPTIONS, **changed), print)


def test_whole_packages_are_held_out() -> None:
    packages = [f"p{number}" for number in range(10)]
    assert held_out(packages, []) == {"p4", "p9"}
    assert held_out(packages, ["p1"]) == {"p1"}
    assert held_out(["one"], []) == frozenset()


def test_rows_are_written_in_the_order_of_the_sources_with_their_split(tmp_path: Path) -> None:
    done: dict[str, Made | str] = {"b": made("b"), "c": "it has no tests", "a": made("a")}
    results, file = Results(["a", "b", "c"], done), tmp_path / "tasks.jsonl"
    assert results.write(file, []) == 4
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row.get("name", row.get("tree")) for row in rows] == [
        "a",
        "a/0",
        "a/1",
        "b",
        "b/0",
        "b/1",
    ]
    assert [row.get("split") for row in rows] == [None, *["train"] * 2, None, *["heldout"] * 2]
    assert [one.name for one in tmp_path.iterdir()] == ["tasks.jsonl"]


def test_nothing_is_written_where_no_task_was_made(tmp_path: Path) -> None:
    assert Results(["a"], {"a": made("a", 0)}).write(tmp_path / "tasks.jsonl", []) == 0
    assert list(tmp_path.iterdir()) == []


def test_the_table_tells_each_package_and_what_was_refused() -> None:
    table = "\n".join(table_of(Results(["a", "c"], {"a": made("a"), "c": "it has no tests"})))
    assert table.split("\n")[1].split() == ["a", "1", "9", "8", "5", "2", "0", "3.5", "1.0", "2"]
    assert "candidates refused: 3: no test" in table
    assert table.endswith("c: refused: it has no tests")
