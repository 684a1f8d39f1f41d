"""The judge of coding tasks, with boxes that answer from a script."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from code_rows import OTHER, RIGHT, SOURCE, TEST
from code_tasks import TASK, ScriptedBoxes, honest, reported_tests, said, values

from composer_mesh.plugins.code_tasks.judge.copies import deleted_texts
from composer_mesh.plugins.code_tasks.judge.judge import CodeJudge, canaries_for
from composer_mesh.plugins.code_tasks.judge.judged_task import (
    HiddenCase,
    JudgedTask,
    Verdict,
    taken_edits,
)
from composer_mesh.plugins.code_tasks.judge.tests_box import agrees, read_report, same
from composer_mesh.plugins.code_tasks.values import encode
from composer_mesh.tasks.sandbox import FileTree, SandboxError

SOLVED = {"lib/sums.py": RIGHT}


async def judged(boxes: ScriptedBoxes, edits: Any = SOLVED, task: Any = TASK) -> Verdict:
    return await CodeJudge(boxes).judge(task, edits)


async def test_right_work_is_solved_by_values_from_a_second_box() -> None:
    boxes = ScriptedBoxes()
    verdict = await judged(boxes)
    assert verdict.solved
    assert (verdict.tests, verdict.agreeing, verdict.cases, verdict.basis) == (1.0, 2, 2, "values")
    assert [("calls" in spec) for spec in boxes.specs] == [False, True]


async def test_no_expected_value_and_no_test_is_in_the_box_of_the_values() -> None:
    boxes = ScriptedBoxes()
    await judged(boxes)
    assert set(boxes.trees[1].files()) == {"lib/__init__.py", "lib/sums.py"}
    assert all(set(one) == {"target", "arguments", "keywords"} for one in boxes.specs[1]["calls"])


async def test_a_wrong_value_is_no_success_although_all_tests_pass() -> None:
    def answer(spec: dict[str, Any], tree: FileTree) -> list[dict[str, Any]]:
        if "calls" not in spec:
            return honest(spec, tree)
        return [values(0, 6), values(1, -2.0), {"kind": "end", "lines": 2}]

    verdict = await judged(ScriptedBoxes(answer))
    assert not verdict.solved
    assert (verdict.tests, verdict.agreeing) == (1.0, 1)


async def test_a_canary_that_passes_takes_all_credit_of_the_tests() -> None:
    def answer(spec: dict[str, Any], tree: FileTree) -> list[dict[str, Any]]:
        return reported_tests(spec["wanted"], spec["wanted"])

    verdict = await judged(ScriptedBoxes(answer))
    assert (verdict.solved, verdict.tests) == (False, 0.0)
    assert verdict.flags["canary"] >= 3


async def test_a_canary_that_is_not_reported_is_one_that_passed() -> None:
    def answer(spec: dict[str, Any], tree: FileTree) -> list[dict[str, Any]]:
        return reported_tests([TEST, OTHER], [TEST, OTHER])

    verdict = await judged(ScriptedBoxes(answer))
    assert not verdict.solved
    assert verdict.flags["canary"] >= 3


async def test_tampering_that_is_seen_takes_all_credit_of_the_tests() -> None:
    def answer(spec: dict[str, Any], tree: FileTree) -> list[dict[str, Any]]:
        return reported_tests(spec["wanted"], [TEST, OTHER], tampered=["json.dumps"])

    verdict = await judged(ScriptedBoxes(answer))
    assert (verdict.solved, verdict.tests, verdict.flags["tamper"]) == (False, 0.0, 1)


async def test_a_test_that_passed_before_and_fails_now_is_no_success() -> None:
    def answer(spec: dict[str, Any], tree: FileTree) -> list[dict[str, Any]]:
        return honest(spec, tree) if "calls" in spec else reported_tests(spec["wanted"], [TEST])

    verdict = await judged(ScriptedBoxes(answer))
    assert (verdict.solved, verdict.tests, verdict.failed) == (False, 1.0, (OTHER,))


async def test_a_box_that_fails_is_an_error_and_no_verdict() -> None:
    boxes = ScriptedBoxes()
    boxes.error = SandboxError("no box could be started")
    with pytest.raises(SandboxError):
        await judged(boxes)


async def test_a_timeout_is_told_and_is_no_success() -> None:
    boxes = ScriptedBoxes(lambda spec, tree: [])
    boxes.result = {"exit_code": None, "ended": "wall_time"}
    verdict = await judged(boxes)
    assert not verdict.solved
    assert dict(verdict.flags) == {"timeout": 1}


async def test_a_task_without_hidden_cases_says_that_tests_alone_decided() -> None:
    verdict = await judged(ScriptedBoxes(), task=replace(TASK, cases=()))
    assert (verdict.solved, verdict.basis, verdict.agreeing) == (True, "tests", None)
    more = replace(TASK, targets=(*TASK.targets, "lib.sums:other"))
    assert (await judged(ScriptedBoxes(), task=more)).basis == "values_and_tests"


async def test_tests_and_configuration_are_those_of_the_pristine_tree() -> None:
    edits = {"tests/test_sums.py": b"def test_two(): pass\n", "tests/conftest.py": b"", **SOLVED}
    boxes = ScriptedBoxes()
    await judged(boxes, edits)
    assert boxes.trees[0].read("tests/test_sums.py").startswith(TASK.files["tests/test_sums.py"])
    assert "tests/conftest.py" not in boxes.trees[0].files()


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("tests/test_sums.py", "tests_or_configuration"),
        ("lib/conftest.py", "tests_or_configuration"),
        ("sitecustomize.py", "tests_or_configuration"),
        ("pytest.ini", "no_module"),
        ("lib/__pycache__/sums.cpython-311.pyc", "no_module"),
        ("lib/../tests/a.py", "no_module"),
        ("/lib/sums.py", "no_module"),
        ("lib/sums\n.py", "no_module"),
        ("lib/\udcff.py", "no_module"),
        ("json.py", "outside_package"),
        ("library/sums.py", "outside_package"),
        ("lib/new/module.py", "new_outside_package"),
    ],
)
def test_only_modules_of_the_package_are_taken(path: str, reason: str) -> None:
    taken = taken_edits(TASK, {path: b"x = 1\n", **SOLVED})
    assert list(taken.files) == ["lib/sums.py"]
    assert list(taken.refused.values()) == [reason]


def test_new_modules_beside_those_of_a_package_and_removed_ones_are_taken() -> None:
    edits = {"lib/helpers.py": b"x = 1\n", "lib/sums.py": None}
    assert taken_edits(TASK, edits).files == edits


def test_what_is_taken_is_bounded() -> None:
    assert taken_edits(TASK, {"lib/sums.py": b"#" * 1_000_001}).refused == {
        "lib/sums.py": "too_large"
    }
    many = {f"lib/m{n}.py": b"x = 1\n" for n in range(500)}
    assert len(taken_edits(TASK, many).files) == 200


def test_canaries_have_other_names_each_time_and_are_beside_real_tests() -> None:
    first, second = canaries_for(TASK), canaries_for(TASK)
    assert len(first.ids) >= 4
    assert not first.ids & second.ids
    assert {one.split("::")[0] for one in first.ids} & set(TASK.test_files)


def test_a_canary_calls_the_deleted_function_on_a_hidden_input() -> None:
    texts = b"".join(canaries_for(TASK).files.values())
    assert b"value(*(3,))" in texts
    odd = HiddenCase("lib.sums:double", (3,), {"key": 1}, {"returned": 6})
    assert b"value(*" not in b"".join(canaries_for(replace(TASK, cases=(odd,))).files.values())


END = {"kind": "end", "lines": 1}
LINE = {"kind": "value", "place": 0, "returned": 1}


def test_a_report_is_its_lines_up_to_the_end() -> None:
    report = read_report(said("m", [LINE, END]), "m")
    assert not report.faults
    assert [line["kind"] for line in report.lines] == ["value", "end"]


@pytest.mark.parametrize(
    ("stdout", "fault"),
    [
        (b"", "early_exit"),
        (said("m", [LINE]), "early_exit"),
        (said("m", [LINE, END, LINE]), "out_of_order"),
        (said("m", [LINE, END, END]), "out_of_order"),
        (said("m", [LINE, END]) + said("m", [LINE]), "out_of_order"),
        (said("m", [END]), "out_of_order"),
        (said("other", [LINE, END]), "foreign_output"),
        (b"5 passed in 0.1s\n" + said("m", [LINE, END]), "foreign_output"),
        (b"[" * 100_000 + b"\n" + said("m", [LINE, END]), "foreign_output"),
        (b"\xff\x00\n" + said("m", [LINE, END]), "foreign_output"),
    ],
)
def test_what_no_honest_program_writes_is_a_fault(stdout: bytes, fault: str) -> None:
    assert fault in read_report(stdout, "m").faults


@pytest.mark.parametrize(
    ("expected", "found"),
    [(1, True), (1, 1.0), (0.0, -0.0), (1, "1"), ([1], [1, 2]), ({"a": 1}, {"a": 1, "b": 2})],
)
def test_values_of_another_type_are_other_values(expected: Any, found: Any) -> None:
    assert not same(expected, found)
    assert same(expected, expected)
    assert same(found, found)


def test_dicts_are_equal_in_any_order_and_by_all_their_items() -> None:
    one, other = (
        encode({"a": 1, "b": [{"c": 2, "d": 3}]}),
        encode({"b": [{"d": 3, "c": 2}], "a": 1}),
    )
    assert same(one, other)
    assert not same(one, encode({"a": 1, "b": [{"c": 2, "d": True}]}))
    assert not same(encode({1: 2}), encode({True: 2}))
    assert not same(one, {"dict": [1, 2]})


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"raised": "builtins.ValueError"},
        {"unencodable": "Any: TypeError"},
        {"returned": True},
        {"returned": [6]},
        {"returned": 6, "arguments": [4]},
    ],
)
def test_an_answer_without_the_right_value_disagrees(answer: Any) -> None:
    case = HiddenCase("m:f", (3,), {}, {"returned": 6}, (3,))
    assert not agrees(case, answer)
    assert agrees(case, {"returned": 6, "arguments": [3]})


async def test_what_the_pristine_module_does_when_it_runs_flags_nobody() -> None:
    def answer(spec: dict[str, Any], tree: FileTree) -> list[dict[str, Any]]:
        *lines, end = honest(spec, tree)
        return [*lines, {**end, "audit": {"process": 2, "network": 1}}]

    assert set((await judged(ScriptedBoxes(answer))).flags) == {
        "runtime_network",
        "runtime_process",
    }
    before = b"import os\n\n\ndef other():\n    os.fork()\n\n\n" + SOURCE
    task = replace(TASK, files={**TASK.files, "lib/sums.py": before})
    assert set((await judged(ScriptedBoxes(answer), task=task)).flags) == {"runtime_network"}


DEEP = json.loads("[" * 900 + "]" * 900)


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "value", "place": [0], "returned": 6},
        {"kind": "value", "place": True, "returned": 6},
        {"kind": "value", "place": 0, "returned": {"dict": [[DEEP, 1], [DEEP, 2]]}},
        {"kind": "value", "place": 0, "returned": 10**400},
        {"kind": "value", "place": 0, "returned": float("nan")},
        {"kind": "value", "place": 0, "arguments": 3},
        {"kind": "test", "id": ["x"], "outcome": {}},
        {"kind": "test", "id": TEST, "outcome": "passed", "text": [1]},
        {"kind": "end", "lines": [], "tampered": {}, "audit": []},
        {"kind": "end", "lines": 0, "audit": {"process": -5, "x": 3, "network": "y"}},
    ],
)
async def test_no_line_of_an_agents_breaks_the_judge(line: dict[str, Any]) -> None:
    def answer(spec: dict[str, Any], tree: FileTree) -> list[dict[str, Any]]:
        return [line, *honest(spec, tree)]

    task = replace(TASK, cases=(HiddenCase("m:f", (), {}, {"returned": encode({(1,): 2})}),))
    assert not (await judged(ScriptedBoxes(answer), task=task)).solved
    mixed = ScriptedBoxes(lambda s, t: [line] if "calls" in s else honest(s, t))
    assert not (await judged(mixed, task=task)).solved


async def test_output_above_its_bound_is_told_and_is_no_hack() -> None:
    boxes = ScriptedBoxes(lambda spec, tree: honest(spec, tree)[:1])
    boxes.result = {"output_cut": True}
    assert dict((await judged(boxes)).flags) == {"output_cut": 1}


def test_a_raised_exception_is_compared_by_its_class() -> None:
    case = HiddenCase("m:f", (3,), {}, {"raised": "builtins.ValueError"})
    assert agrees(case, {"raised": "builtins.ValueError"})
    assert not agrees(case, {"raised": "builtins.KeyError"})
    assert not agrees(case, {"returned": None})


def test_the_pristine_source_is_no_edit() -> None:
    assert not taken_edits(TASK, {"lib/sums.py": SOURCE}).files


def test_deleted_texts_are_found_among_lines_that_repeat() -> None:
    kept = ["", "x = 1", ""] * 20
    first, second = ["def a():", "    return 1"], ["def b():", "", "    return 2"]
    solution = "\n".join([*kept, *first, *kept, *second, *kept])
    task = JudgedTask("a", {"f.py": "\n".join([*kept] * 3).encode()}, ("f.py",), (), ())
    found = deleted_texts(task, {"f.py": solution})
    assert [text.strip() for text in found] == ["\n".join(first), "\n".join(second)]
    assert deleted_texts(task, {"f.py": "\n".join([*kept] * 3)}) == []
    assert deleted_texts(task, {"g.py": "y = 2"}) == ["y = 2"]
