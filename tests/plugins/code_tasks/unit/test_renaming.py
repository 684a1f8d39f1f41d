"""Renamed packages: names of their own are others everywhere, and nothing else is."""

from __future__ import annotations

import ast
import re

from small_packages import FILES

from composer_mesh.plugins.code_tasks.making.functions import functions_in
from composer_mesh.plugins.code_tasks.making.make import renamings
from composer_mesh.plugins.code_tasks.making.package import package_of

MODULE = b'''"""Tells sums with add_up and Total."""
from json import dumps as written
import textwrap

__all__ = ["add_up", "Total", "_hidden_part"]


def add_up(values):
    """As `add_up([1])`."""
    return getattr(Total, "of")(values) + _hidden_part(values)


def _hidden_part(values):
    return len(values) - len(values)


def update(values):
    return {}.update(values)


def dedent(text):
    return textwrap.dedent(text)


def sums():
    return written({})


class Total:
    @staticmethod
    def of(values):
        return sum(values)
'''
PACKAGE = package_of("small", "1.2", "0" * 64, {**FILES, "small/sums.py": MODULE})


def test_own_names_are_others_in_code_strings_and_documentation() -> None:
    every, careful = renamings(PACKAGE)
    assert set(every.names) >= {"add_up", "Total", "_hidden_part", "shout", "copied", "again"}
    assert set(careful.names) == {"add_up", "_hidden_part"}
    files = every.of(PACKAGE).files
    text = files["small/sums.py"].decode()
    assert not re.search(r"\b(add_up|Total|_hidden_part)\b", text)
    assert text.count(every.names["add_up"]) == MODULE.decode().count("add_up")
    assert every.names["_hidden_part"].startswith("_")
    assert every.names["Total"][0].isupper()
    assert len(set(every.names.values())) == len(every.names)
    assert {path: files[path] for path in files if path.startswith("LICENSE")} == {
        path: one for path, one in PACKAGE.files.items() if path.startswith("LICENSE")
    }


def test_names_that_mean_something_else_too_stay() -> None:
    every, _ = renamings(PACKAGE)
    # A method of dict, a function of the standard library, a module of the package.
    assert not {"update", "dedent", "sums"} & set(every.names)


def test_renamed_code_does_the_same_and_is_the_same_each_time() -> None:
    every, _ = renamings(PACKAGE)
    again, _ = renamings(PACKAGE)
    assert again == every
    text = every.of(PACKAGE).files["small/sums.py"]
    space: dict[str, object] = {}
    exec(compile(ast.parse(text), "sums", "exec"), space)
    assert space[every.names["add_up"]]([1, 2]) == 3  # type: ignore[operator]
    before = functions_in("small/sums.py", "small.sums", MODULE, 1).functions
    after = functions_in("small/sums.py", "small.sums", text, 1).functions
    assert [one.line for one in before] == [one.line for one in after]
