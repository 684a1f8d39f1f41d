"""The task "code": rebuild a deleted feature of a repository until its tests pass.

Work is done with tools in boxes of a sandbox that whoever plays the episodes hands in, and judged
in fresh ones. Work that the monitor flags is reported, penalized or kept from training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, ClassVar, cast

from composer_mesh.rollouts.traces import Split
from composer_mesh.tasks.code.hints import HINTS
from composer_mesh.tasks.code.judge.judge import CodeJudge
from composer_mesh.tasks.code.judge.judged_task import JudgedTask
from composer_mesh.tasks.code.judge.verdict import Verdict
from composer_mesh.tasks.code.kinds import KINDS, flagged_by
from composer_mesh.tasks.code.options import CodeLimits, CodeOptions
from composer_mesh.tasks.code.session import CodeSession
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.reward import RewardFunction, Transcript
from composer_mesh.tasks.rows import Row
from composer_mesh.tasks.sandbox import Sandbox
from composer_mesh.tasks.task import Task


class CodeTask(Task):
    """Coding tasks of one file; options are those of CodeOptions."""

    name = "code"
    session_class = CodeSession
    hint_templates: ClassVar[Mapping[str, str]] = HINTS
    needs_sandbox: ClassVar[bool] = True

    def __init__(self, **options: Any) -> None:
        self.options = CodeOptions.read(options)
        self.output_characters = self.options.output_characters

    @property
    def boxes(self) -> Sandbox:
        """The sandbox that was handed in; raises UnusableTask where there is none."""
        if self.sandbox is None:
            raise UnusableTask(
                f"task {self.name!r} runs code, but nothing here has a sandbox: play it by a "
                "command or a run, or set the task's `sandbox` in a test"
            )
        return self.sandbox

    @cached_property
    def limits(self) -> CodeLimits:
        """Limits of the boxes."""
        return CodeLimits.of(self.options)

    @cached_property
    def judge_of_code(self) -> CodeJudge:
        """The judge of all its sessions."""
        return CodeJudge(self.boxes, self.limits.of_judge)

    @cached_property
    def rewards(self) -> list[RewardFunction]:
        """The share of visible tests, the verdict, whether it was flagged, and each kind of flag."""
        share, penalty = self.options.tests_weight, self.options.weight_of_flags
        own = [
            RewardFunction("tests", share, self._tests),
            RewardFunction("solved", 1 - share, self._solved),
            RewardFunction("flagged", penalty, self._flagged),
        ]
        kinds = [RewardFunction(f"flag/{kind}", 0.0, partial(self._kind, kind)) for kind in KINDS]
        return own + kinds

    def success(self, transcript: Transcript, reward: float) -> bool:
        """Whether the verdict was that the work is right, and nothing in it screened it."""
        verdict = _session(transcript).judgement
        return verdict.solved and not (self.options.screens and self._is_flagged(verdict))

    def screened(self, transcript: Transcript) -> bool:
        """Whether the monitor keeps a rollout from being trained."""
        return self.options.screens and self._is_flagged(_session(transcript).judgement)

    async def _tests(self, transcript: Transcript) -> float:
        return (await _session(transcript).verdict()).tests

    async def _solved(self, transcript: Transcript) -> float:
        return float((await _session(transcript).verdict()).solved)

    async def _flagged(self, transcript: Transcript) -> float:
        return float(self._is_flagged(await _session(transcript).verdict()))

    async def _kind(self, kind: str, transcript: Transcript) -> float:
        return float(kind in (await _session(transcript).verdict()).flags)

    def _is_flagged(self, verdict: Verdict) -> bool:
        return bool(flagged_by(verdict.flags, self.options.flag))
