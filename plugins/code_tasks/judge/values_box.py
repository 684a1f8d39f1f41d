"""Calls the functions in a fresh box on hidden inputs, and compares what they return out here.

The box gets inputs only. Whoever forges its answers has to know the right values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composer_mesh.plugins.code_tasks.judge.judged_task import HiddenCase, JudgedTask
from composer_mesh.plugins.code_tasks.judge.tests_box import BoxReport, run_program
from composer_mesh.tasks.sandbox import FileTree, Sandbox, SandboxLimits


@dataclass(frozen=True)
class ValueResults:
    """How many hidden cases agree by value and exact type."""

    agreeing: int
    cases: int
    box: BoxReport

    @property
    def all_agree(self) -> bool:
        """Whether every case was answered once, and rightly."""
        return self.agreeing == self.cases and not self.box.report.faults


async def compare_values(
    sandbox: Sandbox,
    task: JudgedTask,
    tree: FileTree,
    changed: Sequence[str],
    limits: SandboxLimits,
) -> ValueResults:
    """Run all hidden cases of a task on a tree. Waits for a box; SandboxError where that fails."""
    calls = [
        {"target": one.target, "arguments": list(one.arguments), "keywords": dict(one.keywords)}
        for one in task.cases
    ]
    spec = {"imports": list(task.imports), "changed": list(changed), "calls": calls}
    box = await run_program(sandbox, tree, "call_functions", spec, limits)
    lines = box.report.of("value")
    answers = {line["place"]: line for line in lines if type(line.get("place")) is int}
    agreeing = sum(agrees(case, answers.get(place)) for place, case in enumerate(task.cases))
    return ValueResults(agreeing, len(task.cases), box)


def agrees(case: HiddenCase, answer: Any) -> bool:
    """Whether an answer from the box is what the original did."""
    if answer is None:
        return False
    try:
        return _agrees(case, answer)
    except RecursionError:
        return False  # nested deeper than any value that was recorded


def _agrees(case: HiddenCase, answer: Any) -> bool:
    if "raised" in case.expected:
        return same(case.expected["raised"], answer.get("raised"))
    if "returned" not in answer or not same(case.expected["returned"], answer["returned"]):
        return False
    after = case.arguments_after
    return after is None or same(list(after), answer.get("arguments"))


def _pairs(value: Any) -> list[Any] | None:
    """Return the items of an encoded dict by their keys; dicts are equal in any order."""
    items = value.get("dict") if isinstance(value, dict) and len(value) == 1 else None
    if not isinstance(items, list) or not all(isinstance(one, list) for one in items):
        return None
    return sorted(items, key=lambda item: json.dumps(item[:1], sort_keys=True))


def same(expected: Any, found: Any) -> bool:
    """Whether two JSON values are equal in value and type: 1, 1.0 and true are three values.

    >>> same([1, {"a": 2.0}], [1, {"a": 2.0}]), same(1, True), same(1, 1.0)
    (True, False, False)
    """
    if type(expected) is not type(found):
        return False
    pairs = _pairs(expected), _pairs(found)
    if pairs[0] is not None and pairs[1] is not None:
        return same(*pairs)
    if isinstance(expected, dict):
        return expected.keys() == found.keys() and all(
            same(expected[k], found[k]) for k in expected
        )
    if isinstance(expected, list):
        return len(expected) == len(found) and all(map(same, expected, found))
    if isinstance(expected, float):
        return expected.hex() == found.hex()
    return bool(expected == found)
