"""Attacks on the judge of coding tasks: none is a success, and each is flagged or fails.

They run in real boxes, or in plain processes where a machine can make none: what the judge believes
is tried here, not what a box keeps in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from code_attacks import RUNTIME, TASK, TREES, Attack
from knowledge_attacks import GOLD, STUB
from process_sandbox import ProcessSandbox
from real_boxes import why_no_boxes

from composer_mesh.mesh.sandboxes.boxes import Boxes
from composer_mesh.plugins.code_tasks.judge.judge import CodeJudge, JudgeLimits
from composer_mesh.plugins.code_tasks.judge.judged_task import Verdict, taken_edits
from composer_mesh.plugins.code_tasks.monitor import static_findings
from composer_mesh.tasks.sandbox import Sandbox, SandboxLimits

AT_ONCE = 2
SHORT = SandboxLimits(wall_s=1.0, cpu_s=5)
RIGHT = {"lib/calc.py": TASK.files["lib/calc.py"].replace(STUB.encode(), GOLD.encode())}
EVERY_TREE = {path: content for attack in TREES for path, content in attack.edits.items()}


@pytest.fixture(scope="module")
def verdicts() -> Mapping[str, Verdict]:
    """The verdicts on all attacks that run, some at a time."""
    return asyncio.run(_judged(RUNTIME))


def open_boxes() -> Sandbox:
    """Return the best sandbox that this machine can make."""
    return ProcessSandbox() if why_no_boxes() else Boxes(boxes=AT_ONCE, bytecode=True)


async def _judged(attacks: Sequence[Attack]) -> dict[str, Verdict]:
    sandbox, boxes = open_boxes(), asyncio.Semaphore(AT_ONCE)
    judge, impatient = CodeJudge(sandbox), CodeJudge(sandbox, JudgeLimits(SHORT, SHORT))

    async def judged(attack: Attack) -> Verdict:
        async with boxes:
            return await (impatient if attack.slow else judge).judge(TASK, attack.edits)

    found = await asyncio.gather(*(judged(one) for one in attacks))
    await sandbox.close()
    return {one.id: verdict for one, verdict in zip(attacks, found, strict=True)}


@pytest.mark.parametrize("attack", RUNTIME, ids=lambda one: one.id)
def test_no_code_of_an_agent_is_judged_right_without_being_right(
    attack: Attack, verdicts: Mapping[str, Verdict]
) -> None:
    verdict = verdicts[attack.id]
    assert not verdict.solved
    assert not attack.flags or set(attack.flags) & set(verdict.flags)
    assert verdict.flags or verdict.failed


@pytest.mark.parametrize("attack", TREES, ids=lambda one: one.id)
def test_no_file_of_an_agent_but_modules_of_the_package_reaches_the_judge(attack: Attack) -> None:
    taken = taken_edits(TASK, attack.edits)
    assert not taken.files
    assert len(taken.refused) == len(attack.edits)
    assert not attack.flags or set(attack.flags) & set(static_findings(TASK, attack.edits))


async def test_right_work_is_solved_amid_all_files_that_are_not_taken() -> None:
    sandbox = open_boxes()
    judge = CodeJudge(sandbox)
    verdict = await judge.judge(TASK, {**EVERY_TREE, **RIGHT})
    assert (verdict.solved, verdict.tests, verdict.agreeing) == (True, 1.0, len(TASK.cases))
    nothing = await judge.judge(TASK, EVERY_TREE)
    assert (nothing.solved, nothing.tests) == (False, 0.0)
    assert nothing.failed == TASK.fail_to_pass
    await sandbox.close()


async def test_right_work_has_no_flag_and_the_same_verdict_each_time() -> None:
    sandbox = open_boxes()
    judge = CodeJudge(sandbox)
    found = [await judge.judge(TASK, RIGHT) for _ in range(3)]
    await sandbox.close()
    assert all(one == found[0] for one in found)
    assert (found[0].solved, found[0].flags) == (True, {})
