"""What `data.options` says of coding tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from composer_mesh.configs.validation import first_error, validated
from composer_mesh.plugins.code_tasks.judge.judge import JudgeLimits
from composer_mesh.plugins.code_tasks.kinds import FLAGGING, KINDS
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.sandbox import SandboxLimits

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
            raise ValueError(f"flag names {unknown[0]!r}, which is no kind: use {', '.join(KINDS)}")
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
