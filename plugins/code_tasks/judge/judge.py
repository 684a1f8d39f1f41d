"""Judges an agent's edits: pristine tests in one fresh box, hidden values in another.

    edits -> modules of the package only -> box 1: pristine tests and canaries -> dense signal
                                         -> box 2: hidden inputs -> values, compared out here

A box that fails raises SandboxError: that is no verdict, and never becomes a reward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from composer_mesh.plugins.code_tasks.judge.canaries import Canaries, canaries_for
from composer_mesh.plugins.code_tasks.judge.edits import TakenEdits, taken_edits, without_tests
from composer_mesh.plugins.code_tasks.judge.judged_task import JudgedTask
from composer_mesh.plugins.code_tasks.judge.tests_box import TestResults, run_tests
from composer_mesh.plugins.code_tasks.judge.values_box import ValueResults, compare_values
from composer_mesh.plugins.code_tasks.judge.verdict import Basis, Verdict
from composer_mesh.plugins.code_tasks.monitor import static_findings, without_earlier
from composer_mesh.tasks.sandbox import FileTree, Sandbox, SandboxLimits


@dataclass(frozen=True)
class JudgeLimits:
    """Limits of the two boxes of one grading."""

    tests: SandboxLimits = field(default_factory=SandboxLimits)
    values: SandboxLimits = field(default_factory=SandboxLimits)


class CodeJudge:
    """Judges edits of coding tasks in the boxes of a sandbox."""

    def __init__(self, sandbox: Sandbox, limits: JudgeLimits | None = None) -> None:
        self._sandbox, self._limits = sandbox, limits or JudgeLimits()

    async def judge(self, task: JudgedTask, edits: Mapping[str, bytes | None]) -> Verdict:
        """Return the verdict on an agent's edits. Waits for two boxes, one after the other.

        Values are asked for only where the tests leave the verdict open. Raises SandboxError where
        a box fails.
        """
        taken = taken_edits(task, edits)
        flags = Counter(static_findings(task, edits))
        if taken.refused:
            flags["refused_edit"] += len(taken.refused)
        results, canaries = await self._tests(task, taken)
        flags.update(without_earlier(task, taken.files, results.box.flags))
        fooled = [one for one in canaries.ids if results.outcomes.get(one) != "failed"]
        if results.box.report.end is not None and not results.collection:
            flags["canary"] += len(fooled)
        sound = not fooled and results.box.is_sound
        values = None
        if task.cases and sound and len(results.passed(task.tests)) == len(task.tests):
            values = await self._values(task, taken)
            flags.update(without_earlier(task, taken.files, values.box.flags))
        return _verdict(task, taken, results, sound, values, flags)

    async def _tests(self, task: JudgedTask, taken: TakenEdits) -> tuple[TestResults, Canaries]:
        canaries = canaries_for(task)
        tree = FileTree({**task.files, **task.hidden_files}).with_edits(
            {**taken.files, **canaries.files}
        )
        wanted = (*task.fail_to_pass, *task.pass_to_pass, *canaries.ids)
        files = sorted({*task.test_files, *canaries.files})
        changed, limits = list(taken.files), self._limits.tests
        return (
            await run_tests(self._sandbox, tree, files, wanted, task.imports, changed, limits),
            canaries,
        )

    async def _values(self, task: JudgedTask, taken: TakenEdits) -> ValueResults:
        tree = FileTree(without_tests(task)).with_edits(taken.files)
        return await compare_values(
            self._sandbox, task, tree, list(taken.files), self._limits.values
        )


def basis_of(task: JudgedTask) -> Basis:
    """Return what a verdict on a task rests on."""
    if not task.cases:
        return "tests"
    return "values" if task.covered >= set(task.targets) else "values_and_tests"


def _verdict(
    task: JudgedTask,
    taken: TakenEdits,
    results: TestResults,
    sound: bool,
    values: ValueResults | None,
    flags: Mapping[str, int],
) -> Verdict:
    passed = results.passed(task.tests)
    visible = results.passed(task.visible_tests)
    share = len(visible) / len(task.visible_tests) if task.visible_tests else 0.0
    right = not task.cases if values is None else values.all_agree
    return Verdict(
        solved=sound and right and len(passed) == len(task.tests),
        tests=share if sound else 0.0,
        basis=basis_of(task),
        passed=len(passed),
        failed=tuple(one for one in task.tests if one not in set(passed)),
        agreeing=None if values is None else values.agreeing,
        cases=len(task.cases),
        flags={kind: count for kind, count in sorted(flags.items()) if count},
        refused=taken.refused,
        failures={one: text for one, text in results.failures.items() if one in task.tests},
    )
