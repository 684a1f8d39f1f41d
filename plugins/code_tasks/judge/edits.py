"""Which of an agent's edits the judge takes: modules of the package, and nothing else.

Tests, configuration and everything that Python or pytest would run by itself are taken from the
pristine tree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from composer_mesh.plugins.code_tasks.judge.judged_task import JudgedTask

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
