"""The environment actor: holds the sessions of running episodes and steps them.

The task defines what an action does; its tool calls run here, in a process without models.
"""

import asyncio
from typing import ClassVar

from monarch.actor import concurrent_endpoint

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.mesh.call_stream import current_caller
from composer_mesh.rollouts.task_choice import make_task
from composer_mesh.rollouts.tasks import Episode, Session, StepResult, Task
from composer_mesh.rollouts.traces import Message


class UnknownSession(KeyError):
    """No session of this name is open: it was never begun, or it was finished."""


class EnvironmentActor(MeshActor):
    """One process with many sessions.

    rollouts -- action text --> EnvironmentActor -- messages, reward, error site --> rollouts

    The task runs in threads, one call per session at a time, so the actor stays responsive.
    """

    kind: ClassVar[str] = "environment"

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._callers: dict[str, str] = {}

    @concurrent_endpoint
    async def load(self, config: Config) -> None:
        """Load the task's data."""
        self._task: Task = await asyncio.to_thread(make_task, config)

    @concurrent_endpoint
    async def begin(self, session_id: str, episode: Episode) -> list[Message]:
        """Open a new session; return the initial messages."""
        session = await asyncio.to_thread(self._task.session, episode)
        self._sessions[session_id] = session
        self._callers[session_id] = current_caller.get()
        self._count()
        return session.messages

    @concurrent_endpoint
    async def step(self, session_id: str, text: str) -> StepResult:
        """Execute an action."""
        return await asyncio.to_thread(self._session(session_id).step, text)

    @concurrent_endpoint
    async def state(self, session_id: str, turn: int) -> list[Message]:
        """Return exactly the messages that the agent saw when it acted at `turn`."""
        return self._session(session_id).state(turn)

    @concurrent_endpoint
    async def finish(self, session_id: str) -> list[Message]:
        """Close a session, ended or not; return its complete conversation."""
        messages = self._session(session_id).messages
        self._drop(session_id)
        return messages

    @concurrent_endpoint
    async def forget(self, session_id: str) -> None:
        """Drop an abandoned session; does nothing if it is not open."""
        self._drop(session_id)

    @concurrent_endpoint
    async def hang_up(self, caller: str) -> None:
        """Drop the sessions of a caller that is dead. Waits for its calls under way."""
        await self.end_calls(caller)
        for session_id in [name for name, one in self._callers.items() if one == caller]:
            self._drop(session_id)

    def in_use(self) -> int:
        return len(self._sessions)

    def _drop(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        self._callers.pop(session_id, None)
        self._count()

    def _session(self, session_id: str) -> Session:
        if session_id not in self._sessions:
            raise UnknownSession(f"{session_id} is not open here: begin it first")
        return self._sessions[session_id]

    def _count(self) -> None:
        self.activity = f"{len(self._sessions)} sessions" if self._sessions else "idle"
