"""The task "harbor": folders in the public Harbor format, worked on and tested in containers.

`data.path` is a folder of such tasks, one of them, or a dataset of a hub. The containers are those
of `environment.sandbox.kind = "containers"`. Rollouts that the monitor flags are reported,
penalized or kept from training, as `data.options` say.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.hub import HubId, read_path
from composer_mesh.configs.validation import first_error, validated
from composer_mesh.planning.hub import dataset_folder
from composer_mesh.plugins.harbor.compose import FILE
from composer_mesh.plugins.harbor.containers.port import Containers
from composer_mesh.plugins.harbor.machine import Limits
from composer_mesh.plugins.harbor.monitor import FLAGGING, KINDS, VOIDING, flagged_by
from composer_mesh.plugins.harbor.rewards import KEY
from composer_mesh.plugins.harbor.session import EpisodeVerdict, HarborSession
from composer_mesh.plugins.harbor.task_folder import HarborFolder, read_folders, resolved
from composer_mesh.plugins.harbor.verifier import Verifier
from composer_mesh.rollouts.tool_calls import ToolCall, call_text, parse_action
from composer_mesh.rollouts.traces import Message, Split
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.reward import RewardFunction, Transcript
from composer_mesh.tasks.rows import Row, held_out
from composer_mesh.tasks.sandbox import MIB, Sandbox
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.tool import ToolSpec

Seconds = Annotated[int, Field(ge=1, le=86_400)]
Kinds = Annotated[tuple[str, ...], Field(strict=False, max_length=100)]
MCP_TOOL = "call_mcp_tool"
MOST_LISTED = 10
HINTS: Mapping[str, str] = {
    "agent_timeout": "{command} used up the time of the task. Take shorter commands first.",
    "command_memory": "The command used too much memory. Work with less data at once.",
    "command_timeout": "{command} took longer than {limit} s. Run it in the background, or less.",
    "file_error": "{path} could not be used: {reason}. List its folder first.",
    "mcp_error": "The tool {tool} failed. Compare the arguments with its schema.",
    "mcp_timeout": "The server did not answer in time. Ask for less at once.",
    "unknown_mcp_tool": "There is no tool {tool}. Take a name from the first message.",
}


class HarborOptions(BaseModel):
    """How Harbor tasks are limited, scored and monitored."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    unsupported: Literal["refuse", "leave_out"] = "refuse"
    """Tasks that ask for what is not offered here: refused with the reason, or left out and
    listed by check."""

    network: Literal["none", "task"] = "none"
    """"task" gives each phase what its task states: the host's network, a proxy with a list of
    hosts, or none; "none" gives none to all."""

    variables: Annotated[tuple[str, ...], Field(strict=False, max_length=200)] = ()
    """Environment variables of this machine that `${NAME}` in a task.toml may take."""

    reward_key: Annotated[str, Field(min_length=1, max_length=200)] = KEY
    """Which number of a reward.json trains."""

    agent_s: Seconds = 3600
    """Seconds that commands may take together where a task sets no agent.timeout_sec."""

    command_s: Seconds = 180
    """Seconds that a command may take unless the agent says otherwise."""

    start_s: Seconds = 120
    """Seconds that the start of a container may take."""

    memory_mib: Annotated[int, Field(ge=16, le=1_048_576)] = 2048
    """Memory of a container where a task sets none."""

    processes: Annotated[int, Field(ge=1, le=65_536)] = 512
    """Processes and threads of a container."""

    output_characters: Annotated[int, Field(ge=200, le=400_000)] = 8000
    """Characters of a tool's result; of a longer one the first third and the end are shown."""

    monitor: Literal["report", "penalize", "screen"] = "report"
    """Flagged rollouts: "report" counts them, "penalize" takes `penalty` from their reward,
    "screen" stores them untrained, and they are no success."""

    penalty: Annotated[float, Field(ge=0, le=100)] = 1.0
    """What "penalize" takes."""

    flag: Kinds = FLAGGING
    """Kinds of findings that flag a rollout; all kinds are counted."""

    void: Kinds = VOIDING
    """Kinds of findings with which the reward is 0, whatever the tests say."""

    @model_validator(mode="after")
    def _kinds_exist(self) -> Self:
        for name in ("flag", "void"):
            for kind in getattr(self, name):
                if kind not in KINDS:
                    raise ValueError(f"{name} has {kind!r}, no kind: use {', '.join(KINDS)}")
        return self

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> HarborOptions:
        """Return the options; raise UnusableTask that names the wrong one."""
        try:
            return validated(cls, options)
        except ValidationError as error:
            first = first_error(error)
            where = ".".join(["options", *map(str, first["loc"])])
            raise UnusableTask(f"data.{where}: {first['msg']}") from None


class HarborTask(Task):
    """Harbor tasks of a folder; options are those of HarborOptions."""

    name = "harbor"
    session_class: ClassVar[type[HarborSession]] = HarborSession
    hint_templates: ClassVar[Mapping[str, str]] = HINTS
    needs_sandbox: ClassVar[bool] = True
    reads_folder: ClassVar[bool] = True

    def __init__(self, **options: Any) -> None:
        self.options = HarborOptions.read(options)
        self.verifier = Verifier(self.options.reward_key)

    def load(self) -> None:
        path = self._path()
        every = read_folders(path)
        networks = self.options.network == "task"
        known = self.limits.variables
        problems = {one.name: "; ".join(one.problems(networks, known)) for one in every}
        self._left_out = {name: why for name, why in problems.items() if why}
        if self._left_out and self.options.unsupported == "refuse":
            raise UnusableTask(
                f"{len(self._left_out)} of {len(every)} Harbor tasks in {path} cannot be played "
                f"here: {_listed(self._left_out)}. Remove them, or set data.options.unsupported to "
                "'leave_out'"
            )
        self._folders = {one.name: one for one in every if one.name not in self._left_out}
        if not self._folders:
            raise UnusableTask(f"no task in {path} can be played: {_listed(self._left_out)}")
        for one in self._folders.values():
            self._refuse_unset(one)
        rows = [
            {"name": name, "prompt": one.steps[0].instruction}
            for name, one in self._folders.items()
        ]
        self._split: Mapping[Split, Sequence[Row]] = {"train": rows, "heldout": rows}
        if len(rows) > 1:
            self._split = held_out(rows, self.settings.heldout_every, self.identity, path)

    def _path(self) -> Path:
        path = self.settings.path
        found = read_path(path) if isinstance(path, str) else path
        if found is None:
            raise UnusableTask(
                f"task {self.name!r} needs a folder of Harbor tasks: set data.path to one"
            )
        return found if isinstance(found, Path) else _downloaded(found)

    def _refuse_unset(self, folder: HarborFolder) -> None:
        """Raise UnusableTask where a task takes a variable that the options do not name."""
        known, toml = self.limits.variables, folder.toml
        resolved(toml.environment.env, known, f"{folder.name}: environment.env")
        resolved(toml.solution.env, known, f"{folder.name}: solution.env")
        folder.mcp_servers(known)
        for step in folder.steps:
            resolved(step.verifier.env, known, f"{folder.name}: verifier.env")

    def rows(self, split: Split) -> Sequence[Row] | None:
        return self._split[split]

    def identity(self, row: Row) -> str:
        return str(row["name"])

    def prompt(self, row: Row) -> str:
        return str(row["prompt"])

    @property
    def folders(self) -> Collection[HarborFolder]:
        """The folders of the tasks that are played."""
        return self._folders.values()

    def folder_of(self, row: Row) -> HarborFolder:
        """Return the folder of a row's task."""
        return self._folders[str(row["name"])]

    @cached_property
    def own_tools(self) -> dict[str, ToolSpec]:
        """The tools of its sessions; those for MCP servers where a task has some."""
        has_servers = any(one.toml.environment.mcp_servers for one in self._folders.values())
        every = super().own_tools
        return {name: one for name, one in every.items() if has_servers or name != MCP_TOOL}

    def gold(self, row: Row) -> Sequence[str]:
        """Return the calls that play the oracle solution; none where a step has no solution."""
        folder = self.folder_of(row)
        if not folder.has_oracle:
            return ()
        variables = resolved(
            folder.toml.solution.env, self.limits.variables, f"{folder.name}: solution.env"
        )
        return folder.gold(variables, self.options.command_s, self.options.agent_s)

    @property
    def has_expert(self) -> bool:
        """Whether every task has an oracle solution."""
        return all(one.has_oracle for one in self._folders.values())

    @property
    def demonstrates(self) -> bool:
        """Whether every task has an oracle solution."""
        return self.has_expert

    def expert(self, messages: list[Message]) -> str:
        """Return the next gold action of the task whose instruction the conversation begins with.

        Raises ValueError for any other conversation.
        """
        said = next((one["content"] for one in messages if one["role"] == "user"), None)
        rows = [row for text, row in self._by_prompt.items() if str(said).startswith(text)]
        if not rows:
            raise ValueError("the conversation begins with the instruction of no Harbor task here")
        actions = self.gold(max(rows, key=lambda row: len(str(row["prompt"]))))
        turn = sum(one["role"] == "assistant" for one in messages)
        return actions[min(turn, len(actions) - 1)]

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        """Return a command without one of its words, or an end before the work is done."""
        call = parse_action(self.expert(messages))
        if not isinstance(call, ToolCall) or call.name != "bash":
            return call_text("submit", {})
        words = str(call.arguments["command"]).split(" ")
        del words[rng.randrange(len(words))]
        return call_text("bash", {**call.arguments, "command": " ".join(words) or "true"})

    @cached_property
    def _by_prompt(self) -> dict[str, Row]:
        rows = {**{str(row["name"]): row for split in self._split.values() for row in split}}
        return {self.prompt(row): row for row in rows.values()}

    def remarks(self) -> Sequence[str]:
        folders = list(self._folders.values())
        remarks = [f"{len(folders)} Harbor tasks; flagged rollouts: {self.options.monitor}"]
        if self._left_out:
            remarks.append(f"{len(self._left_out)} tasks are left out: {_listed(self._left_out)}")
        if unknown := {one.name: ", ".join(one.unknown) for one in folders if one.unknown}:
            remarks.append(f"keys that the format does not have are ignored: {_listed(unknown)}")
        composed = {one.name: one.compose(self.limits.variables) for one in folders}
        if several := [name for name, one in composed.items() if one.names]:
            remarks.append(
                f"{len(several)} tasks have services, such as {several[0]!r}: each service has the "
                "limits of memory and processes that the agent's container has"
            )
        needless = {name: ", ".join(one.ignored) for name, one in composed.items() if one.ignored}
        if needless:
            remarks.append(f"keys of {FILE} that need nothing are ignored: {_listed(needless)}")
        public = sum(one.may_have_network for one in folders)
        if public and self.options.network == "none":
            remarks.append(
                f"{public} tasks may have a network and get none: data.options.network = 'task' "
                "gives them what they state"
            )
        if len(folders) == 1:
            remarks.append("it is trained and evaluated on the same task: success says no more")
        if bare := [one.name for one in folders if not one.has_oracle]:
            remarks.append(f"{len(bare)} tasks have no oracle solution, such as {bare[0]!r}")
        return remarks

    async def check_sandbox(self, sandbox: Sandbox) -> None:
        """Raise UnusableTask for a sandbox without containers, or without what a task needs."""
        if not hasattr(sandbox, "start"):
            raise UnusableTask(
                f"task {self.name!r} plays each episode in a container, and the sandbox of the "
                'config has none: set environment.sandbox.kind to "containers"'
            )
        needing = [one.name for one in self._folders.values() if one.needs_own_loopback]
        if needing and not getattr(sandbox, "own_loopback", False):
            raise UnusableTask(
                f"{len(needing)} Harbor tasks, such as {needing[0]!r}, need a network of their "
                "own, which Podman and Docker are not given here: set backend to 'bubblewrap' in "
                "environment.sandbox.options, or leave them out of data.path. They have an "
                f"allowlist, a network for a single phase, a {FILE} or an MCP server by URL"
            )

    @property
    def containers(self) -> Containers:
        """The containers that were handed in; raises UnusableTask where there are none."""
        if self.sandbox is None:
            raise UnusableTask(
                f"task {self.name!r} needs containers, and nothing here has any: play it by a "
                "command or a run, or set the task's `sandbox` in a test"
            )
        return cast(Containers, self.sandbox)

    @cached_property
    def limits(self) -> Limits:
        """What containers may use; raises UnusableTask for a variable that is not set."""
        options = self.options
        missing = [name for name in options.variables if name not in os.environ]
        if missing:
            raise UnusableTask(
                f"data.options.variables names {missing[0]}, which is not set: export it, or "
                "remove it there"
            )
        return Limits(
            agent_s=options.agent_s,
            memory_bytes=options.memory_mib * MIB,
            processes=options.processes,
            start_s=options.start_s,
            public=options.network == "task",
            variables={name: os.environ[name] for name in options.variables},
        )

    def cut(self, text: str) -> str:
        """Return a text of at most `output_characters`, with the number of those left out."""
        most = self.options.output_characters
        if len(text) <= most:
            return text
        head = most // 3
        tail = text[-(most - head) :]
        return f"{text[:head]}\n[{len(text) - most:,} characters are left out here]\n{tail}"

    @cached_property
    def rewards(self) -> list[RewardFunction]:
        """The reward of the tests, whether it is flagged, repeated tests, and each kind."""
        penalty = -self.options.penalty if self.options.monitor == "penalize" else 0.0
        return [
            RewardFunction("tests", 1.0, self._tests),
            RewardFunction("flagged", penalty, self._flagged),
            RewardFunction("tests_again", 0.0, self._again),
            *(RewardFunction(f"flag/{kind}", 0.0, partial(self._kind, kind)) for kind in KINDS),
        ]

    def success(self, transcript: Transcript, reward: float) -> bool:
        """Whether the tests gave the whole reward, and nothing screened it."""
        judged = _session(transcript).judged
        return judged.reward >= self.success_at and not self._is_screened(judged)

    def screened(self, transcript: Transcript) -> bool:
        """Whether the monitor keeps a rollout from being trained."""
        return self._is_screened(_session(transcript).judged)

    def _is_screened(self, judged: EpisodeVerdict) -> bool:
        return self.options.monitor == "screen" and self._is_flagged(judged)

    def _is_flagged(self, judged: EpisodeVerdict) -> bool:
        return bool(flagged_by(judged.findings, self.options.flag))

    async def _tests(self, transcript: Transcript) -> float:
        return (await _session(transcript).judgement()).reward

    async def _flagged(self, transcript: Transcript) -> float:
        return float(self._is_flagged(await _session(transcript).judgement()))

    async def _again(self, transcript: Transcript) -> float:
        return float((await _session(transcript).judgement()).again)

    async def _kind(self, kind: str, transcript: Transcript) -> float:
        return float(bool((await _session(transcript).judgement()).findings.get(kind)))


def _session(transcript: Transcript) -> HarborSession:
    if transcript.session is None:
        raise UnusableTask(
            "Harbor tasks are judged by what their session's container holds, and a workflow "
            "scored messages alone: let the workflow finish a session"
        )
    return cast(HarborSession, transcript.session)


def _downloaded(name: str) -> Path:
    """Return the folder of a dataset of a hub. Waits for its download where it is new."""
    named = HubId.parse(name)
    assert named is not None, name
    try:
        return dataset_folder(named, "data.path")
    except ConfigError as error:
        raise UnusableTask(str(error)) from None


def _listed(reasons: Mapping[str, str]) -> str:
    shown = [f"{name}: {why}" for name, why in list(reasons.items())[:MOST_LISTED]]
    rest = len(reasons) - len(shown)
    return "; ".join([*shown, *([f"and {rest} more"] if rest else [])])
