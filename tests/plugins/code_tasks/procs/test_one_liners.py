"""The task one_liners in real boxes, or in plain processes where a machine can make none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import product

import pytest
from process_sandbox import ProcessSandbox
from real_boxes import why_no_boxes

from composer_mesh.mesh.sandboxes.boxes import Boxes
from composer_mesh.plugins.code_tasks.one_liners import (
    CALLS,
    DIGITS,
    FIRST,
    HEAD,
    INFIX,
    NAMES,
    Expression,
    OneLiners,
)
from composer_mesh.plugins.code_tasks.static_rules import HINTS
from composer_mesh.rollouts.hints import TEMPLATES, render_hint
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.sandbox import FileTree, Sandbox

VALUES = {"a": 7, "b": -5, "c": 3}
PROGRAM = """
import json, sys
a, b, c = 7, -5, 3
print(json.dumps([eval(line) for line in json.load(sys.stdin)]))
"""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    opened = ProcessSandbox() if why_no_boxes() else Boxes(boxes=2, bytecode=True)
    yield opened
    asyncio.run(opened.close())


@pytest.fixture
def task(sandbox: Sandbox) -> OneLiners:
    made = OneLiners.create()
    made.sandbox = sandbox
    return made


def every_expression() -> Iterator[Expression]:
    terms = NAMES + DIGITS
    heads = [(one, x, y) for one, x, y in product(FIRST, NAMES, terms) if x != y]
    tails = [(then, z) for then in INFIX for z in (DIGITS if then == "modulo" else terms)]
    for first, x, y in heads:
        yield Expression(first, x, y)
        yield from (Expression(first, x, y, then, z) for then, z in tails)


async def test_every_expression_has_the_value_that_python_gives_its_line(sandbox: Sandbox) -> None:
    every = list(every_expression())
    assert len(every) == 6300
    assert len({one.words for one in every}) == 6300
    assert {one.first for one in every} > set(CALLS)
    lines = json.dumps([one.python() for one in every]).encode()
    result = await sandbox.run(FileTree({}), ["python3", "-I", "-c", PROGRAM], stdin=lines)
    assert json.loads(result.stdout) == [one.value(VALUES) for one in every]


def test_the_expert_solves_an_episode_and_a_wrong_line_does_not(task: OneLiners) -> None:
    wrong = call_text("write_file", {"path": "f.py", "content": f"{HEAD}return 1000\n"})
    with SyncSession(task, task.episode("train", 0)) as session:
        session.step(wrong)
        failed = session.step(call_text("run_tests", {})).error
        assert failed is not None
        assert failed.error_kind == "test_failed"
        hint = render_hint(failed, None, TEMPLATES.extended(HINTS))
        assert "test_f.py::test_" in hint
        assert "assert" in hint
        while not (step := session.step(task.expert(session.messages))).done:
            assert step.error is None
        assert session.outcome().success
    with SyncSession(task, task.episode("train", 0)) as session:
        session.step(wrong)
        session.step(call_text("submit", {}))
        assert not session.outcome().success
