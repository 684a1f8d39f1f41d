"""Where an offline replay asks its teachers: so many states at once, and patient.

A request sets its highest possible cost aside, which is mostly far more than it costs in the end.
So where a teacher was refused for the budget while paid requests are under way, the state waits
for those to be settled and asks again; it is final when nothing under way could make room. And
where a teacher is left alone because it failed too often, the state waits a rest and asks again; a
teacher that was waited for `RESTS` times in a row without an answer is no longer. Answers that a
state has are kept. Which states are asked about is not decided here.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from composer_mesh.rollouts.pairs import (
    FailureKind,
    FrozenState,
    TeacherAnswer,
    TeacherFailure,
    TeacherReply,
)

RESTS = 3
BY_A_PERSON = (FailureKind.AUTH, FailureKind.PAYMENT)
"""Failures that no rest repairs."""


class Asked(Protocol):
    """Who answers; in truth a `TeacherPanel`."""

    async def ask(self, state: FrozenState, n: int) -> list[TeacherReply]: ...


class Stopped(Exception):
    """The desk was told to stop before this state had its answers."""


class TeacherClient:
    """A `Teachers` port. Belongs to one event loop. `rest_s` is a suspended teacher's rest."""

    def __init__(self, panel: Asked, concurrency: int, rest_s: float) -> None:
        self._panel, self._slots = panel, asyncio.Semaphore(concurrency)
        self._rests = _Rests(rest_s)
        self._stopping = asyncio.Event()
        self._asking = self._settled = 0
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Ask nothing new; what is under way is answered still, and only then others give up."""
        self._stopping.set()
        self._tell()

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        while self._asking:
            await self._changed.wait()

    async def query(self, state: FrozenState, n: int) -> list[TeacherReply]:
        """The replies of `n` teachers. Waits for a slot, for them, for money and for rests.

        Raises `Stopped` where the desk stopped first.
        """
        async with self._slots:
            seen, replies = self._settled, await self._ask(state, n)
            while await self._may_ask_again(replies, seen):
                seen = self._settled
                replies = together(replies, await self._ask(state, n))
            return replies

    async def _ask(self, state: FrozenState, n: int) -> list[TeacherReply]:
        if self._stopping.is_set():
            await self.idle()  # whoever gives up at this must not take paid answers down with it
            raise Stopped
        self._asking += 1
        try:
            replies = await self._panel.ask(state, n)
        finally:
            self._asking -= 1
            self._tell()
        self._settled += any(_was_paid(reply) for reply in replies)
        self._rests.answered(replies)
        return replies

    async def _may_ask_again(self, replies: Sequence[TeacherReply], seen: int) -> bool:
        """Wait for whatever a refused teacher was refused for; False where nothing helps."""
        if is_short(replies) and await self._room(seen):
            return True
        return await self._rests.over(_refused(replies, FailureKind.SUSPENDED), self._stopping)

    async def _room(self, seen: int) -> bool:
        """Whether a paid request was settled since; waits while that may still come."""
        while self._settled == seen and self._asking and not self._stopping.is_set():
            await self._changed.wait()
        return self._settled != seen or self._stopping.is_set()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _Rests:
    """How often each suspended teacher was waited for in vain; all states count together."""

    def __init__(self, rest_s: float) -> None:
        self._rest_s = rest_s
        self._in_vain: Counter[str] = Counter()
        self._counted: dict[str, float] = {}

    def answered(self, replies: Sequence[TeacherReply]) -> None:
        """Learn whom it is worth waiting for."""
        for reply in replies:
            if isinstance(reply, TeacherFailure):
                if reply.kind in BY_A_PERSON:
                    self._in_vain[reply.teacher] = RESTS
            elif not reply.cached:
                self._in_vain.pop(reply.teacher, None)

    async def over(self, teachers: Sequence[str], stopping: asyncio.Event) -> bool:
        """Wait one rest, or until the desk stops; False where there is nobody to wait for."""
        hopeful = [teacher for teacher in teachers if self._in_vain[teacher] < RESTS]
        if not hopeful:
            return False
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), self._rest_s)
        now = asyncio.get_running_loop().time()
        for teacher in hopeful:
            if now - self._counted.get(teacher, -self._rest_s) >= self._rest_s:
                self._in_vain[teacher] += 1
                self._counted[teacher] = now
        return True


def is_short(replies: Sequence[TeacherReply]) -> bool:
    """Whether a teacher was not asked because of the budget."""
    return bool(_refused(replies, FailureKind.BUDGET))


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


def _refused(replies: Sequence[TeacherReply], kind: FailureKind) -> list[str]:
    return [
        reply.teacher
        for reply in replies
        if isinstance(reply, TeacherFailure) and reply.kind is kind
    ]
