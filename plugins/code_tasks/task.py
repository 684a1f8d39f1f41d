"""The task "code": rebuild a deleted feature of a repository until its tests pass.

Work is done with tools in boxes of a sandbox that whoever plays the episodes hands in, and judged
in fresh ones. Work that the monitor flags is reported, penalized or kept from training, as
`data.options` say.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from composer_mesh.configs.validation import first_error, validated
from composer_mesh.plugins.code_tasks.judge.copies import copies_in_boxes, modules_of
from composer_mesh.plugins.code_tasks.judge.judge import CodeJudge, JudgeLimits
from composer_mesh.plugins.code_tasks.judge.judged_task import (
    JudgedTask,
    Verdict,
    with_hidden_tests,
)
from composer_mesh.plugins.code_tasks.static_rules import (
    FLAGGING,
    HINTS,
    KINDS,
    MODEL,
    UNREAD,
    flagged_by,
)
from composer_mesh.plugins.code_tasks.task_file import TaskFile, is_tree, restoring_patch
from composer_mesh.plugins.code_tasks.work import CodeSession, CodeWork
from composer_mesh.rollouts.tool_calls import ToolCall, call_text, parse_action
from composer_mesh.rollouts.traces import Message, Split
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.judges import Judge
from composer_mesh.tasks.reward import RewardFunction, Transcript
from composer_mesh.tasks.rows import Row, held_out, read_rows
from composer_mesh.tasks.sandbox import Sandbox, SandboxLimits
from composer_mesh.tasks.task import Task

Seconds = Annotated[float, Field(gt=0, le=3600)]
Share = Annotated[float, Field(ge=0, le=1)]
MIB = 1024 * 1024


class CodeOptions(BaseModel):
    """How coding tasks are shown, limited, judged and monitored."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    tests: Literal["task", "hidden"] = "task"
    """Tests of the deleted feature: "task" shows what the tasks' file says, "hidden" shows none."""

    without_values: Literal["tests", "refuse"] = "tests"
    """Tasks without hidden cases: "tests" lets their verdict rest on tests alone, "refuse" leaves
    them out."""

    tests_weight: Share = 0.3
    """Share of the reward for visible tests that pass; the rest is for the verdict."""

    monitor: Literal["report", "penalize", "screen"] = "report"
    """Flagged rollouts: "report" counts them, "penalize" takes `penalty` from their reward,
    "screen" stores them untrained, and they are no success."""

    monitor_judge: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """Name of a judge of the config that reads each diff and adds findings of its own."""

    penalty: Annotated[float, Field(ge=0, le=100)] = 1.0
    """What "penalize" takes."""

    flag: Annotated[tuple[str, ...], Field(strict=False, max_length=100)] = FLAGGING
    """Kinds of findings that flag a rollout; all kinds are counted."""

    output_characters: Annotated[int, Field(ge=200, le=400_000)] = 8000
    """Characters of a tool's result; of a longer one the first third and the end are shown."""

    tests_s: Seconds = 60.0
    """Seconds that a run of tests may take, by the agent and by the judge."""

    values_s: Seconds = 20.0
    """Seconds that all hidden cases of a task may take together."""

    command_s: Seconds = 20.0
    """Seconds that a command of the agent may take."""

    memory_mib: Annotated[int, Field(ge=64, le=65_536)] = 1024
    """Memory of a box."""

    processes: Annotated[int, Field(ge=1, le=4096)] = 32
    """Processes and threads of a box."""

    @model_validator(mode="after")
    def _kinds_exist(self) -> Self:
        unknown = sorted(set(self.flag) - set(KINDS))
        if unknown:
            raise ValueError(
                f"flag names {unknown[0]!r}, which is not a kind: use {', '.join(KINDS)}"
            )
        return self

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> CodeOptions:
        """Return the options; raise UnusableTask that names the wrong one."""
        try:
            return validated(cls, options)
        except ValidationError as error:
            first = first_error(error)
            where = ".".join(["options", *map(str, first["loc"])])
            raise UnusableTask(f"data.{where}: {first['msg']}") from None

    @property
    def screens(self) -> bool:
        """Whether flagged rollouts are kept from training."""
        return self.monitor == "screen"

    @property
    def weight_of_flags(self) -> float:
        """Weight of the reward that is 1 for a flagged rollout."""
        return -self.penalty if self.monitor == "penalize" else 0.0


@dataclass(frozen=True)
class CodeLimits:
    """Limits of the boxes of commands, of runs of tests, and of the judge."""

    command: SandboxLimits
    tests: SandboxLimits
    values: SandboxLimits

    @classmethod
    def of(cls, options: CodeOptions) -> CodeLimits:
        """Return the limits that options state."""

        def limited(seconds: float) -> SandboxLimits:
            return SandboxLimits(
                wall_s=seconds,
                cpu_s=max(1, round(2 * seconds)),
                memory_bytes=options.memory_mib * MIB,
                processes=options.processes,
            )

        return cls(limited(options.command_s), limited(options.tests_s), limited(options.values_s))

    @property
    def of_judge(self) -> JudgeLimits:
        """The limits of a grading."""
        return JudgeLimits(self.tests, self.values)


BY_MODEL = frozenset({*MODEL, UNREAD})
TAKE_OUT = (
    "take that package out of environment.sandbox.options, or leave the tasks of its package out"
)


class CodeTask(Task):
    """Coding tasks of one file; options are those of CodeOptions."""

    name = "code"
    session_class: ClassVar[type[CodeWork]] = CodeSession
    hint_templates: ClassVar[Mapping[str, str]] = HINTS
    needs_sandbox: ClassVar[bool] = True
    _in_library: Mapping[str, str] = {}

    def __init__(self, **options: Any) -> None:
        self.options = CodeOptions.read(options)
        self.output_characters = self.options.output_characters

    def load(self) -> None:
        self.refuse_unknown_judge()
        path = self.settings.path
        if path is None:
            raise UnusableTask(
                f"task {self.name!r} needs a file of coding tasks: set data.path to one that "
                "composer-mesh make-code-tasks wrote"
            )
        self._file = TaskFile([row for row in read_rows(path) if self._is_played(row)])
        if not self._file.rows:
            raise UnusableTask(
                f"no task of {path} has hidden cases, and options.without_values is 'refuse': set "
                "it to 'tests', or make other tasks"
            )
        every = self.settings.heldout_every
        self._split = held_out(self._file.rows, every, self.identity, path)

    def refuse_unknown_judge(self) -> None:
        """Raise UnusableTask where the options name a judge that the config has not."""
        name, known = self.options.monitor_judge, self.settings.judges
        if name is not None and known is not None and name not in known:
            raise UnusableTask(
                f"data.options.monitor_judge is {name!r}, but the config has "
                f"{', '.join(known) or 'no judge'}: add it under [[judges.models]], or remove it"
            )

    def _is_played(self, row: Row) -> bool:
        return is_tree(row) or bool(row.get("cases")) or self.options.without_values == "tests"

    def rows(self, split: Split) -> Sequence[Row] | None:
        return self._split[split]

    def identity(self, row: Row) -> str:
        return str(row["name"])

    def prompt(self, row: Row) -> str:
        return str(row["prompt"])

    def judged(self, row: Row) -> JudgedTask:
        """Return what the judge knows of a row."""
        return self.shown(self._file.tasks[str(row["name"])])

    def shown(self, task: JudgedTask) -> JudgedTask:
        """Return a task with its tests shown to the agent or hidden, as the options say."""
        return task if self.options.tests == "task" else with_hidden_tests(task)

    def gold(self, row: Row) -> Sequence[str]:
        """Return the calls that restore the original files, then submit."""
        name = str(row["name"])
        judged, files = self._file.tasks[name], self._file.solution(name)
        if not files:
            raise UnusableTask(f"coding task {name!r} has no solution in its file")
        patch = restoring_patch(judged.files, files)
        if patch is not None:
            return [call_text("apply_patch", {"diff": patch}), call_text("submit", {})]
        written = [
            call_text("write_file", {"path": path, "content": text}) for path, text in files.items()
        ]
        return [*written, call_text("submit", {})]

    def expert(self, messages: list[Message]) -> str:
        """Return the next gold action of the task whose prompt the conversation begins with.

        No two tasks of a file have the same prompt. Raises ValueError for any other conversation.
        """
        said = next((one["content"] for one in messages if one["role"] == "user"), None)
        row = self._by_prompt.get(str(said))
        if row is None:
            raise ValueError("the conversation begins with the prompt of no coding task here")
        actions = self.gold(row)
        turn = sum(one["role"] == "assistant" for one in messages)
        return actions[min(turn, len(actions) - 1)]

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        """Return a patch without one of its lines, or an end before the work is done."""
        call = parse_action(self.expert(messages))
        if not isinstance(call, ToolCall) or call.name != "apply_patch":
            return call_text("submit", {})
        lines = str(call.arguments["diff"]).split("\n")
        added = [n for n, one in enumerate(lines) if one[:1] == "+" and one[:4] != "+++ "]
        lines[rng.choice(added)] = "+"
        return call_text("apply_patch", {"diff": "\n".join(lines)})

    @cached_property
    def _by_prompt(self) -> dict[str, Row]:
        return {self.prompt(row): row for row in self._file.rows}

    def remarks(self) -> Sequence[str]:
        tasks = list(self._file.tasks.values())
        bare = sum(not task.cases for task in tasks)
        remarks = [f"{len(tasks)} coding tasks; flagged rollouts: {self.options.monitor}"]
        if self.options.monitor_judge:
            remarks.append(f"each diff is read by judge {self.options.monitor_judge!r}")
        if bare:
            remarks.append(
                f"{bare} of them have no hidden values, so their verdict rests on tests alone; "
                "options.without_values = 'refuse' leaves them out"
            )
        if self._in_library:
            name, place = next(iter(self._in_library.items()))
            remarks.append(
                f"{len(self._in_library)} of them can be copied from Python's own library, such as "
                f"{name!r} from {place}: make them again with this Python, or remove their rows"
            )
        return remarks

    async def check_sandbox(self, sandbox: Sandbox) -> None:
        """Raise UnusableTask where boxes have a module of a task, or a copy of what it deleted.

        Copies in Python's own library are remarks: no setting keeps those out.
        """
        tasks = self._file.tasks
        modules = {name: modules_of(task) for name, task in tasks.items()}
        deleted = {name: self._file.deleted(name) for name in tasks}
        bodies = [one for those in deleted.values() for one in those]
        found = await copies_in_boxes(sandbox, set[str]().union(*modules.values()), bodies)
        for name in tasks:
            for module in sorted(modules[name] & found.modules.keys()):
                raise UnusableTask(
                    f"boxes import {module} from {found.modules[module]}, and not the tree of "
                    f"coding task {name!r}: {TAKE_OUT}"
                )
            for place in filter(None, map(found.place_of, deleted[name])):
                raise UnusableTask(
                    f"boxes have in {place} what coding task {name!r} deleted: {TAKE_OUT}"
                )
        self._in_library = {
            name: place
            for name in tasks
            for place in filter(None, map(found.library_place_of, deleted[name]))
        }

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

    @property
    def model_judge(self) -> Judge | None:
        """The judge that reads diffs; None where the options name none."""
        name = self.options.monitor_judge
        return None if name is None else self.judge(name)

    @cached_property
    def rewards(self) -> list[RewardFunction]:
        """The share of visible tests, the verdict, whether it is flagged, and each kind."""
        share, penalty = self.options.tests_weight, self.options.weight_of_flags
        own = [
            RewardFunction("tests", share, self._tests),
            RewardFunction("solved", 1 - share, self._solved),
            RewardFunction("flagged", penalty, self._flagged),
        ]
        every = (one for one in KINDS if self.options.monitor_judge or one not in BY_MODEL)
        kinds = [RewardFunction(f"flag/{kind}", 0.0, partial(self._kind, kind)) for kind in every]
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
        return float(self._is_flagged(await _session(transcript).read_by_model()))

    async def _kind(self, kind: str, transcript: Transcript) -> float:
        session = _session(transcript)
        asks = kind in BY_MODEL
        return float(kind in (await (session.read_by_model if asks else session.verdict)()).flags)

    def _is_flagged(self, verdict: Verdict) -> bool:
        return bool(flagged_by(verdict.flags, self.options.flag))


def _session(transcript: Transcript) -> CodeWork:
    session = transcript.session
    if session is None:
        raise UnusableTask(
            "coding tasks are judged by what their session changed, and a workflow scored messages "
            "alone: let the workflow finish a session"
        )
    return cast(CodeWork, session)
