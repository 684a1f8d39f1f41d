"""What the judge knows of a coding task, and its verdict.

All of it stays outside of boxes but the tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Basis = Literal["values", "values_and_tests", "tests"]
"""What the verdict rests on: hidden values of all deleted functions, of some, or of none."""


@dataclass(frozen=True)
class Verdict:
    """What a judge found: whether the work is right, and the share of visible tests it passes.

    `tests` is 0 where the reports of the tests contradict themselves. `flags` counts what the
    monitor and the boxes saw, by kind. `agreeing` hidden cases of all `cases` have the right value;
    None where they were not requested, because the tests had failed. `refused` are paths of edits
    that were not taken.
    """

    solved: bool
    tests: float
    basis: Basis
    passed: int
    failed: tuple[str, ...] = ()
    agreeing: int | None = None
    cases: int = 0
    flags: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HiddenCase:
    """A call of a deleted function, and what the original did: all as tagged JSON.

    `target` is "module:name". `expected` has one key: `returned`, or `raised` with the full name of
    the exception's class. `arguments_after` are the positional arguments after the call; None
    where they are not compared. An argument may be
    {"object": ["module:Class", arguments, keywords]}: the class makes it in the box.
    """

    target: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    expected: Mapping[str, Any]
    arguments_after: tuple[Any, ...] | None = None

    @property
    def has_objects(self) -> bool:
        """Whether an argument is made by a class of the tree."""
        return any(isinstance(one, dict) and set(one) == {"object"} for one in self.arguments)


@dataclass(frozen=True)
class JudgedTask:
    """A tree with functions deleted, its tests by id, and hidden cases.

    `files` is the pristine tree as the agent got it, `hidden_files` are tests that it did not get.
    `sources` are the package's folders or single modules, `imports` the folders from which they
    are imported. `visible` are those of `fail_to_pass` that the agent could see.
    """

    name: str
    files: Mapping[str, bytes]
    sources: tuple[str, ...]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    hidden_files: Mapping[str, bytes] = field(default_factory=dict)
    visible: tuple[str, ...] | None = None
    imports: tuple[str, ...] = (".",)
    targets: tuple[str, ...] = ()
    cases: tuple[HiddenCase, ...] = ()

    @property
    def visible_tests(self) -> tuple[str, ...]:
        """The failing tests that the agent could see; all if nothing is said."""
        return self.fail_to_pass if self.visible is None else self.visible

    @property
    def tests(self) -> tuple[str, ...]:
        """All tests that right work passes."""
        return (*self.fail_to_pass, *self.pass_to_pass)

    @property
    def test_files(self) -> tuple[str, ...]:
        """The files of all tests that are judged, in order of their names."""
        return tuple(sorted({file_of(one) for one in self.tests}))

    @property
    def covered(self) -> frozenset[str]:
        """The deleted functions that hidden cases call."""
        return frozenset(case.target for case in self.cases)


def with_hidden_tests(task: JudgedTask) -> JudgedTask:
    """Return the same task with all tests of the feature hidden from the agent.

    Files that have other tests too are hidden whole. The dense signal stays that of all of them.
    """
    hidden = {file_of(one) for one in task.fail_to_pass}
    return replace(
        task,
        files={path: text for path, text in task.files.items() if path not in hidden},
        hidden_files={
            **task.hidden_files,
            **{path: text for path, text in task.files.items() if path in hidden},
        },
        visible=task.fail_to_pass,
    )


def file_of(test: str) -> str:
    """Return the file of a test's id.

    >>> file_of("tests/test_a.py::test_b[x::y]")
    'tests/test_a.py'
    """
    return test.split("::", 1)[0]
