"""Whatever sequence of requests agents send, their sessions stay apart and their ids are right."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agent_templates import FAMILIES
from chat_templates import with_template
from fuzzed_agents import MARKS, PARTS, FuzzedAgent, RandomGeneration

from composer_mesh.actors.models.policy import build_tokenizer
from composer_mesh.rollouts.captured_episode import CaptureFormat
from composer_mesh.rollouts.chat import ChatFormat

FORMATS = list(FAMILIES)


@pytest.fixture(scope="module")
def formats() -> list[CaptureFormat]:
    tokenizer: Any = build_tokenizer(["user assistant system tool red blue add result"] * 40, 320)
    own = [with_template(tokenizer, FAMILIES[name]) for name in FORMATS]
    return [CaptureFormat.of(ChatFormat(one, []), len(one)) for one in own]


async def test_no_sequence_of_requests_mixes_sessions_or_trains_what_was_not_sampled(
    formats: list[CaptureFormat], cases: Callable[[int], Iterator[int]]
) -> None:
    seen: Counter[str] = Counter()
    for seed in cases(250):  # two sessions at once
        format = formats[seed % len(formats)]
        generation = RandomGeneration(format.chat, random.Random(seed))
        agents = [FuzzedAgent(format, generation, session, seed) for session in range(2)]
        await asyncio.gather(*(agent.play() for agent in agents))
        for session, agent in enumerate(agents):
            seen += check(seed, format, generation, session, agent)
    for what in ("branches", "shared turns", "continued", "not received", "cut", "other"):
        assert seen[what] > 25, seen


def check(
    seed: int,
    format: CaptureFormat,
    generation: RandomGeneration,
    session: int,
    agent: FuzzedAgent,
) -> Counter[str]:
    """Compare what was captured with what was sampled and received."""
    trained: Counter[int] = Counter()
    seen: Counter[str] = Counter()
    found = [(part, one) for part in set(PARTS) for one in agent.episode.trajectories(part)]
    assert len(found) == len(agent.episode.trajectories()), seed
    for part, trajectory in found:
        ids: list[int] = []
        for turn, counts in zip(trajectory.turns, trajectory.trained, strict=True):
            number = int(-turn.logprobs[0])
            request, result = generation.requests[number], generation.results[number]
            ids += turn.context_ids
            assert request.prompt_ids == ids, (seed, number)
            assert turn.action_ids == result.token_ids[: len(turn.action_ids)], (seed, number)
            assert turn.logprobs == result.logprobs[: len(turn.action_ids)], (seed, number)
            assert int(request.request_id.split("-")[1]) == session, (seed, number)
            ids += turn.action_ids
            trained[number] += counts
            assert agent.got[number] == part, (seed, number)
            seen["shared turns"] += not counts
            seen["cut"] += len(turn.action_ids) < len(result.token_ids)
        said = format.chat.tokenizer.decode(ids)
        assert MARKS[1 - session] not in said, seed
        seen["continued"] += len(trajectory.turns) > 1
        seen["other"] += part == "other"
    assert trained == Counter(list(agent.got)), seed
    mine = [r for r in generation.requests if int(r.request_id.split("-")[1]) == session]
    seen["not received"] += len(mine) - len(agent.got)
    seen["branches"] += len(found) > 1
    return seen
