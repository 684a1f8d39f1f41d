"""Questions of an environment to judge actors, which may die, fail or be spent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from in_process_calls import open_in_process

from composer_mesh import JudgeFailed, JudgeQuestion, JudgesSpent
from composer_mesh.actors.rollout_workers.peers import Peer, PeerJudges
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.rollouts.pairs import FailureKind, TeacherAnswer, TeacherFailure, TeacherReply

QUESTION = JudgeQuestion("quality", [{"role": "user", "content": "good?"}], {})
ANSWER = TeacherAnswer("quality", "yes", {}, 0.001, True, 0.1)


@dataclass
class Actor:
    """The endpoint of a judge actor."""

    reply: TeacherReply | Exception
    asked: list[str] = field(default_factory=list)

    async def ask(self, judge: str, messages: list[Any]) -> TeacherReply:
        self.asked.append(judge)
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


async def answer_of(*actors: Actor) -> Any:
    """Ask as a task does: on another event loop than the actor's own."""
    judges = PeerJudges(open_in_process("environment-0"), 30.0)
    asking = asyncio.create_task(asyncio.to_thread(asyncio.run, judges.ask(QUESTION)))
    peers = tuple(Peer(f"judge-{number}", one) for number, one in enumerate(actors))
    judges.connect(peers, {})
    try:
        return await asking
    finally:
        await judges.close()


async def test_a_question_waits_for_an_actor_and_is_answered_on_the_loop_of_the_task() -> None:
    reply = await answer_of(Actor(ANSWER))
    assert (reply.text, reply.usd, reply.cached) == ("yes", 0.001, False)


async def test_a_failure_is_no_answer_and_a_ceiling_is_told_apart() -> None:
    failed = TeacherFailure("quality", FailureKind.SERVER, "judge 'quality': status 500", 0.1)
    with pytest.raises(JudgeFailed, match="status 500"):
        await answer_of(Actor(failed))
    spent = TeacherFailure("quality", FailureKind.BUDGET, "raise judges.budget.usd", 0.1)
    with pytest.raises(JudgesSpent, match=r"raise judges\.budget\.usd"):
        await answer_of(Actor(spent))


async def test_a_question_that_ends_its_actors_is_given_up() -> None:
    actor = Actor(ActorDied("judge-0", "Killed(sig=9)"))
    with pytest.raises(JudgeFailed, match=r"3 judge actors died of it.*Killed"):
        await answer_of(actor)
    assert len(actor.asked) == 3
