"""One session of a client: episodes one after another, without sockets.

    reset -> observation      begins an episode; one that is running is closed
    step  -> observation      acts; the last one has the reward
    state -> state            of now, or what the agent had read at a turn

A fault of the task's own code ends the episode, never with a reward; the session continues with the
next reset.

`SessionPool` has the open sessions of one process, within the bound of all. All processes map a
file with their counts, of which each writes its own alone. Two that look at the same moment may
both find the last place, so the bound is passed by at most one session for each further process.
"""

import asyncio
import logging
import mmap
import random
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from composer_mesh.plugins.openenv.client.wire import (
    ACCEPTED_ACTIONS,
    FINISH,
    MESSAGE,
    MESSAGES,
    MOST_EPISODE_ID,
    TURN,
    CallToolAction,
    ErrorCode,
    ListToolsAction,
)
from composer_mesh.plugins.openenv.server.observations import (
    answer_name,
    answer_text,
    call_result,
    error_metadata,
    listed_tools,
    observation,
)
from composer_mesh.plugins.openenv.server.validation import (
    SessionRequestRefused,
    checked,
    invalid,
)
from composer_mesh.rollouts.tasks import Episode, StepResult
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import Message, Split
from composer_mesh.tasks.errors import TaskCodeError, TaskError, TaskTimeout
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.task_loop import LoopBlocked, LoopLost, TaskRunner

T = TypeVar("T")
_log = logging.getLogger(__name__)
LARGEST_INDEX = 2**53 - 1
"""Largest integer that every client's JSON holds."""


class ResetArguments(BaseModel):
    """Which episode is begun: `index` of `split`, or else the one that `seed` stands for.

    Without either it is drawn. Further arguments are ignored, as OpenEnv does.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    seed: int | None = Field(default=None, ge=0, le=LARGEST_INDEX)
    episode_id: str | None = Field(default=None, min_length=1, max_length=MOST_EPISODE_ID)
    split: Split = "train"
    index: int | None = Field(default=None, ge=0, le=LARGEST_INDEX)

    def chosen(self) -> int:
        """Return the index of the episode."""
        if self.index is not None:
            return self.index
        return random.randrange(2**31) if self.seed is None else self.seed


class MessageAction(BaseModel):
    """The text of an action, as a model writes it: an answer, or a call in its tags."""

    model_config = ConfigDict(extra="forbid", strict=True)

    message: str
    metadata: dict[str, Any] = Field(default_factory=dict)


class FinishAction(BaseModel):
    """Ends the episode where it is, and scores it: the agent's context is full."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["finish"] = "finish"
    metadata: dict[str, Any] = Field(default_factory=dict)


Action = MessageAction | CallToolAction | ListToolsAction | FinishAction
_ACTIONS: Mapping[str, type[Action]] = {
    "call_tool": CallToolAction,
    "list_tools": ListToolsAction,
    FINISH: FinishAction,
    "": MessageAction,
}


def action_schema(task: Task) -> dict[str, Any]:
    """Return the JSON schema of a task's actions; without tools they are messages alone."""
    return (TypeAdapter(Action) if task.tools else TypeAdapter(MessageAction)).json_schema()


class EnvSession:
    """One client's session; one request at a time."""

    def __init__(self, runner: TaskRunner) -> None:
        self._runner = runner
        self._running: RunningEpisode | None = None
        self._episode: Episode | None = None
        self._episode_id: str | None = None
        self._turn = 0
        self._is_done = False
        self._fault = ""

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools of the episode's task, or of the whole task before the first reset."""
        return listed_tools(self._task)

    async def reset(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Begin an episode. Raises Refused."""
        arguments = checked(ResetArguments, dict(data))
        await self.close()
        chosen = self._runner.task.pick(arguments.split, arguments.chosen())
        self._episode_id = arguments.episode_id or uuid.uuid4().hex
        self._turn, self._is_done, self._fault = 0, False, ""
        self._episode = chosen
        self._running, messages = await self._run(self._runner.begin_episode(chosen))
        return observation(messages, {**self._metadata(), ACCEPTED_ACTIONS: [MESSAGE, FINISH]})

    async def step(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Act. Raises Refused, also after the end of the episode."""
        action = action_of(data)
        if isinstance(action, ListToolsAction):
            return observation([], {}, more={"tools": self.tools})
        running = self._open_episode()
        if isinstance(action, FinishAction):
            return await self._finished(running)
        text = self._text(action)
        result = await self._run(running.step(text))
        self._turn += 1
        more = call_result(action.tool_name, result) if isinstance(action, CallToolAction) else None
        return await self._observed(running, result, more)

    def state(self, turn: int | None = None) -> dict[str, Any]:
        """Return the present state, or with a turn what the agent had read then."""
        now: dict[str, Any] = {"episode_id": self._episode_id, "step_count": self._turn}
        if self._episode is not None:
            now |= {"done": self._is_done, "task": self._episode.task}
        if turn is None:
            return now
        return {**now, TURN: turn, MESSAGES: self._messages_at(turn)}

    async def close(self) -> None:
        """Release the episode, ended or not. Raises Refused where the task's own code fails."""
        running, self._running = self._running, None
        if running is not None:
            await self._run(running.close())

    async def _finished(self, running: RunningEpisode) -> dict[str, Any]:
        outcome = await self._run(running.outcome())
        self._is_done = True
        return observation([], {**self._metadata(), **error_metadata(None)}, outcome)

    async def _observed(
        self, running: RunningEpisode, result: StepResult, more: dict[str, Any] | None
    ) -> dict[str, Any]:
        metadata = {**self._metadata(), **error_metadata(result.error)}
        if not result.done:
            return observation(result.messages, metadata, more=more)
        outcome = await self._run(running.outcome())
        self._is_done = True
        return observation([], metadata, outcome, more)

    def _messages_at(self, turn: int) -> list[Message]:
        if self._running is None:
            raise invalid("there is no episode: reset first")
        try:
            return self._running.state(turn)
        except IndexError as error:
            raise invalid(str(error)) from None

    def _open_episode(self) -> RunningEpisode:
        if self._fault:
            raise SessionRequestRefused(
                ErrorCode.EXECUTION_ERROR, f"the episode has failed: reset ({self._fault})"
            )
        if self._running is None:
            raise invalid("there is no episode: reset first")
        if self._is_done:
            raise invalid(f"the episode has ended after {self._turn} steps: reset")
        return self._running

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the task's code; its own errors end the episode."""
        try:
            return await self._runner.run(work)
        except LoopLost as lost:
            self._running = None
            raise SessionRequestRefused(
                ErrorCode.SESSION_ERROR, f"the session is lost: {lost}", True
            ) from None
        except LoopBlocked as blocked:
            self._running = None  # what it holds belongs to a loop that will never run again
            raise self._failed(blocked) from None
        except TaskError as error:
            raise self._failed(error) from None

    def _failed(self, error: TaskError) -> SessionRequestRefused:
        _log.error("episode %r: %s", self._episode_id, error)  # the id is a client's
        self._fault = public_text(error)
        return SessionRequestRefused(ErrorCode.EXECUTION_ERROR, self._fault)

    @property
    def _task(self) -> Task:
        whole = self._runner.task
        return whole if self._episode is None else whole.of(self._episode.task)

    def _text(self, action: MessageAction | CallToolAction) -> str:
        """Return the text of an action as a model writes it."""
        if isinstance(action, MessageAction):
            return action.message
        if action.tool_name == answer_name(self._task):
            return answer_text(action.arguments)
        return call_text(action.tool_name, action.arguments)

    def _metadata(self) -> dict[str, Any]:
        assert self._episode is not None, "set by reset"
        assert self._episode_id is not None, "set by reset"
        return {
            "task": self._episode.task,
            "split": self._episode.split,
            "index": self._episode.index,
            "episode_id": self._episode_id,
            "turn": self._turn,
        }


def public_text(error: TaskError) -> str:
    """Return what a client learns of a fault: neither paths nor values, which may hold answers."""
    if isinstance(error, TaskTimeout):
        return f"{error.what} did not return within {error.limit_s:g} s"
    if isinstance(error, TaskCodeError):
        kind = error.problem.partition(":")[0]
        return f"{error.what} failed with {kind}: the server's log has the line"
    return f"the task failed ({type(error).__name__}): the server's log has the reason"


def action_of(data: Mapping[str, Any]) -> Action:
    """Return a client's action; raise Refused for what is none."""
    kind = data.get("type", "")
    if not isinstance(kind, str) or kind not in _ACTIONS:
        known = ", ".join(name for name in _ACTIONS if name)
        raise invalid(f'the type is {str(kind)[:40]!r}: send {known}, or {{"message": TEXT}}')
    return checked(_ACTIONS[kind], dict(data))


SIZE = 8


class SessionCounts:
    """The counts of all processes; this one is `number`."""

    def __init__(self, path: Path, processes: int, number: int, most: int) -> None:
        """Open or make the file, and count no session of this process."""
        self._own, self.most = slice(number * SIZE, (number + 1) * SIZE), most
        with path.open("a+b") as file:
            file.truncate(processes * SIZE)
            self._map = mmap.mmap(file.fileno(), processes * SIZE)
        self._set(0)
        self.here = 0

    @property
    def active(self) -> int:
        """Sessions of all processes."""
        whole = bytes(self._map)
        parts = range(0, len(whole), SIZE)
        return sum(int.from_bytes(whole[at : at + SIZE], "little") for at in parts)

    def take(self) -> bool:
        """Count one more session of this process; return False where all places are taken."""
        if self.active >= self.most:
            return False
        self.here += 1
        self._set(self.here)
        return True

    def give_back(self) -> None:
        """Count one session less."""
        self.here -= 1
        self._set(self.here)

    def close(self) -> None:
        """Count none, and release the file."""
        self._set(0)
        self._map.close()

    def _set(self, count: int) -> None:
        self._map[self._own] = count.to_bytes(SIZE, "little")


class SessionPool:
    """Opens and closes the sessions of a task."""

    def __init__(self, runner: TaskRunner, counts: SessionCounts, timeout_s: float) -> None:
        self.runner, self.timeout_s = runner, timeout_s
        self._counts = counts

    @property
    def task(self) -> Task:
        """The task that is served."""
        return self.runner.task

    def open(self) -> EnvSession:
        """Open a session; raise Refused where all are taken."""
        if not self._counts.take():
            active, most = self._counts.active, self._counts.most
            text = f"{active} of {most} sessions are open: come back later"
            more = {"active_sessions": active, "max_sessions": most}
            raise SessionRequestRefused(ErrorCode.CAPACITY_REACHED, text, True, **more)
        return EnvSession(self.runner)

    async def close(self, session: EnvSession) -> None:
        """Close a session. Waits for the task's own code, whose errors are logged and no more."""
        try:
            await session.close()
        except SessionRequestRefused:
            pass  # its fault is in the log, and nobody waits for the session
        finally:
            self._counts.give_back()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EnvSession]:
        """Open a session for a block; it is closed also if the block is cancelled."""
        session = self.open()
        try:
            yield session
        finally:
            await asyncio.shield(self.close(session))
