"""Checks of the configured task: that it can do what the config asks, and one dry episode.

Judges of a dry episode: each answers with an example of the wanted form, and none is called.

Example arguments of a tool, made from its schema: the smallest that are valid where simple.

An episode that is played by ordinary code, with the time limits of a run.

The task's code runs on an event loop and in daemon threads of its own, so that code which never
returns holds up neither its caller nor the end of the command.

Facts of a run that are known before it starts: its rows, its model, and the work of a step.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from composer_mesh.configs.losses import CorrectedLoss
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import in_background
from composer_mesh.planning.model_sizes import UnknownSizes, parameter_count, sizes_of
from composer_mesh.rollouts.hints import HintTemplateError, HintTemplates, hint_templates
from composer_mesh.rollouts.tasks import Episode, FinishedRollout, GroupScore, Outcome, StepResult
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import ErrorSite, Message
from composer_mesh.tasks.errors import (
    TaskError,
    UnusableTask,
    code_of_task,
    returned_by,
    shown,
)
from composer_mesh.tasks.judges import JudgeQuestion, JudgeReply
from composer_mesh.tasks.loading import heldout_indices
from composer_mesh.tasks.running import RunningEpisode, score_group
from composer_mesh.tasks.sandbox import DescribedSandbox
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.task_loop import LoopBlocked, TaskRunner

T = TypeVar("T")


class TimedEpisode:
    """One running episode, as a context manager that closes it.

    Each call raises an error of tasks where the task's code raises, or takes longer than `limit_s`.
    """

    def __init__(self, task: Task, episode: Episode, limit_s: float) -> None:
        self._task, self._episode = task, episode
        self._runner = TaskRunner(task, limit_s, run_plain=in_a_daemon_thread)
        self._running: RunningEpisode | None = None
        self._blocked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _at: TracebackType | None,
    ) -> None:
        """Close the session, also after an error; that one is raised, with a note of another."""
        if self._running is None or self._blocked:
            return
        try:
            self._run(self._running.close())
        except TaskError as second:
            if error is None:
                raise
            error.add_note(str(second))

    @property
    def messages(self) -> list[Message]:
        """The conversation so far."""
        return self._opened.messages

    def begin(self) -> list[Message]:
        """Make the episode and start its session; return the first messages."""
        self._running, messages = self._run(self._runner.begin_episode(self._episode))
        return messages

    def expert(self) -> str:
        """Return the action of the task's expert."""
        what = f"the expert of task {self._task.name!r}"
        return str(self._run(self._runner.calls(what, self._task.expert, self.messages)))

    def check_gold(self) -> None:
        """Raise UnusableTask where the task states gold actions that are no texts."""
        part = self._opened.task
        if type(part).gold is Task.gold:
            return
        what = f"the gold actions of task {part.name!r}"
        found = self._run(self._runner.calls(what, part.gold, self._opened.episode.payload))
        if isinstance(found, str) or not all(isinstance(one, str) for one in found):
            with returned_by(part.gold):
                raise UnusableTask(f"{what} are {shown(found)!r}: return a list of texts")

    def step(self, text: str) -> StepResult:
        """Apply an action of the agent."""
        return self._run(self._opened.step(text))

    def outcome(self) -> Outcome:
        """Score the episode, ended or not."""
        return self._run(self._opened.outcome())

    def score_group(self, group: list[FinishedRollout]) -> GroupScore:
        """Score rollouts of this episode together."""
        scoring = score_group(self._task, self._opened.episode, group, self._runner.calls)
        return self._run(scoring)

    @property
    def _opened(self) -> RunningEpisode:
        if self._running is None:
            raise RuntimeError("this episode has not begun: call begin first")
        return self._running

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run(self._runner.run(work))
        except LoopBlocked as blocked:
            self._blocked = True
            raise UnusableTask(str(blocked)) from None


async def in_a_daemon_thread(function: Callable[[], Any]) -> Any:
    """Run a plain function in a thread that does not hold up the end of the process."""
    return await asyncio.wrap_future(in_background(partial(copy_context().run, function)))


MOST_ITEMS = 100
DEEPEST = 8
FORMATS = {
    "date": "2026-01-02",
    "date-time": "2026-01-02T03:04:05Z",
    "time": "03:04:05",
    "duration": "PT1S",
    "uuid": "12345678-1234-4678-9234-567812345678",
    "ipv4": "127.0.0.1",
    "uri": "http://localhost/",
}
"""An example of each format of texts."""

Schema = Mapping[str, Any]


def example_arguments(parameters: Schema) -> dict[str, Any]:
    """Return an argument for each required parameter of a tool."""
    properties, shared = parameters.get("properties", {}), parameters.get("$defs", {})
    required = parameters.get("required", [])
    return {name: _example(properties.get(name, {}), shared, DEEPEST) for name in required}


def example_of(schema: Schema) -> Any:
    """Return an example of a JSON schema, with what it requires."""
    return _example(schema, schema.get("$defs", {}), DEEPEST)


def _example(schema: Schema, shared: Schema, depth: int) -> Any:
    if "$ref" in schema:
        schema = shared.get(str(schema["$ref"]).rpartition("/")[2], {})
    for chosen in ("default", "const"):
        if chosen in schema:
            return schema[chosen]
    choices = schema.get("enum") or schema.get("examples")
    if choices:
        return choices[0]
    options = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if options and depth:
        return _example(options[0], shared, depth - 1)
    return _by_type(schema, shared, depth)


def _by_type(schema: Schema, shared: Schema, depth: int) -> Any:
    match schema.get("type"):
        case "integer":
            return int(_number(schema, 1))
        case "number":
            return float(_number(schema, 0.5))
        case "boolean":
            return True
        case "null":
            return None
        case "array" if depth:
            count = min(schema.get("minItems", 0), MOST_ITEMS)
            items = schema.get("prefixItems") or [schema.get("items", {})] * count
            return [_example(one, shared, depth - 1) for one in items]
        case "object" if depth:
            names = schema.get("required", [])
            inner = schema.get("properties", {})
            return {name: _example(inner.get(name, {}), shared, depth - 1) for name in names}
        case "array":
            return []
        case "object":
            return {}
        case _:
            text = "a" * min(schema.get("minLength", 1), MOST_ITEMS) or "a"
            return FORMATS.get(schema.get("format", ""), text)


def _number(schema: Schema, step: float) -> float:
    """Return 1 if the bounds allow it, else the nearest number that they allow."""
    low = max(
        schema.get("minimum", -1e300), schema.get("exclusiveMinimum", -1e300 - step) + step, -1e300
    )
    high = min(schema.get("maximum", 1e300), schema.get("exclusiveMaximum", 1e300) - step)
    unit = schema.get("multipleOf", 1)
    return float(min(max(unit, low), high))


class ExampleJudges:
    """The port `Judges` without a model; `called` are the names of the judges."""

    def __init__(self) -> None:
        self.called: set[str] = set()

    async def ask(self, question: JudgeQuestion) -> JudgeReply:
        """Return an example of the wanted answer."""
        self.called.add(question.judge)
        return JudgeReply(json.dumps(example_of(question.schema)))


def check_task(config: Config, task: Task) -> None:
    """Raise UnusableTask where the run needs an expert that the task lacks; plays nothing."""
    if config.sft is not None and config.sft.demonstrations and not task.demonstrates:
        raise UnusableTask(
            f"sft.demonstrations is {config.sft.demonstrations} but task {task.name!r} has neither "
            "an expert nor gold actions: define expert(self, messages) or gold(self, row), or set "
            "sft.path in place of sft.demonstrations"
        )
    if config.sft is not None and isinstance(rows := config.sft.path, Path) and not rows.exists():
        raise UnusableTask(
            f"sft.path is {str(rows)!r}, which is not in {Path.cwd()}: correct it, or set "
            "sft.demonstrations in place of it"
        )
    if not task.makes_mistakes and (key := _mistakes_for(config, task)):
        raise UnusableTask(
            f"task {task.name!r} makes no wrong actions, which {key} above 0 needs: define "
            f"corrupted(self, messages, rng), or set {key} to 0"
        )
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
            "kind 'builtin', which query it: define expert(self, messages), or name others"
        )


def _mistakes_for(config: Config, task: Task) -> str:
    """Return the key for which experts make mistakes in this run; "" where none do."""
    warm, sft = config.policy.warm_start, config.sft
    if task.has_expert and config.policy.path is None and warm.steps and warm.error_rate:
        return "policy.warm_start.error_rate"
    if task.demonstrates and sft is not None and sft.demonstrations and sft.error_rate:
        return "sft.error_rate"
    for place, teacher in enumerate(config.replay.teachers if config.replay.on else ()):
        if task.has_expert and teacher.kind == "builtin" and teacher.error_rate:
            return f"replay.teachers.{place}.error_rate"
    return ""


def heldout_of(task: Task, count: int) -> list[int]:
    """Return the held-out episodes by index; an error of the task's own code names its line."""
    what = f"making held-out episodes of task {task.name!r}"
    with code_of_task(what, TaskError, ValueError):
        return heldout_indices(task, count)


def training_rows(task: Task) -> int | None:
    """Return the number of a task's training rows; None if it generates them.

    An error of the task's own code names its line.
    """
    with code_of_task(f"reading the rows of task {task.name!r}", TaskError, ValueError):
        rows = task.rows("train")
    return None if rows is None else len(rows)


@dataclass(frozen=True)
class DryRun:
    """What came of a dry episode."""

    policy: str
    turns: int
    reward: float
    success: bool


def describe_task(config: Config, task: Task, index: int = 0) -> Iterator[str]:
    """Yield lines that describe the task; plays a dry episode of each part, and raises its errors.

    `index` is the number of the training episode that is played.
    """
    judges = ExampleJudges()
    task.use_judges(judges)
    for server in config.environment.mcp:
        tools = [f"{server.prefix}{one.name}" for one in server.tools or ()]
        yield f"MCP server {server.name!r}: {len(tools)} tools: {', '.join(tools)}"
    for sandbox in {id(one): one for part in task.parts if (one := part.sandbox)}.values():
        if isinstance(sandbox, DescribedSandbox):
            yield from sandbox.describe()
    for part in task.parts:
        yield from _describe(config, part, index, judges)
        yield from part.remarks()
    if not task.states_answers:
        yield (
            f"task {task.name!r} has no verified_answer, so hints are not checked for leaks of the "
            "answer"
        )


def _describe(config: Config, task: Task, index: int, judges: ExampleJudges) -> Iterator[str]:
    dry = dry_run(config, task, index)
    success = "a success" if dry.success else "no success"
    yield (
        f"task {task.name!r}: a dry episode by {dry.policy} took {dry.turns} turns, reward "
        f"{dry.reward:g}, {success}"
    )
    if judges.called:
        names = ", ".join(sorted(judges.called))
        yield f"task {task.name!r}: judge {names} was not called, its answers are examples"
    if task.has_expert and not dry.success and not judges.called:
        yield (
            f"task {task.name!r}: its expert's episode does not succeed, so a warm start imitates "
            f"failures: correct expert(), the rewards or success_at, which is {task.success_at:g}"
        )
    if not (task.rewards or task.turn_rewards):
        yield (
            f"task {task.name!r} has no reward functions, so each rollout earns 0 until one is "
            "posted: mark methods with @reward"
        )


def dry_run(config: Config, task: Task, index: int = 0) -> DryRun:
    """Play a training episode of the task by its expert, and by a call of each tool.

    Tools of MCP servers are called only where there is no expert. Raises what the task's code
    raises, and UnusableTask for a hint that cannot be filled.
    """
    expert, tools = None, task.tools
    if task.has_expert:
        expert = _play(config, task, index, TimedEpisode.expert, "its expert")
        tools = [one.schema for one in task.own_tools.values()]
        if not tools:
            return expert
    actions = deque([*map(_call, tools), ""])
    policy = "one call of each tool and an empty answer" if tools else "an empty answer"
    while actions:  # an episode may end before all tools were called
        act = lambda _: actions.popleft() if actions else None  # noqa: E731
        played = _play(config, task, index, act, policy)
    return expert or played


def _play(
    config: Config, task: Task, index: int, act: Callable[[TimedEpisode], str | None], policy: str
) -> DryRun:
    """Play an episode until it ends, or no action is left."""
    templates = hint_templates(task.hint_templates, config.sdpo.hints.templates)
    turns, done = 0, False
    with TimedEpisode(task, task.pick("train", index), config.environment.call_s) as episode:
        episode.begin()
        episode.check_gold()
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


TIME = "time of a step: not known before the first one, after which the run reports it"


def facts_of(config: Config, task: Task, heldout: int) -> Iterator[str]:
    """Yield lines of them, and of what is not known."""
    for part in task.parts:
        rows = training_rows(part)
        yield f"training rows of {part.name!r}: {'generated' if rows is None else f'{rows:,}'}"
    yield f"an evaluation: {heldout:,} held-out episodes"
    yield f"policy: {_model(config)}, contexts of at most {config.policy.max_context:,} tokens"
    schedule, generator = config.schedule, config.generator
    rollouts = schedule.prompts_per_step * schedule.group_size
    longest = min(
        config.policy.max_context, config.environment.max_turns * generator.max_new_tokens
    )
    yield (
        f"a step: {schedule.prompts_per_step} groups of {schedule.group_size} rollouts, at most "
        f"{rollouts * longest:,} sampled tokens ({longest:,} each), "
        f"{rollouts * config.policy.max_context:,} with all that they read; computed in "
        f"microbatches of {config.trainer.microbatch_tokens:,}"
    )
    loss = config.loss
    if (
        generator.quantization != "none"
        and isinstance(loss, CorrectedLoss)
        and loss.correction == "none"
    ):
        yield (
            f"generator.quantization is {generator.quantization!r} and nothing corrects for its "
            "log-probs: set loss.correction to 'token_truncate'"
        )
    yield TIME


def _model(config: Config) -> str:
    try:
        sizes = sizes_of(config.policy)
    except UnknownSizes as unknown:
        return f"parameters not counted ({unknown})"
    return f"{parameter_count(sizes):,} parameters, {sizes.vocab_size:,} tokens of vocabulary"
