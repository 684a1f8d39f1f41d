"""A call to an environment that is late is waited for while its task waits for another service."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from composer_mesh.actors.rollout_workers.peers import PeerEnvironments
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.tasks.calls import TaskCalls, waiting_for_others, waits_for_others


class LateActor:
    """Answers a call once it was asked as often as it has `answers` whether it waits."""

    def __init__(self, *answers: bool | Exception) -> None:
        self._answers, self._done = list(answers), asyncio.Event()
        self.cancelled = 0

    async def call(self, name: str, endpoint: str, *_: Any) -> Any:
        if endpoint == "waits":
            answer = self._answers.pop(0)
            if not self._answers:
                self._done.set()
            if isinstance(answer, Exception):
                raise answer
            return answer
        try:
            await self._done.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return f"{endpoint} of {name}"

    async def some_open(self) -> list[str]:
        return ["environment-0"]

    def load(self, _: str) -> int:
        return 0


def environments(actor: LateActor) -> PeerEnvironments:
    return PeerEnvironments(actor, 0.001)  # type: ignore[arg-type]


async def test_a_late_call_that_waits_for_others_is_answered() -> None:
    actor = LateActor(True, True, True)
    assert await environments(actor)._anywhere("score") == "score of environment-0"
    assert actor.cancelled == 0


@pytest.mark.parametrize(
    "last", [False, ActorDied("environment-0", "Killed(sig=9)"), TimeoutError()]
)
async def test_a_late_call_that_waits_for_nothing_is_ended(last: bool | Exception) -> None:
    actor = LateActor(True, last, True)
    with pytest.raises(DeadlineExceeded):
        await environments(actor)._anywhere("score")
    assert actor.cancelled == 1


async def test_a_process_knows_whether_its_calls_wait_for_others() -> None:
    seen = []

    async def call() -> None:
        with waiting_for_others(), waiting_for_others():
            seen.append(waits_for_others())
        seen.append(waits_for_others())

    await TaskCalls(limit_s=10)("call", call)
    await call()
    assert seen == [True, False, True, False]


class Actors:
    """Three equal actors, of which one fails."""

    def __init__(self, failing: str, *names: str) -> None:
        self._failing, self._names = failing, names

    async def call(self, name: str, endpoint: str, session: str, *_: Any) -> Any:
        if name == self._failing and endpoint == "begin":
            raise RuntimeError(f"{name} has no disk")
        return name

    async def some_open(self) -> list[str]:
        return list(self._names)

    def load(self, _: str) -> int:
        return 0

    def __contains__(self, _: str) -> bool:
        return True


async def test_an_attempt_after_a_failed_one_is_made_elsewhere() -> None:
    episode = Episode("task", "train", 0)
    port = PeerEnvironments(Actors("a", "a", "b", "c"), 60.0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no disk"):
        await port.begin("train-1", episode)
    port.abandon("train-1")
    assert await port.begin("train-1.2", episode) == "b"
    await port.finish("train-1.2")
    with pytest.raises(RuntimeError, match="no disk"):  # another sample knows nothing of it
        await port.begin("train-2", episode)
    await port.close()


async def test_an_attempt_is_made_on_the_only_actor_that_there_is() -> None:
    port = PeerEnvironments(Actors("", "a"), 60.0)  # type: ignore[arg-type]
    for session in ("train-1", "train-1.2"):
        assert await port.begin(session, Episode("task", "train", 0)) == "a"
        port.abandon(session)
    await port.close()
