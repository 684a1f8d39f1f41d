"""Implements the port `Judges` of an environment: its questions go to judge actors.

Which actors there are is said by the controller, whenever they change. Keys and money are theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from composer_mesh.actors.panel.replies import reply_of
from composer_mesh.actors.rollout_workers.peers import OpenStream, Peer, Peers
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.rollouts.pairs import TeacherReply
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.errors import JudgeFailed
from composer_mesh.tasks.judges import JudgeQuestion, JudgeReply

ATTEMPTS = 3
"""Judge actors that are tried with one question, where they die of it."""


class PeerJudges:
    """The port `Judges` over all judge actors; its calls come from the task's event loop."""

    def __init__(self, open_stream: OpenStream, limit_s: float) -> None:
        """Questions are sent on the event loop that is running now, and may take `limit_s`."""
        self._own, self._limit_s = asyncio.get_running_loop(), limit_s
        self._actors = Peers(open_stream)

    def connect(self, actors: tuple[Peer, ...], gone: Mapping[str, str]) -> None:
        """Ask these actors from now on."""
        self._actors.update(actors, gone)

    async def ask(self, question: JudgeQuestion) -> JudgeReply:
        """Return a judge's answer. Waits for an actor that serves, and for the judge."""
        asking = self._ask(question.judge, question.messages)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asking, self._own))

    async def close(self) -> None:
        """Disconnect from all actors."""
        await self._actors.close()

    async def _ask(self, judge: str, messages: list[Message]) -> JudgeReply:
        try:
            async with asyncio.timeout(self._limit_s):
                return reply_of(judge, await self._anywhere(judge, messages))
        except TimeoutError:
            raise JudgeFailed(judge, f"no judge actor answered in {self._limit_s:g} s") from None

    async def _anywhere(self, judge: str, messages: list[Message]) -> TeacherReply:
        reason = ""
        for _ in range(ATTEMPTS):
            name = min(await self._actors.some_open(), key=self._actors.load)
            try:
                reply: TeacherReply = await self._actors.call(name, "ask", judge, messages)
            except ActorDied as died:
                reason = str(died)
            else:
                return reply
        raise JudgeFailed(judge, f"{ATTEMPTS} judge actors died of it, the last one: {reason}")
