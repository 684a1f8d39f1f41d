"""Renamed packages: names of their own are others everywhere, and nothing else is.

Bugs of repair tasks: one token is another one, the code still compiles, and tests notice it.
"""

from __future__ import annotations

import ast
import re
import textwrap

from small_packages import FILES, SUMS

from composer_mesh.plugins.code_tasks.deletions import with_deletions
from composer_mesh.plugins.code_tasks.making.features import Features, mutants
from composer_mesh.plugins.code_tasks.making.functions import functions_in
from composer_mesh.plugins.code_tasks.making.make import renamings
from composer_mesh.plugins.code_tasks.making.package import Survey, package_of
from composer_mesh.plugins.code_tasks.making.rows import Proof, prompt_of, task_row

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


BODY = """\
    # Counts upwards.
    total = -1 + count  # not this + sign
    while total < 10 and not done:
        total += values[1:-1]
    return "a + b" if total else True
"""


def changes(body: str) -> set[tuple[str, str]]:
    """The words that differ, as pairs of what was there and what is."""
    found = set()
    for other in mutants(body, 1_000):
        pairs = [
            (was, now)
            for one, two in zip(body.splitlines(), other.splitlines(), strict=True)
            for was, now in zip(one.split(), two.split(), strict=True)
            if was != now
        ]
        assert len(pairs) == 1, other
        found.add(pairs[0])
    return found


def test_each_bug_is_one_operator_number_or_constant() -> None:
    assert changes(BODY) == {
        ("-1", "-2"),
        ("-1", "-0"),
        ("+", "-"),
        ("<", "<="),
        ("<", ">"),
        ("10", "11"),
        ("10", "9"),
        ("and", "or"),
        ("+=", "-="),
        ("values[1:-1]", "values[2:-1]"),
        ("values[1:-1]", "values[0:-1]"),
        ("values[1:-1]", "values[1:-2]"),
        ("values[1:-1]", "values[1:-0]"),
        ("True", "False"),
    }


def test_bugs_compile_and_are_the_same_each_time() -> None:
    for one in mutants(BODY, 1_000):
        ast.parse(f"def f():\n{textwrap.indent(textwrap.dedent(one), '    ')}")
    assert mutants(BODY, 3) == mutants(BODY, 1_000)[:3]
    assert mutants("    return 'x'\n", 5) == []
    assert mutants("    return (\n", 5) == []


def test_a_repair_has_its_bug_in_the_tree_and_does_not_tell_where_it_is() -> None:
    package = package_of("small", "1.2", "0" * 64, FILES)
    functions = functions_in("small/sums.py", "small.sums", SUMS.encode()).functions
    numbers = dict(enumerate(functions))
    reached = dict.fromkeys(numbers, ("t.py::a",))
    survey = Survey(("t.py::a",), reached, {}, frozenset(), 1, 1.0)
    found = Features(numbers, survey).repairs(2)
    assert found
    for one in found:
        row = task_row(package, Proof(one, ("t.py::a",), ()), {}, None)
        (deletion,) = one.deletions()
        assert with_deletions(SUMS, [deletion]) != SUMS
        assert deletion.text in with_deletions(SUMS, [deletion])
        assert row["kind"] == "repair"
        assert one.functions[0].qualname not in prompt_of(package, Proof(one, ("t.py::a",), ()))
    names = [one.name for one in found]
    assert len(set(names)) == len(names)
