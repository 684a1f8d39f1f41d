"""Lockstep: a batch is closed by the episodes under way, never by time."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.services.episodes.generation import LockstepGeneration
from composer_mesh.services.service import Service


class FakeGenerators:
    """Replicas that keep what they were sent; each answers with the request's own prompt.

    The replica at `broken` is gone; with `hopeless` none can stand in for it.
    """

    def __init__(
        self, replicas: int = 1, broken: int | None = None, hopeless: bool = False
    ) -> None:
        self.replicas, self.broken, self.hopeless = replicas, broken, hopeless
        self.batches: list[tuple[int, list[str]]] = []
        self.elsewhere: list[list[str]] = []

    def __len__(self) -> int:
        return self.replicas

    async def on(self, index: int, endpoint: str, requests: list[GenerationRequest]) -> Any:
        assert endpoint == "generate_many"
        self.batches.append((index, [request.request_id for request in requests]))
        await asyncio.sleep(0)
        if index == self.broken:
            raise ActorDied(f"generator-{index}", "gone")
        return self.answers(requests)

    async def generate_many(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        self.elsewhere.append([request.request_id for request in requests])
        await asyncio.sleep(0)
        if self.hopeless:
            raise ActorDied("generator-1", "none is left")
        return self.answers(requests)

    def answers(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        return [GenerationResult(r.request_id, r.prompt_ids, [0.0], [0], "stop") for r in requests]


def lockstep(generators: FakeGenerators) -> LockstepGeneration:
    return LockstepGeneration(cast(Service, generators))


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, [int(name.split("-")[0])], 4, 1.0, 0, [])


async def episode(generation: LockstepGeneration, live: Any, name: int, turns: int) -> list[str]:
    """An episode of several turns that dawdles between them."""
    rng, answers = random.Random(name), []
    with live:
        for turn in range(turns):
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
            result = await generation.generate(request(f"{name:02d}-{turn}"))
            assert result.token_ids == [name]
            answers.append(result.request_id)
    return answers


async def play(generators: FakeGenerators, turns: list[int]) -> list[list[str]]:
    generation = lockstep(generators)
    announced = [generation.episode() for _ in turns]
    return await asyncio.gather(
        *(episode(generation, live, n, turns[n]) for n, live in enumerate(announced))
    )


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_each_batch_holds_every_episode_under_way_in_the_order_of_ids(turns: list[int]) -> None:
    generators = FakeGenerators()
    answers = asyncio.run(play(generators, turns))
    expected = [
        [f"{name:02d}-{turn}" for name, count in enumerate(turns) if turn < count]
        for turn in range(max(turns))
    ]
    assert [batch for _, batch in generators.batches] == expected
    assert [len(answer) for answer in answers] == turns


async def test_a_batch_stays_open_while_an_announced_episode_has_not_asked() -> None:
    generators = FakeGenerators()
    generation = lockstep(generators)
    first, second = generation.episode(), generation.episode()
    early = asyncio.create_task(episode(generation, first, 1, 1))
    for _ in range(20):
        await asyncio.sleep(0)
    assert generators.batches == []
    await asyncio.gather(early, episode(generation, second, 2, 1))
    assert generators.batches == [(0, ["01-0", "02-0"])]


async def test_an_episode_that_ends_without_asking_lets_the_others_go_on() -> None:
    generators = FakeGenerators()
    generation = lockstep(generators)
    first, second = generation.episode(), generation.episode()
    waiting = asyncio.create_task(episode(generation, first, 1, 2))
    for _ in range(20):
        await asyncio.sleep(0)
    with second:
        pass
    assert await waiting == ["01-0", "01-1"]


async def test_an_episode_that_fails_lets_the_others_go_on() -> None:
    generators = FakeGenerators()
    generation = lockstep(generators)
    first, second = generation.episode(), generation.episode()

    async def fail() -> None:
        with second:
            raise OSError("the environment is gone")

    answers, failure = await asyncio.gather(
        episode(generation, first, 1, 2), fail(), return_exceptions=True
    )
    assert answers == ["01-0", "01-1"]
    assert isinstance(failure, OSError)


async def test_a_batch_is_dealt_out_over_the_replicas_in_turn() -> None:
    generators = FakeGenerators(replicas=3)
    await play(generators, [1] * 7)
    assert sorted(generators.batches) == [
        (0, ["00-0", "03-0", "06-0"]),
        (1, ["01-0", "04-0"]),
        (2, ["02-0", "05-0"]),
    ]


async def test_a_replica_without_a_share_is_not_called() -> None:
    generators = FakeGenerators(replicas=3)
    await play(generators, [1])
    assert generators.batches == [(0, ["00-0"])]


async def test_the_share_of_a_dead_generator_is_asked_again_anywhere() -> None:
    generators = FakeGenerators(replicas=2, broken=1)
    assert await play(generators, [1] * 4) == [[f"{n:02d}-0"] for n in range(4)]
    assert generators.elsewhere == [["01-0", "03-0"]]


async def test_an_error_of_the_last_generator_reaches_every_episode_of_its_share() -> None:
    generators = FakeGenerators(replicas=2, broken=1, hopeless=True)
    generation = lockstep(generators)
    lives = [generation.episode() for _ in range(4)]
    ended = await asyncio.gather(
        *(episode(generation, live, n, 1) for n, live in enumerate(lives)), return_exceptions=True
    )
    assert ended[0::2] == [["00-0"], ["02-0"]]
    for failure in ended[1::2]:
        assert isinstance(failure, ActorDied)
        assert failure.reason == "none is left"


async def test_an_episode_that_was_cancelled_does_not_hold_up_the_answers_of_others() -> None:
    generators = FakeGenerators()
    generation = lockstep(generators)
    first, second = generation.episode(), generation.episode()
    cancelled = asyncio.create_task(episode(generation, first, 1, 2))
    for _ in range(20):
        await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await episode(generation, second, 2, 3) == ["02-0", "02-1", "02-2"]
