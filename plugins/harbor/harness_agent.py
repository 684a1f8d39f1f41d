"""The workflow that plays Harbor episodes by a harness: Claude Code, Codex, or a program of yours.

    [rollouts]
    workflow = "composer_mesh.plugins.harbor.harness_agent:HarnessAgent"
    options = { harness = "claude-code", program = "/opt/claude" }

The harness runs unchanged in the episode's container and reaches nothing but the episode's
endpoint. What it samples there is captured token by token, and the task's tests score its work.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from composer_mesh.mesh.environment import python_module
from composer_mesh.plugins.harbor.harness import HOME, PROGRAM, PROMPT, Launch
from composer_mesh.plugins.harbor.harness_mcp import refuse_servers
from composer_mesh.plugins.harbor.services import TaskFailure
from composer_mesh.plugins.harbor.task import HarborTask
from composer_mesh.rollouts.tasks import Episode, StepResult
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.workflow import Agent, Engine, Trajectory, Workflow

MODEL = "policy"
TIMEOUT_S = 3600.0
LONGEST_TIMEOUT_S = 86_400.0
CLAUDE_TOOLS = "Bash,Edit,Glob,Grep,Read,Write"


@dataclass(frozen=True)
class Recipe:
    """How a harness is started: where its folder has its program, its arguments, and more.

    `program` is a pattern below the folder that `npm install --prefix` or `pip install --target`
    has made. `files` are made for the episode's base URL.
    """

    program: str
    argv: Callable[[str], list[str]]
    environment: Mapping[str, str]
    files: Callable[[str], dict[str, str]] = field(default=lambda _: {})


def codex_files(base_url: str) -> dict[str, str]:
    """Return Codex's config, with the endpoint as its one provider."""
    lines = [
        f'model = "{MODEL}"',
        'model_provider = "mesh"',
        "[model_providers.mesh]",
        'name = "mesh"',
        f"base_url = {json.dumps(base_url)}",
        'env_key = "OPENAI_API_KEY"',
        'wire_api = "responses"',
    ]
    return {"config.toml": "\n".join(lines) + "\n"}


RECIPES: Mapping[str, Recipe] = {
    "claude-code": Recipe(
        "node_modules/@anthropic-ai/claude-code-linux-*/claude",
        lambda program: [
            *(program, "-p", "--output-format", "json", "--allowedTools", CLAUDE_TOOLS),
        ],
        {
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "CLAUDE_CONFIG_DIR": HOME,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_TELEMETRY": "1",
        },
    ),
    "codex": Recipe(
        "node_modules/@openai/codex-linux-*/vendor/*/bin/codex",
        lambda program: [
            *(program, "exec", "--skip-git-repo-check", "--json"),
            *("--sandbox", "danger-full-access"),
        ],
        {"CODEX_HOME": HOME},
        codex_files,
    ),
    "mini-swe-agent": Recipe(
        "minisweagent/run/mini.py",
        lambda _: [
            *python_module("minisweagent.run.mini", python="python3"),
            *("--yolo", "--exit-immediately"),
            *("--model", f"openai/{MODEL}", "--output", f"{HOME}/trajectory.json"),
        ],
        {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": HOME,
            "MSWEA_SILENT_STARTUP": "1",
            "PYTHONPATH": PROGRAM,
        },
    ),
}
LAST_WORDS = {"codex": ["-"], "mini-swe-agent": [f"--task={PROMPT}"]}
"""What follows the user's arguments; without it a harness reads the instruction as its input."""


class HarnessAgent(Workflow):
    """Plays each step of a Harbor task by a harness in the task's container."""

    resumable = True

    def __init__(
        self,
        harness: str = "",
        command: Sequence[str] = (),
        program: str = "",
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] = {},
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`harness` is one of `RECIPES`, or `command` is a program's own words.

        `program` is the folder of this machine with the harness, which containers see at `PROGRAM`.
        A command reads the instruction as its input and where a word has `{prompt}`. `arguments`
        and `environment` are added; `timeout_s` bounds a step, as the task's own limit does.
        """
        if bool(harness) == bool(command):
            raise _wrong(f"harness is {harness!r} and command {list(command)}: set one of them")
        if harness and harness not in RECIPES:
            raise _wrong(f"harness is {harness!r}: use {', '.join(RECIPES)}, or set command")
        if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
            raise _wrong(f"timeout_s is {timeout_s}: use more than 0, up to {LONGEST_TIMEOUT_S:g}")
        if program and not Path(program).is_dir():
            raise _wrong(f"program is {program!r}, no folder here: install the harness into it")
        self._harness, self._recipe = harness, RECIPES.get(harness)
        self._words = [*command, *arguments]
        if self._recipe is not None:
            found = _found(harness, program, self._recipe.program)
            last = LAST_WORDS.get(harness, [])
            self._words = [*self._recipe.argv(f"{PROGRAM}/{found}"), *arguments, *last]
        self._program = str(Path(program).resolve()) if program else ""
        self._environment, self._timeout_s = dict(environment), timeout_s

    def check_task(self, task: Task) -> None:
        for part in task.parts:
            if not isinstance(part, HarborTask):
                raise UnusableTask(
                    f"HarnessAgent plays Harbor tasks, and task {part.name!r} is none: set "
                    "data.task to 'harbor', or remove rollouts.workflow"
                )
            for folder in part.folders:
                refuse_servers(self._harness, folder.name, folder.toml.environment.mcp_servers)

    async def run(self, episode: Episode, engine: Engine) -> Sequence[Trajectory]:  # noqa: ARG002
        """Play all steps of the task; return what was sampled, with the reward of the tests.

        A harness that ends before the model has answered it once is a failure of the
        infrastructure, whatever its exit code: nothing in the episode is of the policy. One that
        has acted and then fails, or is late, is the agent's own doing: its work is tested.
        """
        async with (
            engine.agent() as agent,
            engine.environment(self.launch(agent).row) as session,
        ):
            done = False
            while not done:
                step = await session.step("")
                refuse_silence(agent.answers, step)
                done = step.done
            outcome = await session.finish()
        return agent.trajectories(
            outcome.reward,
            success=outcome.success,
            rewards=outcome.rewards,
            screened=outcome.screened,
        )

    def launch(self, agent: Agent) -> Launch:
        """Return how the harness is started for an agent's endpoint."""
        port = urlsplit(agent.base_url).port
        assert port is not None, agent.base_url
        recipe = self._recipe
        return Launch(
            self._words,
            port,
            self._timeout_s,
            self._program,
            self._harness,
            {
                **agent.environ,
                **(recipe.environment if recipe is not None else {}),
                **self._environment,
            },
            recipe.files(agent.base_url) if recipe is not None else {},
        )


def _found(harness: str, folder: str, pattern: str) -> str:
    """Return where a folder has the program of a harness, relative to it."""
    found = sorted(Path(folder).glob(pattern))
    if not folder or not found:
        raise _wrong(
            f"program is {folder!r}, which has no {pattern}: install {harness} into "
            "a folder, and set program to it"
        )
    return str(found[0].relative_to(folder))


def refuse_silence(answers: int, step: StepResult) -> None:
    """Raise TaskFailure for a harness that ended before the model had answered it once."""
    if not answers:
        facts = {} if step.error is None else step.error.data
        how = facts.get("harness", "exit code 0")
        raise TaskFailure("harness_silent", f"it ended without an answer of the model: {how}")


def _wrong(text: str) -> UnusableTask:
    return UnusableTask(f"rollouts.options: {text}")
