"""The rollout actor as a whole: what it holds of others ends with it.

Questions of an environment to judge actors, which may die, fail or be spent.

Sticky routing: a request goes where its prefix is, unless that generator is far busier.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_host import turns
from in_process_calls import open_in_process

from composer_mesh import JudgeFailed, JudgeQuestion, JudgesSpent
from composer_mesh.actors.rollout_workers.peers import (
    FACTOR,
    SLACK,
    Neighbours,
    OpenStream,
    Peer,
    PeerJudges,
    StickyRouting,
)
from composer_mesh.actors.rollouts import RolloutActor
from composer_mesh.mesh.actor import own_endpoint
from composer_mesh.mesh.supervision import ActorDied, SessionLost
from composer_mesh.rollouts.episode import Sample, Sampling
from composer_mesh.rollouts.pairs import FailureKind, TeacherAnswer, TeacherFailure, TeacherReply
from composer_mesh.rollouts.tasks import Episode


class InProcessRolloutActor(RolloutActor):
    def open_stream(self, name: str) -> OpenStream:
        return open_in_process(name)


class HangingEnvironment:
    """An environment that opens no session; `cancelled` once the call for one has ended."""

    def __init__(self) -> None:
        self.called, self.cancelled = asyncio.Event(), asyncio.Event()

    async def begin(self, *_: Any) -> Any:
        self.called.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def forget(self, *_: Any) -> None: ...


@pytest.mark.parametrize("max_lag", [0, 1])
async def test_a_worker_that_ends_leaves_no_call_open(
    build_config: Any, tokenizer: Any, toolbox: Any, tmp_path: Any, max_lag: int
) -> None:
    tokenizer.save_pretrained(tmp_path)
    actor, environment = InProcessRolloutActor(), HangingEnvironment()
    config = build_config(schedule={"max_lag": max_lag})
    await own_endpoint(actor, "load")(config, tmp_path, {"toolbox": toolbox.tools})
    neighbours = Neighbours((), (Peer("environment-0", environment),), {})
    await own_endpoint(actor, "connect")("rollouts-0", neighbours)
    sample = Sample(Episode("toolbox", "train", 0, {}), 0, 0, Sampling.training(config))
    playing = asyncio.create_task(own_endpoint(actor, "play")(sample, "session"))
    await environment.called.wait()
    await actor.__cleanup__(None)
    with pytest.raises(SessionLost, match="the connection to it was closed"):
        await playing
    await turns()
    assert environment.cancelled.is_set()


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


NAMES = ["g-0", "g-1", "g-2"]


def routing() -> tuple[StickyRouting, Counter[str]]:
    load: Counter[str] = Counter()
    made = StickyRouting(load.__getitem__)
    made.begin("a")
    return made, load


def test_a_group_stays_with_the_least_busy_generator_that_it_began_at() -> None:
    made, load = routing()
    load.update({"g-0": 3, "g-1": 1, "g-2": 2})
    assert made.take("a", "a-0", NAMES) == "g-1"
    load["g-1"] = 9
    assert made.take("a", "a-1", NAMES) == "g-1"
    assert made.take("b", "b-0", NAMES) == "g-2"


@pytest.mark.parametrize("least", [0, 1, 7])
def test_a_request_leaves_a_generator_only_beyond_the_stated_bound(least: int) -> None:
    made, load = routing()
    assert made.take("a", "a-0", NAMES) == "g-0"
    load.update(dict.fromkeys(NAMES, least))
    load["g-0"] = FACTOR * least + SLACK
    assert made.take("a", "a-0", NAMES) == "g-0"
    load["g-0"] += 1
    assert made.take("a", "a-0", NAMES) == "g-1"
    load["g-0"] = 0
    assert made.take("a", "a-0", NAMES) == "g-1"  # its newest prefix is there
    assert made.take("a", "a-1", NAMES) == "g-1"  # and its group's


def test_an_episode_leaves_a_generator_that_is_gone() -> None:
    made, load = routing()
    assert made.take("a", "a-0", NAMES) == "g-0"
    load.update({"g-1": 1})
    assert made.take("a", "a-0", ["g-1", "g-2"]) == "g-2"


def test_nothing_is_kept_of_a_group_whose_episodes_have_ended() -> None:
    made, load = routing()
    made.begin("a")
    made.take("a", "a-0", NAMES)
    made.take("a", "a-1", NAMES)
    made.end("a", "a-0")
    load["g-0"] = 5
    assert made.take("a", "a-1", NAMES) == "g-0"
    made.end("a", "a-1")
    assert [made._groups, made._episodes, made._members] == [{}, {}, {}]
