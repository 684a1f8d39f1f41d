"""Implements the controller's environment port: one pool session per rollout attempt.

The task implements what a session does; `retries` handles a rollout whose session is lost.
"""

from contextlib import suppress

from composer_mesh.mesh.background import BackgroundTasks
from composer_mesh.mesh.failures import recorded_by
from composer_mesh.mesh.supervision import MeshError, Recorder
from composer_mesh.rollouts.tasks import Episode, StepResult
from composer_mesh.rollouts.traces import Message
from composer_mesh.services.pool.sessions import Session
from composer_mesh.services.service import Service


class MeshEnvironments:
    """Environment actors; a session is placed on the least loaded replica and is lost with it."""

    def __init__(self, service: Service, record: Recorder) -> None:
        self._service = service
        self._sessions: dict[str, Session] = {}
        self._forgetting = BackgroundTasks(recorded_by(record))

    async def begin(self, session_id: str, episode: Episode) -> list[Message]:
        """Open a session. Waits for a replica, including one that is still starting."""
        session = self._service.session(session_id)
        session.open()
        self._sessions[session_id] = session
        messages: list[Message] = await session.begin(session_id, episode)
        return messages

    async def step(self, session_id: str, text: str) -> StepResult:
        """Take an action; raises `SessionLost` where the session's replica is gone."""
        result: StepResult = await self._sessions[session_id].step(session_id, text)
        return result

    async def finish(self, session_id: str) -> list[Message]:
        """End a session; return its complete conversation."""
        messages: list[Message] = await self._sessions[session_id].finish(session_id)
        self._sessions.pop(session_id).close()
        return messages

    def abandon(self, session_id: str) -> None:
        """Drop a failed session; notify its actor in the background, if it is still serving."""
        if (session := self._sessions.pop(session_id, None)) is None:
            return
        home = session.replica
        session.close()
        names = [replica.name for replica in self._service.replicas if replica.serving]
        if home in names:
            self._forgetting.start(f"forgetting {session_id}", self._forget(home, session_id))

    async def _forget(self, home: str | None, session_id: str) -> None:
        with suppress(MeshError, StopIteration, IndexError):
            places = (i for i, one in enumerate(self._service.replicas) if one.name == home)
            await self._service.on(next(places), "forget", session_id)
