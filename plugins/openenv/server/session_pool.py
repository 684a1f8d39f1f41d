"""The open sessions of one server process, within the bound that all processes share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from composer_mesh.plugins.openenv.server.errors import Refused, capacity_reached
from composer_mesh.plugins.openenv.server.session import EnvSession
from composer_mesh.plugins.openenv.server.session_counts import SessionCounts
from composer_mesh.tasks.task import Task
from composer_mesh.tasks.task_loop import TaskRunner


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
            raise capacity_reached(self._counts.active, self._counts.most)
        return EnvSession(self.runner)

    async def close(self, session: EnvSession) -> None:
        """Close a session. Waits for the task's own code, whose errors are logged and no more."""
        try:
            await session.close()
        except Refused:
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
