"""Requests of one episode: which are the same one, and which are sampled anew."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agent_templates import FAMILIES
from chat_templates import with_template
from scripted_generation import ScriptedGeneration, a_sample

from composer_mesh.actors.rollout_workers import agent_episode
from composer_mesh.actors.rollout_workers.agent_episode import (
    AgentEpisode,
    Ask,
    ChatQuestion,
    EpisodeEnded,
    Exchange,
    TooManyTurns,
)
from composer_mesh.rollouts.captured_episode import CaptureFormat
from composer_mesh.rollouts.chat import ChatFormat

ASK = Ask([ChatQuestion([{"role": "user", "content": "q"}], [])])


@pytest.fixture(scope="module")
def chat(tokenizer: Any) -> ChatFormat:
    return ChatFormat(with_template(tokenizer, FAMILIES["qwen"]), [])


@pytest.fixture
def generation(chat: ChatFormat) -> ScriptedGeneration:
    return ScriptedGeneration(chat, "one", "two", "three")


def an_episode(chat: ChatFormat, generation: Any, retry_wait_s: float = 600.0) -> AgentEpisode:
    sample = a_sample()
    return AgentEpisode(
        CaptureFormat.of(chat, 500), generation, sample, sample.sampling, retry_wait_s
    )


def said(exchange: Exchange) -> list[str]:
    return [turn.answer["content"] for turn in exchange.turns]


async def lost(episode: AgentEpisode, generation: ScriptedGeneration) -> None:
    """A request whose connection is lost while it is sampled."""
    generation.open.clear()
    asking = asyncio.create_task(episode.answer(ASK, b"k", False))
    await generation.asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_request_that_follows_a_lost_connection_joins_its_sampling(
    chat: ChatFormat, generation: ScriptedGeneration
) -> None:
    episode = an_episode(chat, generation)
    await lost(episode, generation)
    generation.open.set()
    exchange = await episode.answer(ASK, b"k", False)
    episode.release(exchange, sent=True)
    assert said(exchange) == ["one"]
    assert len(generation.requests) == 1


async def test_an_answer_that_could_not_be_sent_is_kept_for_the_next_request(
    chat: ChatFormat, generation: ScriptedGeneration
) -> None:
    episode = an_episode(chat, generation)
    first = await episode.answer(ASK, b"k", False)
    episode.release(first, sent=False)
    assert episode.trajectories() == []
    assert await episode.answer(ASK, b"k", False) is first
    episode.release(first, sent=True)
    assert len(episode.trajectories()) == 1


async def test_a_retry_gets_an_answer_that_was_sent_too(
    chat: ChatFormat, generation: ScriptedGeneration
) -> None:
    episode = an_episode(chat, generation)
    first = await episode.answer(ASK, b"k", False)
    episode.release(first, sent=True)
    assert await episode.answer(ASK, b"k", True) is first
    assert said(await episode.answer(ASK, b"other", True)) == ["two"]


async def test_equal_requests_at_the_same_time_are_two_samples(
    chat: ChatFormat, generation: ScriptedGeneration
) -> None:
    episode = an_episode(chat, generation)
    found = await asyncio.gather(*(episode.answer(ASK, b"k", False) for _ in range(2)))
    assert [said(one) for one in found] == [["one"], ["two"]]
    assert [one.trained for one in episode.trajectories()] == [[True], [True]]


async def test_without_a_retry_a_lost_request_is_given_up(
    chat: ChatFormat, generation: ScriptedGeneration
) -> None:
    episode = an_episode(chat, generation, retry_wait_s=0)
    await lost(episode, generation)
    await generation.gave_up.wait()
    generation.open.set()
    assert said(await episode.answer(ASK, b"k", True)) == ["one"]
    assert len(generation.requests) == 2


async def test_a_closed_episode_samples_nothing_more(
    chat: ChatFormat, generation: ScriptedGeneration
) -> None:
    episode = an_episode(chat, generation)
    generation.open.clear()
    asking = asyncio.create_task(episode.answer(ASK, b"k", False))
    await generation.asked.wait()
    await episode.close()
    with pytest.raises(EpisodeEnded):
        await asking
    with pytest.raises(EpisodeEnded):
        await episode.answer(ASK, b"k", False)
    assert generation.cancelled == ["train-000000-000-00"]


async def test_one_failed_answer_of_several_ends_the_others(
    chat: ChatFormat, generation: ScriptedGeneration
) -> None:
    generation.texts[1:] = [RuntimeError("no generator"), "three"]
    episode = an_episode(chat, generation)
    with pytest.raises(RuntimeError, match="no generator"):
        await episode.answer(Ask(ASK.questions, n=3), b"k", False)
    assert episode.trajectories() == []
    assert len(episode.failures()) == 1


async def test_an_episode_asks_for_a_bounded_number_of_answers(
    chat: ChatFormat, generation: ScriptedGeneration
) -> None:
    episode = an_episode(chat, generation)
    with pytest.raises(TooManyTurns, match="may ask for 4096"):
        await episode.answer(Ask(ASK.questions, n=agent_episode.MOST_TURNS + 1), b"k", False)
    assert generation.requests == []
