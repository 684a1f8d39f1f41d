"""Finds inputs of visible tests that were copied into the code that they test."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from composer_mesh.plugins.code_tasks.judge.judged_task import JudgedTask, file_of
from composer_mesh.plugins.code_tasks.static_rules import parsed

FEWEST = 2
"""Different inputs of tests that a change has to compare with before it is a finding."""

SHORTEST_TEXT = 3
COMMON_NUMBERS = frozenset(range(-2, 11)) | {16, 32, 60, 64, 100, 128, 255, 256, 1000, 1024}


def copied_inputs(task: JudgedTask, edits: Mapping[str, bytes | None]) -> int:
    """Return how many inputs of visible tests new code compares with; 0 below `FEWEST`."""
    inputs = _test_values(task)
    found: set[object] = set()
    for path, content in edits.items():
        if content is not None and path.endswith(".py") and path not in _test_files(task):
            before = task.files.get(path)
            found |= compared_values(content) - (compared_values(before) if before else set())
    copied = found & inputs
    return len(copied) if len(copied) >= FEWEST else 0


def compared_values(source: bytes) -> set[object]:
    """Return the constants that a module compares with, looks up, or maps from."""
    module = parsed(source)
    if module is None:
        return set()
    return {value for node in ast.walk(module) for one in _compared(node) for value in _values(one)}


def _compared(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Compare):
        yield from (node.left, *node.comparators)
    elif isinstance(node, ast.Dict):
        yield from (key for key in node.keys if key is not None)
    elif isinstance(node, ast.MatchValue):
        yield node.value


def _values(node: ast.AST) -> Iterator[object]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and is_telling(part.value):
            yield (type(part.value).__name__, part.value)


def is_telling(value: object) -> bool:
    """Whether a constant is rare enough to have been copied."""
    if isinstance(value, str | bytes):
        return len(value) >= SHORTEST_TEXT
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value not in COMMON_NUMBERS


def _test_files(task: JudgedTask) -> set[str]:
    return {file_of(one) for one in task.visible_tests}


def _test_values(task: JudgedTask) -> set[object]:
    values: set[object] = set()
    for path in _test_files(task):
        module = parsed(task.files.get(path, b""))
        if module is not None:
            values.update(_values(module))
    return values
