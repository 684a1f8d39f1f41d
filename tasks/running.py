"""Runs one episode of a task: actions in, tool results out, scored at the end.

The rules of every task are here: an action calls tools or is an answer, an action that fails is an
error site, and an episode ends by an answer, by a tool, or with its last turn.

Scores the samples of an episode together, by the group rewards of its task.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar

from composer_mesh.rollouts.tasks import (
    Episode,
    FinishedRollout,
    GroupScore,
    Outcome,
    StepResult,
    total_reward,
)
from composer_mesh.rollouts.tool_calls import (
    MalformedCall,
    ToolCall,
    assistant_message,
    numbered,
    parse_bounded,
)
from composer_mesh.rollouts.traces import ErrorSite, Message
from composer_mesh.tasks.calls import TaskCalls
from composer_mesh.tasks.errors import (
    ERROR_PREFIX,
    LONGEST,
    JudgesSpent,
    TaskCodeError,
    TaskTimeout,
    ToolError,
    UnusableTask,
    returned_by,
    shown,
)
from composer_mesh.tasks.reward import (
    Ending,
    RewardFunction,
    Transcript,
    TurnRewards,
    finite_number,
)
from composer_mesh.tasks.session import Reply, Session
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.tool import ExternalTool, ToolSpec, unknown_tool

T = TypeVar("T")

LONGEST_MESSAGE = 500_000
"""Characters of the longest message of a task; a longer one is cut, and the agent is informed."""


class RunningEpisode:
    """One running episode; one call at a time. The task's functions are called by `calls`."""

    def __init__(self, task: Task, episode: Episode, calls: TaskCalls | None = None) -> None:
        self._task, self._calls = task.of(episode.task), calls or TaskCalls()
        self._session = self._task.session(episode)
        self._messages: list[Message] = []
        self._seen: list[int] = []
        self._errors: list[ErrorSite] = []
        self._turn_rewards = TurnRewards()
        self._failures, self._turn = 0, 0
        self._ended: Ending | None = None

    async def begin(self) -> list[Message]:
        """Start the session; return the first messages."""
        await self._call("start", self._session.start)
        opening = await self._call("opening", self._session.opening)
        own = type(self._session).opening is not Session.opening
        name, opens = ("opening", self._session.opening) if own else ("prompt", self._task.prompt)
        with returned_by(opens):
            self._messages = _messages(opening, f"the {name} of task {self._task.name!r}")
            if not self._messages:
                raise UnusableTask(f"task {self._task.name!r} opens an episode with no message")
        self._seen = [len(self._messages)]
        self._session.conversation = self._messages
        return self.messages

    @property
    def task(self) -> Task:
        """The task of the episode; of a mixture, the part that it belongs to."""
        return self._task

    @property
    def episode(self) -> Episode:
        """The episode with its row."""
        return self._session.episode

    def replace_row(self, episode: Episode) -> None:
        """Give the session an episode with another row, which it reads from then on."""
        self._session.episode = episode

    @property
    def messages(self) -> list[Message]:
        """The conversation so far."""
        return deepcopy(self._messages)

    def state(self, turn: int) -> list[Message]:
        """Return exactly what the agent saw when it acted at `turn` (0-based)."""
        if not 0 <= turn < len(self._seen):
            raise IndexError(
                f"turn {turn} of an episode with {len(self._seen)} states: ask for 0 to "
                f"{len(self._seen) - 1}"
            )
        return deepcopy(self._messages[: self._seen[turn]])

    async def step(self, text: str) -> StepResult:
        """Apply the agent's action; raise RuntimeError after the end of the episode."""
        if self._ended is not None:
            raise RuntimeError(f"turn {self._turn} after the end: start a new session")
        call_id, most = f"call_{self._turn}", self._task.settings.calls_per_turn
        self._messages.append(assistant_message(text, call_id, most))
        found = parse_bounded(text, most)
        if isinstance(found, MalformedCall):
            messages, error = await self._tool(found, call_id)
        elif found:
            messages, error = await self._tools(found, call_id)
        else:
            messages, error = await self._reply(text)
        self._turn_rewards.end_turn(self._session)
        return self._result(messages, error)

    async def outcome(self, messages: list[Message] | None = None) -> Outcome:
        """Score the episode, ended or not; one that is not has a full context.

        `messages` replace the conversation of one that was never begun, which has no session.
        """
        said = self.messages if messages is None else messages
        transcript = Transcript(
            self._session.episode,
            said,
            list(self._errors),
            self._ended or "context",
            self._session if messages is None else None,
        )
        values, left_out = await _scored(
            self._task, self._task.rewards, lambda one: self._value(one, transcript)
        )
        weights = self._task.reward_weights
        total = total_reward(values, weights, 0.0)
        success = await self._call("success", self._task.success, transcript, total)
        penalty = self._task.settings.tool_error_penalty * self._failures
        reward = total_reward(values, weights, penalty)
        by_turn = await self._by_turn(transcript, values)
        reward += math.fsum(by_turn)
        stated = self._task.verified_answer
        answer = await self._call("verified_answer", stated, self._session.episode)
        screened = bool(await self._call("screened", self._task.screened, transcript))
        return Outcome(
            said,
            reward,
            bool(success),
            values,
            answer,
            penalty,
            left_out,
            by_turn,
            screened,
            self._session.episode_id,
        )

    async def close(self) -> None:
        """Release the session."""
        try:
            await self._call("close", self._session.close)
        finally:
            if self._task.tool_servers is not None:
                self._task.tool_servers.end(self._session.key)

    async def _reply(self, text: str) -> tuple[list[Message], ErrorSite | None]:
        try:
            with returned_by(self._session.reply):
                what = f"the reply of task {self._task.name!r}"
                reply = _reply(await self._call("reply", self._session.reply, text), what)
        except ToolError as failure:
            self._failures += 1
            said = f"{ERROR_PREFIX}{failure.text}"
            return [{"role": "user", "content": said}], self._site(failure)
        if reply.done:
            self._ended = "answer"
        error = self._site(reply.error) if reply.error is not None else None
        with returned_by(self._session.reply):
            return _messages(list(reply.messages), what), error

    async def _tools(
        self, calls: Sequence[ToolCall], call_id: str
    ) -> tuple[list[Message], ErrorSite | None]:
        """Run an action's calls in order, until one ends the episode; the first error is its
        error site."""
        messages, first = list[Message](), None
        for at, call in enumerate(calls):
            given, error = await self._tool(call, numbered(call_id, at))
            messages, first = messages + given, first or error
            if self._ended is not None:
                break
        return messages, first

    async def _tool(
        self, action: ToolCall | MalformedCall, call_id: str
    ) -> tuple[list[Message], ErrorSite | None]:
        role: Message = {"role": "tool", "tool_call_id": call_id}
        error: ErrorSite | None = None
        try:
            if isinstance(action, MalformedCall):
                role = {"role": "user"}
                raise ToolError("malformed_call", action.reason, {"reason": action.reason})
            content = await self._execute(action)
        except ToolError as failure:
            self._failures += 1
            content, error = f"{ERROR_PREFIX}{failure.text}", self._site(failure)
        if self._session.ended:
            self._ended = "tool"
        return [{**role, "content": content}], error

    async def _execute(self, action: ToolCall) -> str:
        specs = self._task.with_server_tools(self._session.own_tools)
        spec = specs.get(action.name)
        if spec is None:
            raise unknown_tool(action.name, list(specs))
        arguments = spec.checked(action.arguments)
        result = await self._call_tool(spec, arguments)
        if isinstance(spec, ExternalTool):
            return _shown(result)
        with returned_by(spec.function):
            return _shown(result)

    async def _call_tool(self, spec: ToolSpec | ExternalTool, arguments: Mapping[str, Any]) -> Any:
        try:
            return await self._call(f"tool {spec.name!r}", self._function(spec, arguments))
        except TaskTimeout as late:
            text = f"{spec.name} took longer than {late.limit_s:g} s"
            raise ToolError("tool_timeout", text, {"tool": spec.name}) from late
        except TaskCodeError as failed:
            for kind, name in spec.errors.items():
                if isinstance(failed.__cause__, kind):
                    raise ToolError(name, shown(failed.__cause__, LONGEST)) from failed
            raise

    def _function(self, spec: ToolSpec | ExternalTool, arguments: Mapping[str, Any]) -> Any:
        if isinstance(spec, ExternalTool):
            return partial(self._session.mcp, spec.name, arguments)
        if spec.is_method:
            return partial(getattr(self._session, spec.function.__name__), **arguments)
        return partial(spec.function, **arguments)

    def _result(self, messages: list[Message], error: ErrorSite | None) -> StepResult:
        if self._ended is None and self._turn + 1 >= self._task.settings.max_turns:
            self._ended = "turns"
            error = error or ErrorSite(self._turn, "no_answer", "no_answer", {})
        if error is not None:
            self._errors.append(error)
        self._turn += 1
        if self._ended is not None:
            return StepResult([], True, error)
        self._messages += deepcopy(messages)
        self._seen.append(len(self._messages))
        return StepResult(messages, False, error)

    async def _by_turn(self, transcript: Transcript, values: dict[str, float]) -> list[float]:
        """Return the reward of each turn, none if none is given; add the functions' sums to
        `values`."""
        rewards = self._turn_rewards.of_turns(transcript.turns)
        for one in self._task.turn_rewards:
            what = f"turn reward {one.name!r}"
            returned = await self._call(what, one.function, transcript)
            with returned_by(one.function):
                values[one.name] = rewards.add(one, returned)
        return rewards.values if rewards.given else []

    async def _value(self, one: Any, transcript: Transcript) -> float:
        value = await self._call(f"reward {one.name!r}", one.function, transcript)
        found = finite_number(value)
        if found is not None:
            return found
        with returned_by(one.function):
            raise UnusableTask(
                f"reward {one.name!r} of task {self._task.name!r} returned {shown(value)!r} for "
                f"{transcript.episode.split} episode {transcript.episode.index}: return a finite "
                "number"
            )

    async def _call(self, what: str, function: Any, *args: Any) -> Any:
        return await self._calls(f"{what} of task {self._task.name!r}", function, *args)

    def _site(self, failure: ToolError) -> ErrorSite:
        facts = {str(key): str(value) for key, value in failure.facts.items()}
        turn = self._turn if failure.turn is None else failure.turn
        if not 0 <= turn <= self._turn:
            raise UnusableTask(
                f"an error of kind {failure.kind!r} has the turn {turn} but the agent is at turn "
                f"{self._turn}: name one from 0 to {self._turn}, or none for the present one"
            )
        known = self._task.hint_keys
        if failure.hint is not None and failure.hint not in known:
            raise UnusableTask(
                f"an error of kind {failure.kind!r} names the hint template {failure.hint!r}, "
                f"which does not exist: add it to hint_templates of task {self._task.name!r}, or "
                "under [sdpo.hints.templates]"
            )
        if failure.hint is not None or failure.kind in known:
            return ErrorSite(turn, failure.kind, failure.hint or failure.kind, facts)
        return ErrorSite(turn, failure.kind, "tool_error", {**facts, "text": failure.text})


def _reply(returned: Any, what: str) -> Reply:
    if returned is None:
        return Reply()
    if isinstance(returned, Reply):
        return returned
    return Reply(_messages(returned, what), done=False)


def _messages(value: Any, what: str) -> list[Message]:
    if isinstance(value, str):
        return [_bounded({"role": "user", "content": value})]
    if isinstance(value, Sequence) and all(_is_message(one) for one in value):
        return [_bounded(_carried(dict(one), what)) for one in value]
    raise UnusableTask(
        f"{what} is {shown(value, 60)!r}: return a text, or messages with a role and a content"
    )


def _carried(message: Message, what: str) -> Message:
    """Return a message of plain values; raises UnusableTask for others, which cannot be stored."""
    try:
        json.dumps(message)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnusableTask(
            f"{what} has a message that JSON cannot carry ({error}): return texts and plain values"
        ) from error
    return message


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def _shown(result: Any) -> str:
    """Return a tool's result as the agent reads it."""
    if not isinstance(result, str):
        try:
            result = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise UnusableTask(
                f"a tool returned a {type(result).__name__}, which JSON cannot carry ({error}): "
                "return a text, or plain values"
            ) from error
    return _cut(result)


def _bounded(message: Message) -> Message:
    """Return a message of the task with a content that can be stored and encoded."""
    if isinstance(message.get("content"), str):
        message["content"] = _cut(message["content"])
    return message


def _cut(text: str) -> str:
    text = text.encode(errors="replace").decode()  # a lone surrogate cannot be stored
    if len(text) <= LONGEST_MESSAGE:
        return text
    return f"{text[:LONGEST_MESSAGE]}… ({len(text):,} characters, cut)"


async def score_group(
    task: Task, episode: Episode, group: Sequence[FinishedRollout], calls: TaskCalls
) -> GroupScore:
    """Return each group reward's values for the rollouts of an episode that has its row."""
    part = task.of(episode.task)
    transcripts = [
        Transcript(episode, one.messages, one.errors, "unknown", None, one.rewards) for one in group
    ]
    values, left_out = await _scored(
        part, part.group_rewards, lambda one: _values(part, one, transcripts, calls)
    )
    return GroupScore(values, left_out)


async def _scored(
    task: Task, rewards: Sequence[RewardFunction], score: Callable[[RewardFunction], Awaitable[T]]
) -> tuple[dict[str, T], tuple[str, ...]]:
    """Return the scores by name, and the names of rewards whose judge may not be queried."""
    values, left_out = dict[str, T](), list[str]()
    for one in rewards:
        try:
            values[one.name] = await score(one)
        except JudgesSpent:
            if not task.settings.leave_out_spent:
                raise
            left_out.append(one.name)
    return values, tuple(left_out)


async def _values(
    task: Task, one: RewardFunction, transcripts: Sequence[Transcript], calls: TaskCalls
) -> list[float]:
    what = f"group reward {one.name!r} of task {task.name!r}"
    found = await calls(what, one.function, list(transcripts))
    numbers = list(map(finite_number, found)) if isinstance(found, Sequence) else [None]
    kept = [number for number in numbers if number is not None]
    with returned_by(one.function):
        if len(kept) < len(numbers):
            raise UnusableTask(f"{what} returned {shown(found)!r}: return a list of finite numbers")
        if len(kept) != len(transcripts):
            raise UnusableTask(
                f"{what} returned {len(kept)} numbers for {len(transcripts)} transcripts: return "
                "one for each, in their order"
            )
    return kept
