"""Coding tasks of a small package are made, proved and graded in real boxes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from real_boxes import why_no_boxes
from small_packages import FILES

from composer_mesh.mesh.sandboxes.boxes import Boxes
from composer_mesh.plugins.code_tasks.command.command import Results, check_tasks, copy_tasks
from composer_mesh.plugins.code_tasks.judge.judge import CodeJudge
from composer_mesh.plugins.code_tasks.judge.judged_task import HiddenCase
from composer_mesh.plugins.code_tasks.making.make import made_of
from composer_mesh.plugins.code_tasks.making.package import MakingLimits, PackageRefused, package_of
from composer_mesh.plugins.code_tasks.task_file import TaskFile
from composer_mesh.plugins.code_tasks.values import decode

LIMITS = MakingLimits(suite_s=60)


@pytest.fixture(scope="module")
def boxes() -> Iterator[Boxes]:
    import asyncio

    if (missing := why_no_boxes()) is not None:
        pytest.skip(missing)
    sandbox = Boxes(boxes=2, bytecode=True)
    yield sandbox
    asyncio.run(sandbox.close())


async def test_tasks_of_a_package_are_proved_and_graded_rightly(
    boxes: Boxes, tmp_path: Path
) -> None:
    made = await made_of(boxes, package_of("small", "1.2", "", FILES), LIMITS)
    tasks = {row["name"].partition("/")[2]: row for row in made.tasks}
    assert set(tasks) == {
        *("small.sums:total", "small.sums:upwards", "small.sums:Counter.after"),
        *("small.sums:Counter.reset", "small.sums:Counter", "small.texts:shout"),
    } | {one for one in tasks if one.startswith("tests/")}
    assert (made.tests, made.stable) == (8, 7)
    total = tasks["small.sums:total"]
    assert not any("test_wrong_by_itself" in one for one in total["fail_to_pass"])
    assert {"returned": 5} in [one["expected"] for one in total["cases"]]
    (upwards, *_) = tasks["small.sums:upwards"]["cases"]
    assert upwards["expected"] == {"returned": {"iterator": [0, 1, 2]}}
    (after, *_) = tasks["small.sums:Counter.after"]["cases"]
    assert after["arguments"] == [{"object": ["small.sums:Counter", [3], {}]}, 2]
    assert after["expected"] == {"returned": 6}
    results, file = Results(["small"], {"small": made}), tmp_path / "tasks.jsonl"
    assert results.write(file, []) == len(tasks)
    assert json.loads(file.read_text().split("\n")[0])["tree"] == "small-1.2"
    told: list[str] = []
    right = await check_tasks(boxes, file, 2, 1, 2, told.append)
    assert right.all, told
    assert told[-1].startswith("2 tasks graded 1 times: 0 gradings are wrong")
    assert copy_tasks(file, tmp_path / "right.jsonl", right.tasks) == 2
    assert len((tmp_path / "right.jsonl").read_text().splitlines()) == 3


async def test_a_test_that_waits_is_no_part_of_a_task(boxes: Boxes) -> None:
    waits = b"import time\nfrom small.sums import total\n\n\ndef test_waits():\n"
    waits += b"    time.sleep(0.001)\n    assert total([1]) == 1\n"
    package = package_of("small", "1.2", "", {**FILES, "tests/test_waits.py": waits})
    made = await made_of(boxes, package, LIMITS)
    named = {one for row in made.tasks for one in (*row["fail_to_pass"], *row["pass_to_pass"])}
    assert (made.tests, made.stable) == (9, 7)
    assert named
    assert not any("test_waits" in one for one in named)


async def test_renamed_packages_and_repairs_are_proved_and_graded_rightly(
    boxes: Boxes, tmp_path: Path
) -> None:
    limits = replace(LIMITS, rename=True, bugs=1, generated=0)
    made = await made_of(boxes, package_of("small", "1.2", "", FILES), limits)
    kinds = {row["kind"] for row in made.tasks}
    assert {"function", "repair"} <= kinds
    assert not any("small.sums:total" in row["name"] for row in made.tasks)
    file, told = tmp_path / "tasks.jsonl", list[str]()
    Results(["small"], {"small": made}).write(file, [])
    right = await check_tasks(boxes, file, None, 1, 2, told.append)
    assert right.all, told


async def test_a_table_of_what_the_tests_show_is_not_right(boxes: Boxes, tmp_path: Path) -> None:
    made = await made_of(boxes, package_of("small", "1.2", "", FILES), LIMITS)
    file = tmp_path / "tasks.jsonl"
    Results(["small"], {"small": made}).write(file, [])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    (row,) = [one for one in rows if one.get("name", "").endswith("small.sums:total")]
    task = TaskFile(rows).tasks[row["name"]]
    table = {}
    bare = await made_of(boxes, package_of("small", "1.2", "", FILES), replace(LIMITS, generated=0))
    (recorded,) = [one for one in bare.tasks if one["name"] == row["name"]]
    for case in recorded["cases"]:
        arguments = [decode(one) for one in case["arguments"]]
        table[repr(arguments)] = decode(case["expected"]["returned"])
    assert len(row["cases"]) > len(table)
    before = task.files["small/sums.py"].decode()
    body = f"    known = {table!r}\n    return known[repr([values, start])]\n"
    path = {"small/sums.py": before.replace("    raise NotImplementedError\n", body, 1).encode()}
    judge = CodeJudge(boxes)
    without = replace(task, cases=tuple(map(_case, recorded["cases"])))
    assert (await judge.judge(without, path)).solved
    verdict = await judge.judge(task, path)
    assert (verdict.solved, verdict.tests) == (False, 1.0)
    assert verdict.agreeing < len(task.cases)


def _case(row: dict[str, Any]) -> HiddenCase:
    after = row.get("arguments_after")
    return HiddenCase(
        row["target"],
        tuple(row["arguments"]),
        row["keywords"],
        row["expected"],
        None if after is None else tuple(after),
    )


async def test_a_package_whose_tests_do_not_pass_is_refused(boxes: Boxes) -> None:
    broken = {**FILES, "tests/test_small.py": b"import nothing_like_this\n"}
    with pytest.raises(PackageRefused, match=r"none of its tests passes unmodified: .*nothing"):
        await made_of(boxes, package_of("small", "1.2", "", broken), LIMITS)


async def test_a_package_that_every_box_has_already_is_refused(boxes: Boxes) -> None:
    moved = {
        path.replace("small/", "pluggy/"): content.replace(b"small.", b"pluggy.")
        for path, content in FILES.items()
        if "egg-info" not in path
    }
    with pytest.raises(PackageRefused, match=r"not imported from|none of its tests passes"):
        await made_of(boxes, package_of("other", "1.2", "", moved), LIMITS)
