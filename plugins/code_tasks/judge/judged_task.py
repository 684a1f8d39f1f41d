"""What the judge knows of a coding task, which edits of an agent it takes, and its verdict.

All of it stays outside of boxes but the tree. Only modules of the package are taken: tests,
configuration and everything that Python or pytest would run by itself are those of the pristine
tree.
"""

from __future__ import annotations

import os
import re
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


PATH = re.compile(r"[A-Za-z0-9_\-]+(/[A-Za-z0-9_\-]+)*\.pyi?")
NEW_MODULE = re.compile(r"(.*/)?[A-Za-z_][A-Za-z0-9_]*\.py")
TEST_MODULE = re.compile(
    r"(.*/)?(conftest|test_[^/]*|[^/]*_test|tests?|sitecustomize|usercustomize)\.py"
)
TEST_FOLDER = re.compile(r"(.*/)?(tests?|testing)/.*")
LONGEST_PATH = 300
LARGEST_FILE = 1_000_000
MOST_BYTES = 4_000_000
MOST_FILES = 200


@dataclass(frozen=True)
class TakenEdits:
    """The edits that are judged, and the paths of the others with the reason for each."""

    files: Mapping[str, bytes | None]
    refused: Mapping[str, str] = field(default_factory=dict)


def taken_edits(task: JudgedTask, edits: Mapping[str, bytes | None]) -> TakenEdits:
    """Return the edits of the package's own modules; those that change nothing count nowhere."""
    files: dict[str, bytes | None] = {}
    refused: dict[str, str] = {}
    size = 0
    for path in sorted(edits):
        content = edits[path]
        if content == task.files.get(path):
            continue
        reason = refusal(task, path, content)
        size += len(content or b"")
        if reason is None and (len(files) >= MOST_FILES or size > MOST_BYTES):
            reason = "too_much"
        if reason is None:
            files[path] = content
        else:
            refused[_shown(path)] = reason
    return TakenEdits(files, refused)


def refusal(task: JudgedTask, path: str, content: bytes | None) -> str | None:
    """Return why an edit is not taken; None if it is."""
    if len(path) > LONGEST_PATH or not PATH.fullmatch(path):
        return "no_module"
    if is_test(path) and path not in _target_modules(task):
        return "tests_or_configuration"
    if not _in_package(task, path):
        return "outside_package"
    if len(content or b"") > LARGEST_FILE:
        return "too_large"
    if path not in task.files and not _fits_package(task, path):
        return "new_outside_package"
    return None


def is_test(path: str) -> bool:
    """Whether a path is of tests, or of what Python or pytest run by themselves."""
    return bool(TEST_MODULE.fullmatch(path) or TEST_FOLDER.fullmatch(path))


def without_tests(task: JudgedTask) -> dict[str, bytes]:
    """Return the pristine tree without its tests, for boxes that need to know no test."""
    return {
        path: content
        for path, content in task.files.items()
        if path not in task.test_files and (_in_package(task, path) or not is_test(path))
    }


def _in_package(task: JudgedTask, path: str) -> bool:
    return any(path == one or path.startswith(f"{one.rstrip('/')}/") for one in task.sources)


def _target_modules(task: JudgedTask) -> set[str]:
    modules = {target.partition(":")[0].replace(".", "/") for target in task.targets}
    return {
        os.path.normpath(f"{folder}/{module}{end}")
        for folder in task.imports
        for module in modules
        for end in (".py", "/__init__.py")
    }


def _fits_package(task: JudgedTask, path: str) -> bool:
    """Whether a new module is in a package of the pristine tree, where it hides no other."""
    folder = path.rpartition("/")[0]
    return bool(NEW_MODULE.fullmatch(path)) and f"{folder}/__init__.py" in task.files


def _shown(path: str) -> str:
    return path[:LONGEST_PATH].encode("unicode_escape").decode("ascii")
