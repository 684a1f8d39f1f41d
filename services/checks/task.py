"""Checks of the configured task: that it can do what the config asks, and one dry episode."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from composer_mesh.configs.interrupts import is_interrupt
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.group_rewards import FinishedRollout
from composer_mesh.rollouts.hints import TEMPLATES, HintTemplateError, HintTemplates
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import ErrorSite
from composer_mesh.services.checks.example_arguments import example_arguments
from composer_mesh.services.checks.example_judges import ExampleJudges
from composer_mesh.services.checks.timed_episode import TimedEpisode
from composer_mesh.tasks.errors import TaskError, UnusableTask, code_error
from composer_mesh.tasks.heldout import heldout_indices
from composer_mesh.tasks.sandbox import DescribedSandbox
from composer_mesh.tasks.task import Task


def check_task(config: Config, task: Task) -> None:
    """Raise UnusableTask where the run needs an expert that the task lacks; plays nothing."""
    if task.has_expert:
        return
    if config.policy.path is None:
        raise UnusableTask(
            f"task {task.name!r} has no expert but policy.path is not set, and the warm start of a "
            "built-in model imitates one: define expert(self, messages), or set policy.path to a "
            "model folder"
        )
    if config.serves_experts:
        raise UnusableTask(
            f"task {task.name!r} has no expert but the config has teachers or a hint writer of "
            "kind 'builtin', which ask it: define expert(self, messages), or name others"
        )


def heldout_of(task: Task, count: int) -> list[int]:
    """Return the held-out episodes by index; an error of the task's own code names its line."""
    try:
        return heldout_indices(task, count)
    except (TaskError, ValueError):
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise code_error(f"making held-out episodes of task {task.name!r}", error) from error


@dataclass(frozen=True)
class DryRun:
    """What came of a dry episode."""

    policy: str
    turns: int
    reward: float
    success: bool


def told_of(config: Config, task: Task) -> Iterator[str]:
    """Yield lines that describe the task; plays a dry episode of it, and raises its errors."""
    judges = ExampleJudges()
    task.use_judges(judges)
    for server in config.environment.mcp:
        tools = [f"{server.prefix}{one.name}" for one in server.tools or ()]
        yield f"MCP server {server.name!r}: {len(tools)} tools: {', '.join(tools)}"
    for sandbox in {id(one): one for part in task.parts if (one := part.sandbox)}.values():
        if isinstance(sandbox, DescribedSandbox):
            yield from sandbox.describe()
    dry = dry_run(config, task)
    success = "a success" if dry.success else "no success"
    yield (
        f"task {task.name!r}: a dry episode by {dry.policy} took {dry.turns} turns, reward "
        f"{dry.reward:g}, {success}"
    )
    if judges.asked:
        names = ", ".join(sorted(judges.asked))
        yield f"task {task.name!r}: judge {names} was not asked, its answers are examples"
    if task.has_expert and not dry.success and not judges.asked:
        yield (
            f"task {task.name!r}: its expert's episode is no success, so a warm start imitates "
            f"failures: mend expert(), the rewards or success_at, which is {task.success_at:g}"
        )
    if not (task.rewards or task.turn_rewards):
        yield (
            f"task {task.name!r} has no reward functions, so each rollout earns 0 until one is "
            "posted: mark methods with @reward"
        )
    for part in task.parts:
        yield from part.remarks()
    if not task.states_answers:
        yield (
            f"task {task.name!r} has no verified_answer, so hints are not checked for leaks of the "
            "answer"
        )


def dry_run(config: Config, task: Task) -> DryRun:
    """Play the task's first training episode by its expert, or by a call of each tool.

    Raises what the task's code raises, and UnusableTask for a hint that cannot be filled.
    """
    if task.has_expert:
        return _play(config, task, TimedEpisode.expert, "its expert")
    actions = deque([*map(_call, task.tools), ""])
    policy = "one call of each tool and an empty answer" if task.tools else "an empty answer"
    while True:  # an episode may end before all tools were called
        played = _play(config, task, lambda _: actions.popleft() if actions else None, policy)
        if not actions:
            return played


def _play(
    config: Config, task: Task, act: Callable[[TimedEpisode], str | None], policy: str
) -> DryRun:
    """Play an episode until it ends, or no action is left."""
    templates = TEMPLATES.extended({**task.hint_templates, **config.sdpo.hints.templates})
    turns, done = 0, False
    with TimedEpisode(task, task.pick("train", 0), config.environment.call_s) as episode:
        episode.begin()
        while not done and (action := act(episode)) is not None:
            step = episode.step(action)
            turns, done = turns + 1, step.done
            if step.error is not None:
                _refuse_error(task, templates, step.error)
        outcome = episode.outcome()
        twin = FinishedRollout(outcome.messages, [], dict(outcome.rewards))
        episode.score_group([twin, twin])
    return DryRun(policy, turns, outcome.reward, outcome.success)


def _refuse_error(task: Task, templates: HintTemplates, site: ErrorSite) -> None:
    """Raise UnusableTask for a tool that did not return, or a hint that cannot be filled."""
    if site.error_kind == "tool_timeout":
        raise UnusableTask(
            f"tool {site.data['tool']!r} of task {task.name!r} did not return within "
            "environment.call_s in a dry episode: look for a wait without end, or raise "
            "environment.call_s"
        )
    try:
        templates.fill(site)
    except HintTemplateError as error:
        raise UnusableTask(f"task {task.name!r}: {error}") from None


def _call(tool: dict[str, Any]) -> str:
    function = tool["function"]
    return call_text(str(function["name"]), example_arguments(function["parameters"]))
