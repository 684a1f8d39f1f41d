"""One episode on an OpenEnv server: its actions, observations, errors and reward.

The reward is taken from the environment alone, and only after the server has confirmed that no
answer is left over and that the episode is the one that was begun.

Observations are untrusted: their texts are data for the agent, and what names an error or a hint is
taken only in a known form. Metadata is never shown to the agent.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from string import Formatter
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from pydantic import ValidationError

from composer_mesh.configs.validation import validated
from composer_mesh.plugins.openenv.client.errors import (
    EnvironmentRaised,
    ProtocolViolation,
    ServerFailure,
)
from composer_mesh.plugins.openenv.client.wire import (
    ACCEPTED_ACTIONS,
    ERROR_FACTS,
    ERROR_KIND,
    FINISH,
    HINT_TEMPLATE_KEY,
    MESSAGE,
    MOST_EPISODE_ID,
    NO_ERROR,
    TURN,
    CallToolAction,
    CallToolObservation,
    ErrorCode,
    ErrorFrame,
    ObservationData,
    ObservationFrame,
    ResetFrame,
    StateData,
    StateFrame,
    StateReply,
    StepFrame,
    ToolErrorType,
)
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.errors import ERROR_PREFIX, ToolError
from composer_mesh.tasks.session import Reply, Session

if TYPE_CHECKING:
    from composer_mesh.plugins.openenv.client.connection import OpenEnvConnection
    from composer_mesh.plugins.openenv.client.task import OpenEnvTask

T = TypeVar("T")
READY = "The environment is ready."
STATELESS = frozenset(
    {ErrorCode.UNKNOWN_TYPE, ErrorCode.VALIDATION_ERROR, ErrorCode.EXECUTION_ERROR}
)
"""Answers of environments that tell no state."""


class OpenEnvSession(Session):
    """An episode of an environment behind a URL; its socket is its own."""

    task: OpenEnvTask
    _connection: OpenEnvConnection | None = None
    _steps, _total, _last = 0, 0.0, 0.0
    _finished, _requested_id = False, ""
    _accepted: frozenset[str] = frozenset()
    _state: StateData | None = None
    _first: ObservationData

    async def start(self) -> None:
        """Connect and reset. Waits while the server is full or away, within the task's limits."""
        from composer_mesh.plugins.openenv.client.connection import open_and_ask

        limits, task = self.task.limits, self.task
        self._connection, self._first = await open_and_ask(
            task.options, task.headers, limits.connect_s, self._reset
        )

    def opening(self) -> str:
        """Return the prompt and the first observation."""
        observed = self._read(lambda: text_of(self._first, self.task.options.observation))
        texts = [self.task.options.prompt, observed]
        return "\n\n".join(text for text in texts if text) or READY

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool of the environment, or take its action; return the result as text."""
        if self.task.kind == "schema":
            data, failed = await self._step(arguments), None
            text = self._read(lambda: text_of(data, self.task.options.observation))
        else:
            action = CallToolAction(tool_name=name, arguments=arguments)
            data = await self._step(action.model_dump(exclude={"metadata"}))
            text, failed = self._read(lambda: tool_result(data))
        if (error := self._reported_error(data, text) or failed) is not None:
            raise error
        return text

    async def reply(self, text: str) -> Reply | None:
        """Take a text as the action, where the environment takes one; else end."""
        field = self.task.text_field or (MESSAGE if MESSAGE in self._accepted else None)
        if field is None:
            return None
        data = await self._step({field: text})
        said = self._read(lambda: text_of(data, self.task.options.observation))
        error = self._reported_error(data, said)
        if data.done:
            return Reply(error=error)
        if error is not None:
            raise error
        messages: list[Message] = [{"role": "user", "content": said or READY}]
        return Reply(messages, done=False)

    async def reward(self) -> float:
        """Return the episode's reward, once the server has confirmed the episode.

        One that is not over is ended where it is, where the environment takes that.
        """
        if not self._finished and FINISH in self._accepted:
            await self._finish()
        if not self._finished:
            await self._confirm(self._until(self.task.limits.step_s))
        summed = self.task.options.reward == "summed"
        return self._total if summed else self._last if self._finished else 0.0

    @property
    def episode_id(self) -> str:
        """The id that the server tells, or the one that was requested."""
        reported = "" if self._state is None else self._state.episode_id
        return (reported or self._requested_id)[:MOST_EPISODE_ID]

    async def close(self) -> None:
        """End the session on the server."""
        if self._connection is not None:
            await self._connection.close()

    async def _reset(self, connection: OpenEnvConnection) -> ObservationData:
        until = self._until(self.task.limits.reset_s)
        self._connection, self._requested_id = connection, uuid4().hex
        sent = {**self.task.options.reset, **self.row, "episode_id": self._requested_id}
        frame = await connection.ask(ResetFrame(data=sent), until, "reset")
        data = self._observed(frame, "reset")
        if data.done:
            raise self._violation("said at the reset that the episode is over")
        await self._confirm(until)
        self._accepted = accepted_actions(data)
        return data

    async def _step(self, action: dict[str, Any]) -> ObservationData:
        """Act, which is a turn."""
        data = await self._answer(action, self._steps + 1, "step")
        self._steps += 1
        self.task.seen_error_kind |= has_error_kind(data)
        return data

    async def _finish(self) -> None:
        """Have the environment score the episode where it is."""
        data = await self._answer({"type": FINISH}, self._steps, FINISH)
        if not data.done:
            raise self._violation(f"continues after {FINISH!r}, which it says that it takes")

    async def _answer(self, action: dict[str, Any], turn: int, what: str) -> ObservationData:
        """Return what the environment says to an action after which it has counted `turn` turns.

        The answer to the last action is confirmed before anything is taken from it.
        """
        if self._finished:
            raise RuntimeError("the environment's episode is over: start a new session")
        until = self._until(self.task.limits.step_s)
        frame = await self._connected.ask(StepFrame(data=action), until, what)
        data = self._observed(frame, what)
        self._check_turn(data, turn)
        self._count(data)
        if data.done:
            await self._confirm(until)
            self._finished = True
            self.end()
        return data

    def _observed(self, frame: Any, what: str) -> ObservationData:
        """Return an observation; raises what an error frame means."""
        if isinstance(frame, ObservationFrame):
            return frame.data
        if isinstance(frame, ErrorFrame):
            raise self._meaning(frame, what)
        raise self._violation(f"answered a {what} with a {frame.type} frame")

    def _meaning(self, frame: ErrorFrame, what: str) -> Exception:
        """Return the error that an error frame stands for."""
        from composer_mesh.plugins.openenv.client.connection import full, reason_of

        url, code, reason = self.task.options.url, frame.data.code, reason_of(frame)
        if (failure := full(url, frame)) is not None:
            return failure
        if what == "step" and code == ErrorCode.VALIDATION_ERROR:
            return ToolError("invalid_action", reason)
        tells = what == "step" and self.task.options.step_errors == "tell"
        if code == ErrorCode.EXECUTION_ERROR:
            return (
                ToolError("step_failed", reason) if tells else EnvironmentRaised(url, code, reason)
            )
        if what == "reset" and code == ErrorCode.VALIDATION_ERROR:
            return EnvironmentRaised(url, code, reason)
        return self._violation(f"answered a {what} with the error {code[:40]!r}: {reason}")

    async def _confirm(self, until: float) -> None:
        """Ask for the state: no answer may be left over, and the episode must be the same."""
        frame = await self._connected.ask(StateFrame(), until, "state")
        if isinstance(frame, ErrorFrame) and frame.data.code in STATELESS:
            return
        if not isinstance(frame, StateReply):
            raise self._violation(
                f"answered a question for the state with a {frame.type} frame, as after two "
                "answers to one step"
            )
        before, self._state = self._state, frame.data
        if before is None:
            return
        if before.episode_id != frame.data.episode_id or frame.data.step_count < before.step_count:
            raise self._violation("has reset the environment during the episode")

    def _check_turn(self, data: ObservationData, turn: int) -> None:
        """Refuse the answer to another action, where the environment counts them."""
        reported = (data.metadata or {}).get(TURN)
        if isinstance(reported, int) and reported != turn:
            raise self._violation(f"answered action {turn} as if it were action {reported}")

    def _count(self, data: ObservationData) -> None:
        reward = data.reward
        if reward is None:
            if data.done and self.task.options.reward == "terminal":
                raise self._violation("ended the episode without a reward: see data.options.reward")
            return
        most = self.task.options.most_reward
        if abs(reward) > most:
            raise self._violation(
                f"gave the reward {reward:g}, beyond most_reward, which is {most:g}"
            )
        self._last = float(reward)
        self._total += self._last

    def _reported_error(self, data: ObservationData, text: str) -> ToolError | None:
        """Return the agent's error that an observation tells, with its text."""
        error = reported_error(data, self.task.templates)
        if error is None:
            return None
        said = text.removeprefix(ERROR_PREFIX) or error.kind  # the agent's messages get their own
        return ToolError(error.kind, said, {**error.facts, "text": said[:1000]}, error.hint)

    def _read(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except UnreadableObservation as problem:
            raise self._violation(str(problem)) from None

    def _violation(self, reason: str) -> ServerFailure:
        if self._connection is not None:
            return self._connection.fail(ProtocolViolation, reason)
        return ProtocolViolation(self.task.options.url, reason)

    def _until(self, seconds: float) -> float:
        return asyncio.get_running_loop().time() + seconds

    @property
    def _connected(self) -> OpenEnvConnection:
        assert self._connection is not None, "a session is started before it is used"
        return self._connection


KIND = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
MOST_FACTS, LONGEST_FACT = 20, 1_000
GENERAL_TEMPLATE = "tool_error"


class UnreadableObservation(ValueError):
    """An observation that has not the form of the environment's kind."""


def text_of(data: ObservationData, field: str | None) -> str:
    """Return an observation as text: the named field, its only text, or all of it as JSON."""
    said = {key: value for key, value in data.observation.items() if key != "metadata"}
    if field is not None:
        if field not in said:
            raise UnreadableObservation(f"an observation has no field {field!r}")
        said = {field: said[field]}
    texts = [value for value in said.values() if isinstance(value, str)]
    if len(said) == 1 and texts:
        return texts[0]
    return json.dumps(said, ensure_ascii=False) if said else ""


def tool_result(data: ObservationData) -> tuple[str, ToolError | None]:
    """Return the result of a call as text, and the agent's error where the result is one.

    Raises UnreadableObservation for one that is no result of a call.
    """
    try:
        called = validated(CallToolObservation, data.observation)
    except ValidationError:
        raise UnreadableObservation("a call was not answered by a result") from None
    if called.error is not None:
        failed = _failed_call(called.tool_name, called.error.error_type, called.error.message)
        return failed.text, failed
    result = called.result
    if isinstance(result, Mapping) and "content" in result:
        text = _content(result)
        is_error = result.get("is_error") is True or result.get("isError") is True
        return text, ToolError("tool_failed", text) if is_error else None
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False), None


def reported_error(data: ObservationData, templates: Mapping[str, str]) -> ToolError | None:
    """Return the error of the agent that an observation's metadata names, by our extension.

    Its hint template is used if it is one of `templates` and the facts fill it.
    """
    metadata = data.metadata or data.observation.get("metadata")
    if not isinstance(metadata, Mapping):
        return None
    kind = metadata.get(ERROR_KIND)
    if not isinstance(kind, str) or kind == NO_ERROR or not KIND.fullmatch(kind):
        return None
    facts = _facts(metadata.get(ERROR_FACTS))
    named = metadata.get(HINT_TEMPLATE_KEY)
    for key in (named, kind):
        if isinstance(key, str) and key in templates and _fields(templates[key]) <= facts.keys():
            return ToolError(kind, "", facts, key)
    return ToolError(kind, "", facts, GENERAL_TEMPLATE)


def has_error_kind(data: ObservationData) -> bool:
    """Whether the environment says of its answers if the agent was wrong."""
    metadata = data.metadata or data.observation.get("metadata")
    return isinstance(metadata, Mapping) and ERROR_KIND in metadata


def accepted_actions(data: ObservationData) -> frozenset[str]:
    """Return what an environment says at a reset that it takes besides calls, by our extension."""
    accepted = (data.metadata or {}).get(ACCEPTED_ACTIONS)
    return frozenset(
        one for one in (MESSAGE, FINISH) if isinstance(accepted, list) and one in accepted
    )


def _failed_call(tool: str, error: str, message: str) -> ToolError:
    """Return the error of a call that the environment did not carry out.

    Raises UnreadableObservation where that was no error of the agent.
    """
    if error == ToolErrorType.TIMEOUT:
        return ToolError("tool_timeout", message or f"{tool} took too long", {"tool": tool})
    agents = (
        ToolErrorType.INVALID_ARGS,
        ToolErrorType.TOOL_NOT_FOUND,
        ToolErrorType.EXECUTION_ERROR,
    )
    if error in agents:
        return ToolError(f"remote_{error}", message or error)
    raise UnreadableObservation(f"a call failed with {error[:LONGEST_FACT]!r}: {message}")


def _content(result: Mapping[str, Any]) -> str:
    """Return the texts of a result of MCP; other content is named."""
    parts = result["content"]
    if not isinstance(parts, list):
        raise UnreadableObservation("a result has a content that is not a list")
    texts = [_part(part) for part in parts]
    if not texts and result.get("structured_content") is not None:
        texts = [json.dumps(result["structured_content"], ensure_ascii=False)]
    return "\n".join(texts)


def _part(part: Any) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else None
    return f"[{str(kind)[:20]}]"


def _facts(facts: Any) -> dict[str, str]:
    if not isinstance(facts, Mapping):
        return {}
    named = [(name, text) for name, text in facts.items() if KIND.fullmatch(str(name))]
    return {str(name): str(text)[:LONGEST_FACT] for name, text in named[:MOST_FACTS]}


def _fields(template: str) -> set[str]:
    return {field for _, field, _, _ in Formatter().parse(template) if field is not None}
