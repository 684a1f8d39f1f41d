"""Where an offline replay asks its teachers: so many states at once, and patient about money.

A request sets its highest possible cost aside, which is mostly far more than it costs in the end.
So where a teacher was refused for the budget while paid requests are under way, the state waits
for those to be settled and asks again; answers that it has are kept. It is final when nothing under
way could make room any more. Which states are asked about is not decided here.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from composer_mesh.rollouts.pairs import (
    FailureKind,
    FrozenState,
    TeacherAnswer,
    TeacherFailure,
    TeacherReply,
)


class Asked(Protocol):
    """Who answers; in truth a `TeacherPanel`."""

    async def ask(self, state: FrozenState, n: int) -> list[TeacherReply]: ...


class Stopped(Exception):
    """The desk was told to stop before this state had its answers."""


class Desk:
    """A `Teachers` port. Belongs to one event loop."""

    def __init__(self, panel: Asked, concurrency: int) -> None:
        self._panel, self._slots = panel, asyncio.Semaphore(concurrency)
        self._stopping = False
        self._asking = self._settled = 0
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Ask nothing new; what is under way is answered still, and only then others give up."""
        self._stopping = True
        self._tell()

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        while self._asking:
            await self._changed.wait()

    async def query(self, state: FrozenState, n: int) -> list[TeacherReply]:
        """The replies of `n` teachers. Waits for a slot, for them, and for money that is set aside.

        Raises `Stopped` where the desk stopped first.
        """
        async with self._slots:
            seen, replies = self._settled, await self._ask(state, n)
            while is_short(replies) and await self._room(seen):
                seen = self._settled
                replies = together(replies, await self._ask(state, n))
            return replies

    async def _ask(self, state: FrozenState, n: int) -> list[TeacherReply]:
        if self._stopping:
            await self.idle()  # whoever gives up at this must not take paid answers down with it
            raise Stopped
        self._asking += 1
        try:
            replies = await self._panel.ask(state, n)
        finally:
            self._asking -= 1
            self._tell()
        self._settled += any(_was_paid(reply) for reply in replies)
        return replies

    async def _room(self, seen: int) -> bool:
        """Whether a paid request was settled since; waits while that may still come."""
        while self._settled == seen and self._asking and not self._stopping:
            await self._changed.wait()
        return self._settled != seen or self._stopping

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def is_short(replies: Sequence[TeacherReply]) -> bool:
    """Whether a teacher was not asked because of the budget."""
    return any(
        isinstance(reply, TeacherFailure) and reply.kind is FailureKind.BUDGET for reply in replies
    )


def together(earlier: Sequence[TeacherReply], later: Sequence[TeacherReply]) -> list[TeacherReply]:
    """Both rounds as one: an answer stays, a failure gives way to what came of asking again."""
    again = {reply.teacher: reply for reply in later}
    return [_better(reply, again.get(reply.teacher, reply)) for reply in earlier]


def _better(earlier: TeacherReply, later: TeacherReply) -> TeacherReply:
    if isinstance(earlier, TeacherAnswer) or later is earlier:
        return earlier
    return replace(later, usd=earlier.usd + later.usd)


def _was_paid(reply: TeacherReply) -> bool:
    return isinstance(reply, TeacherAnswer) and reply.usd > 0
