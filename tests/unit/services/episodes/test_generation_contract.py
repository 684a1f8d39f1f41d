"""Every implementation of the port `Generation` keeps its contract: the fake, and a worker's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from controller_world import World
from in_process_calls import peers

from composer_mesh.actors.generator import GeneratorActor
from composer_mesh.actors.rollout_workers.peers import LockstepGeneration, PooledGeneration, Round
from composer_mesh.mesh.actor import own_endpoint
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Generation
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.tasks.toolbox import ToolboxTask

PROMPT = [5, 6, 7]
LONGEST = 4
Begin = Callable[[int], Awaitable[None]]


class Harness:
    """Generation at version 0; `begin` opens the session that a fake's request belongs to."""

    def __init__(self, port: Generation, begin: Begin) -> None:
        self.port, self._begin = port, begin
        self.playing: set[str] = set()

    async def requests(self, count: int) -> list[GenerationRequest]:
        for number in range(count):
            await self._begin(number)
        return [
            GenerationRequest(f"{session(number)}-000", PROMPT, LONGEST, 1.0, number, [])
            for number in range(count)
        ]

    def start(self, requests: Sequence[GenerationRequest]) -> list[asyncio.Task[GenerationResult]]:
        """Make requests beside each other."""
        self.playing.update(request.request_id for request in requests)
        return [asyncio.create_task(self._play(request)) for request in requests]

    async def _play(self, request: GenerationRequest) -> GenerationResult:
        try:
            return await self.port.generate(request, "train-000000")
        finally:
            self.playing.discard(request.request_id)
            if isinstance(self.port, LockstepGeneration):
                self.port.changed()


def session(number: int) -> str:
    return f"train-000000-{number:03d}"


def of_the_controller(task: ToolboxTask, tokenizer: Any) -> Harness:
    world = World(task, ChatFormat(tokenizer, task.tools))

    async def begin(number: int) -> None:
        await world.begin(session(number), task.episode("train", 0))

    return Harness(world, begin)


async def nothing(_: int) -> None:
    """A generator needs no session."""


@pytest.fixture(params=["of the controller's world", "PooledGeneration", "LockstepGeneration"])
async def harness(
    request: Any, tokenizer: Any, toolbox: ToolboxTask, build_config: Any, policy_folder: Path
) -> AsyncIterator[Harness]:
    if request.param == "of the controller's world":
        yield of_the_controller(toolbox, tokenizer)
        return
    actors = {f"generator-{n}": GeneratorActor() for n in range(2)}
    for actor in actors.values():
        await own_endpoint(actor, "load")(build_config(), policy_folder)
    if request.param == "PooledGeneration":
        yield Harness(PooledGeneration(peers(actors), 2), nothing)
    else:
        playing: set[str] = set()
        port = LockstepGeneration(peers(actors), lambda: len(playing))
        harness = Harness(port, nothing)
        harness.playing = playing
        releasing = asyncio.create_task(release_all(port))
        yield harness
        await cancel_and_wait([releasing])
        await port.close()
    for actor in actors.values():
        await actor.__cleanup__(None)


async def release_all(port: LockstepGeneration) -> None:
    """Release every round, divided among two generators."""
    for number in count():
        names = await port.waiting()
        shares = {f"generator-{n}": names[n::2] for n in range(2) if names[n::2]}
        port.release(Round(number, number > 0, shares))


async def test_a_result_has_a_log_prob_and_a_version_for_each_id(harness: Harness) -> None:
    requests = await harness.requests(1)
    (result,) = await asyncio.gather(*harness.start(requests))
    assert 1 <= len(result.token_ids) <= LONGEST
    assert len(result.logprobs) == len(result.versions) == len(result.token_ids)
    assert max(result.logprobs) <= 0.0
    assert set(result.versions) == {0}
    assert result.stop_reason != "length" or len(result.token_ids) == LONGEST


async def test_requests_beside_each_other_get_their_own_results(harness: Harness) -> None:
    requests = await harness.requests(5)
    results = await asyncio.gather(*harness.start(requests))
    assert [one.request_id for one in results] == [one.request_id for one in requests]


async def test_equal_requests_have_equal_ids(harness: Harness) -> None:
    requests = await harness.requests(3)
    first, again = [await asyncio.gather(*harness.start(requests)) for _ in range(2)]
    assert [one.token_ids for one in first] == [one.token_ids for one in again]


async def test_an_episode_that_is_cancelled_holds_no_other_up(harness: Harness) -> None:
    requests = await harness.requests(4)
    playing = harness.start(requests)
    await asyncio.sleep(0)
    playing[1].cancel()
    results = await asyncio.gather(*playing, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    others = [results[place] for place in (0, 2, 3)]
    assert all(isinstance(one, GenerationResult) for one in others)
