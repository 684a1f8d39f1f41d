"""Implements the environment port of a rollout worker: one session per attempt at an episode.

A session is placed on the least busy environment actor and is lost with it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from composer_mesh.actors.rollout_workers.peers import Peers
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded, SessionLost
from composer_mesh.mesh.waiting import BackgroundTasks, told_to_loop
from composer_mesh.rollouts.group_rewards import FinishedRollout, GroupScore
from composer_mesh.rollouts.tasks import Episode, Outcome, StepResult
from composer_mesh.rollouts.traces import Message


class PeerEnvironments:
    """The port `Environments` over all environment actors; a call has `deadline_s`."""

    def __init__(self, environments: Peers, deadline_s: float) -> None:
        self._environments, self._deadline_s = environments, deadline_s
        self._homes: dict[str, str] = {}
        self._sessions: Counter[str] = Counter()
        self._forgetting = BackgroundTasks(told_to_loop)

    async def prepare(self, episode: Episode) -> tuple[Episode, str | None]:
        """Return an episode with its row, and its verified answer if the task states one."""
        prepared: tuple[Episode, str | None] = await self._anywhere("prepare", episode)
        return prepared

    async def score(self, episode: Episode, messages: list[Message]) -> Outcome:
        """Score a conversation that was had without a session."""
        outcome: Outcome = await self._anywhere("score", episode, messages)
        return outcome

    async def score_group(self, episode: Episode, group: list[FinishedRollout]) -> GroupScore:
        """Score the samples of an episode together."""
        score: GroupScore = await self._anywhere("score_group", episode, group)
        return score

    async def begin(self, session_id: str, episode: Episode) -> list[Message]:
        """Open a session. Waits for an actor, including one that is still starting."""
        names = await self._environments.some_open()
        home = min(names, key=lambda name: (self._sessions[name], self._environments.load(name)))
        self._homes[session_id] = home
        self._sessions[home] += 1
        messages: list[Message] = await self._call(session_id, "begin", episode)
        return messages

    async def step(self, session_id: str, text: str) -> StepResult:
        """Take an action; raises `SessionLost` where the session's actor is gone."""
        result: StepResult = await self._call(session_id, "step", text)
        return result

    async def finish(self, session_id: str) -> Outcome:
        """End a session; return its conversation and how it was scored."""
        outcome: Outcome = await self._call(session_id, "finish")
        self._leave(session_id)
        return outcome

    def abandon(self, session_id: str) -> None:
        """Drop a failed session; notify its actor in the background, if it is still serving."""
        home = self._leave(session_id)
        if home is not None and home in self._environments:
            self._forgetting.start(f"forgetting {session_id}", self._forget(home, session_id))

    async def close(self) -> None:
        """Stop notifying actors of sessions that are gone."""
        await self._forgetting.close()

    async def _call(self, session_id: str, endpoint: str, *args: Any) -> Any:
        home = self._homes[session_id]
        if home not in self._environments:
            died = self._environments.died(home)
            raise SessionLost(session_id, home, died.reason)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._environments.call(home, endpoint, session_id, *args)
        except TimeoutError:
            raise DeadlineExceeded(home, endpoint, self._deadline_s) from None
        except ActorDied as died:
            raise SessionLost(session_id, home, died.reason, True) from died

    async def _anywhere(self, endpoint: str, *args: Any) -> Any:
        """Call the least busy actor; raises `ActorDied` where it dies of it."""
        home = min(await self._environments.some_open(), key=self._environments.load)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._environments.call(home, endpoint, *args)
        except TimeoutError:
            raise DeadlineExceeded(home, endpoint, self._deadline_s) from None

    def _leave(self, session_id: str) -> str | None:
        home = self._homes.pop(session_id, None)
        if home is not None:
            self._sessions[home] -= 1
            if not self._sessions[home]:
                del self._sessions[home]
        return home

    async def _forget(self, home: str, session_id: str) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._environments.call(home, "forget", session_id)
        except (ActorDied, TimeoutError):
            return  # its sessions are gone with it, or it is killed as hung
