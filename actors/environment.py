"""The environment actor: holds the sessions of running episodes and steps them.

What an action does is the task's business. Tool results are computed here, away from the models.
"""

import asyncio
from typing import ClassVar

from monarch.actor import concurrent_endpoint

from composer_mesh.configs.schema import Config
from composer_mesh.mesh.actor import MeshActor
from composer_mesh.rollouts.task_choice import make_task
from composer_mesh.rollouts.tasks import Episode, Session, StepResult, Task
from composer_mesh.rollouts.traces import Message


class UnknownSession(KeyError):
    """No session of this name runs here: it was never opened, or it was finished."""


class EnvironmentActor(MeshActor):
    """One process with many sessions.

    controller -- action text --> EnvironmentActor -- messages, reward, error site --> controller

    The task works in threads, one call of a session at a time, so that the actor answers meanwhile.
    """

    kind: ClassVar[str] = "environment"

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    @concurrent_endpoint
    async def load(self, config: Config) -> None:
        """Read the task's data."""
        self._task: Task = await asyncio.to_thread(make_task, config)

    @concurrent_endpoint
    async def begin(self, session_id: str, episode: Episode) -> list[Message]:
        """Open a fresh session; returns what the agent sees first."""
        session = await asyncio.to_thread(self._task.session, episode)
        self._sessions[session_id] = session
        self._count()
        return session.messages

    @concurrent_endpoint
    async def step(self, session_id: str, text: str) -> StepResult:
        """Take an action."""
        return await asyncio.to_thread(self._session(session_id).step, text)

    @concurrent_endpoint
    async def state(self, session_id: str, turn: int) -> list[Message]:
        """Exactly what the agent saw when it acted at `turn`."""
        return self._session(session_id).state(turn)

    @concurrent_endpoint
    async def finish(self, session_id: str) -> list[Message]:
        """Forget a session, ended or not; returns its whole conversation."""
        messages = self._session(session_id).messages
        self._drop(session_id)
        return messages

    @concurrent_endpoint
    async def forget(self, session_id: str) -> None:
        """Let go of a session that nobody will go on with; nothing happens where none is open."""
        self._drop(session_id)

    def _drop(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        self._count()

    def _session(self, session_id: str) -> Session:
        if session_id not in self._sessions:
            raise UnknownSession(f"{session_id} is not open here: begin it first")
        return self._sessions[session_id]

    def _count(self) -> None:
        self.activity = f"{len(self._sessions)} sessions" if self._sessions else "idle"
