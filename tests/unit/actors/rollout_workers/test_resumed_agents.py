"""Episodes of agents whose rollout worker dies continue on another one, answer by answer."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from agent_templates import FAMILIES
from chat_templates import with_template
from scripted_generation import ADD, ScriptedGeneration, a_sample

from composer_mesh.actors.rollout_workers.agent_endpoint import AgentEndpoint
from composer_mesh.actors.rollout_workers.agent_episode import (
    AgentEpisode,
    AnswerLog,
    AnswerLost,
    Ask,
    ChatQuestion,
    TextQuestion,
)
from composer_mesh.rollouts.captured_episode import CaptureFormat
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import EpisodeRecord
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import Message

SAMPLE = a_sample(max_context=20_000)
KEYS = b"TOKEN KEY"
SYSTEM: Message = {"role": "system", "content": "be brief"}
QUESTION: Message = {"role": "user", "content": "what is 2 + 3?"}
TITLE: Message = {"role": "user", "content": "a title"}


async def loop_turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def format(tokenizer: Any) -> CaptureFormat:
    chat = ChatFormat(with_template(tokenizer, FAMILIES["qwen"]), [])
    return CaptureFormat.of(chat, len(chat.tokenizer))


class Sampler(ScriptedGeneration):
    """Answers by a request's number and seed, some loop turns later; never the `held` ones."""

    held: frozenset[str] = frozenset()

    async def generate(self, request: GenerationRequest, group: str) -> GenerationResult:
        self.requests.append(request)
        await loop_turns(3)
        if request.request_id in self.held:
            await asyncio.Event().wait()
        number = int(request.request_id.rpartition("-")[2])
        text = call_text("add", {"a": number}) if number % 2 else f"it is {request.seed % 97}"
        return self._result(request, self.chat.action(text))


@dataclass
class Record:
    """What an environment keeps, which hears of answers some loop turns later."""

    kept: EpisodeRecord = field(default_factory=lambda: EpisodeRecord([], agent=KEYS))

    def log(self, dead: asyncio.Event, continues: bool) -> AnswerLog:
        async def keep(answer: bytes) -> None:
            await loop_turns(2)
            if not dead.is_set():
                self.kept.turns.append(answer)
            await loop_turns(2)

        def sent(name: str, received: bool) -> None:
            self.kept.sent[name] = received

        return AnswerLog(keep, sent, deepcopy(self.kept) if continues else None)


Received = list[list[Message]]


def chat_of(*messages: Message, tools: Any = (), n: int = 1) -> Ask:
    return Ask([ChatQuestion(list(messages), list(tools))], n)


def result_of(answer: Message) -> Message:
    calls = answer.get("tool_calls") or [{"id": "none"}]
    return {"role": "tool", "tool_call_id": calls[0]["id"], "content": "5"}


def turn_2(got: Received) -> Ask:
    return chat_of(SYSTEM, QUESTION, got[0][0], TITLE, tools=[ADD])


def turn_3(got: Received) -> Ask:
    messages = turn_2(got).questions[0].messages  # type: ignore[union-attr]
    return chat_of(*messages, got[1][0], result_of(got[1][0]), tools=[ADD])


ASKED: list[Callable[[Received], Ask]] = [
    lambda _: chat_of(SYSTEM, QUESTION, tools=[ADD]),
    turn_2,
    turn_3,
    lambda _: chat_of(TITLE),  # without tools, beside the conversation
    lambda got: chat_of(SYSTEM, QUESTION, got[0][0], QUESTION, tools=[ADD]),  # a branch
    lambda _: chat_of(TITLE),  # equal to one before, and meant so
    lambda _: chat_of(TITLE, n=2),
    lambda _: Ask([TextQuestion("calcu")]),
    lambda got: Ask([TextQuestion(f"calcu{got[7][0]['content']}\nlator")]),
    lambda _: Ask([TextQuestion([1, 2, 3])], stops=("is",)),
]


@dataclass
class Program:
    """An agent that asks one after the other, and again what a dead worker has not answered."""

    received: Received = field(default_factory=list)

    async def play(self, episode: AgentEpisode) -> None:
        for number in range(len(self.received), len(ASKED)):
            ask = ASKED[number](self.received)
            key = hashlib.sha256(repr((ask.questions, ask.n)).encode()).digest()
            exchange = await episode.answer(ask, key, False)
            episode.release(exchange, sent=True)
            self.received.append([turn.answer for turn in exchange.turns])


async def a_worker(
    format: CaptureFormat, sampler: Sampler, record: Record, continues: bool = False
) -> tuple[AgentEpisode, asyncio.Event]:
    dead = asyncio.Event()
    log = record.log(dead, continues)
    episode = AgentEpisode(format, sampler, SAMPLE, SAMPLE.sampling, 600.0, log)
    if log.record is not None:
        await episode.restore(log.record)
    return episode, dead


async def undisturbed(format: CaptureFormat) -> tuple[AgentEpisode, Program, Sampler, int]:
    sampler, program, number = Sampler(format.chat), Program(), 0
    episode, _ = await a_worker(format, sampler, Record())
    playing = asyncio.create_task(program.play(episode))
    while not playing.done():
        await asyncio.sleep(0)
        number += 1
    await playing
    return episode, program, sampler, number


def requests_of(sampler: Sampler) -> dict[str, tuple[list[int], int]]:
    return {one.request_id: (list(one.prompt_ids), one.seed) for one in sampler.requests}


async def test_an_agents_episode_is_the_undisturbed_one_wherever_its_workers_die(
    format: CaptureFormat,
) -> None:
    """At each turn of the loop: between answers, in a generation, before and after the record."""
    calm, calm_program, calm_sampler, length = await undisturbed(format)
    continued = set()
    for first in range(length):
        sampler, program, record = Sampler(format.chat), Program(), Record()
        for moment in (first, 3 * first % length):
            episode, dead = await a_worker(format, sampler, record, continues=True)
            playing = asyncio.create_task(program.play(episode))
            await loop_turns(moment)
            dead.set()
            playing.cancel()
            with suppress(asyncio.CancelledError):
                await playing
            await episode.close()
            continued.add(len(record.kept.turns))
        recorded = len(record.kept.turns)
        episode, _ = await a_worker(format, sampler, record, continues=True)
        before = len(sampler.requests)
        await program.play(episode)
        assert program.received == calm_program.received
        assert episode.trajectories() == calm.trajectories()
        assert episode.tokens == calm.tokens
        assert requests_of(sampler) == requests_of(calm_sampler)
        again = [one.request_id for one in sampler.requests[before:]]
        assert len(again) == len(set(again))
        assert len(record.kept.turns) == len(ASKED)
        assert len(again) <= len(calm_sampler.requests) - recorded  # nothing recorded is paid twice
    assert continued == set(range(len(ASKED) + 1))


async def answered(episode: AgentEpisode, ask: Ask, key: bytes, sent: bool = True) -> list[str]:
    exchange = await episode.answer(ask, key, False)
    episode.release(exchange, sent)
    return [str(turn.answer["content"]) for turn in exchange.turns]


async def test_an_answer_that_was_being_sent_is_given_to_an_equal_request_once(
    format: CaptureFormat,
) -> None:
    sampler, record = Sampler(format.chat), Record()
    episode, _ = await a_worker(format, sampler, record)
    await episode.answer(chat_of(TITLE), b"key", False)  # never released: its worker dies
    (first,) = sampler.results
    restored, _ = await a_worker(format, sampler, record, continues=True)
    assert restored.trajectories() == episode.trajectories()
    said = await answered(restored, chat_of(TITLE), b"key")
    assert sampler.results == [first]
    assert await answered(restored, chat_of(TITLE), b"key") != said
    assert len(sampler.results) == 2


async def test_an_answer_whose_connection_was_lost_is_in_no_trajectory_of_another_worker(
    format: CaptureFormat,
) -> None:
    sampler, record = Sampler(format.chat), Record()
    episode, _ = await a_worker(format, sampler, record)
    await answered(episode, chat_of(TITLE), b"key", sent=False)
    await answered(episode, chat_of(QUESTION), b"other")
    restored, _ = await a_worker(format, sampler, record, continues=True)
    assert len(restored.trajectories()) == 1
    assert restored.trajectories() == episode.trajectories()


async def test_a_failure_that_no_retry_has_mended_is_one_on_another_worker(
    format: CaptureFormat,
) -> None:
    record = Record()
    failing = ScriptedGeneration(format.chat, ConnectionError("generator lost"), "mended")
    episode, _ = await a_worker(format, failing, record)
    with pytest.raises(ConnectionError):
        await episode.answer(chat_of(TITLE), b"key", False)
    restored, _ = await a_worker(format, failing, record, continues=True)
    (failure,) = restored.failures()
    assert isinstance(failure, AnswerLost)
    assert str(failure) == "ConnectionError: generator lost"
    assert await answered(restored, chat_of(TITLE), b"key") == ["mended"]
    assert restored.failures() == []
    again, _ = await a_worker(format, failing, record, continues=True)
    assert again.failures() == []


async def test_the_request_that_was_not_answered_gets_its_number_again(
    format: CaptureFormat,
) -> None:
    sampler, record = Sampler(format.chat), Record()
    episode, dead = await a_worker(format, sampler, record)
    sampler.held = frozenset({f"{SAMPLE.trace_id}-00"})
    lost = asyncio.create_task(episode.answer(chat_of(QUESTION), b"first", False))
    await loop_turns(2)
    await answered(episode, chat_of(TITLE), b"second")
    dead.set()
    await episode.close()
    await asyncio.wait([lost])
    sampler.held = frozenset()
    restored, _ = await a_worker(format, sampler, record, continues=True)
    await answered(restored, chat_of(QUESTION), b"first")
    await answered(restored, chat_of(QUESTION, n=2), b"third")
    numbers = [int(one.request_id.rpartition("-")[2]) for one in sampler.requests]
    assert numbers == [0, 1, 0, 2, 3]
    assert sampler.requests[0] == sampler.requests[2]


async def test_an_answer_that_is_given_up_while_it_is_recorded_takes_nothing_of_later_ones(
    format: CaptureFormat,
) -> None:
    sampler, record, recording = Sampler(format.chat), Record(), asyncio.Event()
    log = record.log(asyncio.Event(), False)
    keep = log.keep

    async def first_is_held(answer: bytes) -> None:
        if not recording.is_set():
            recording.set()
            await asyncio.Event().wait()
        await keep(answer)

    log.keep = first_is_held
    episode = AgentEpisode(format, sampler, SAMPLE, SAMPLE.sampling, 0.0, log)
    asking = asyncio.create_task(episode.answer(chat_of(QUESTION, tools=[ADD]), b"lost", False))
    await recording.wait()
    asking.cancel()
    await asyncio.wait([asking])
    await answered(episode, chat_of(QUESTION, tools=[ADD]), b"next")
    restored, _ = await a_worker(format, sampler, record, continues=True)
    assert restored.trajectories() == episode.trajectories()
    assert [one.tools for one in restored.trajectories()] == [[ADD]]


async def test_tools_are_recorded_once_and_ids_of_a_prompt_never_again(
    format: CaptureFormat,
) -> None:
    sampler, record = Sampler(format.chat), Record()
    tools = [{**ADD, "function": {**ADD["function"], "description": "long " * 2000}}]  # type: ignore[dict-item]
    episode, _ = await a_worker(format, sampler, record)
    messages: list[Message] = [QUESTION]
    for number in range(3):
        ask = chat_of(*messages, tools=tools)
        exchange = await episode.answer(ask, bytes([number]), False)
        episode.release(exchange, True)
        messages += [exchange.turns[0].answer, result_of(exchange.turns[0].answer)]
    first, *others = map(len, record.kept.turns)
    assert first > 10_000
    assert max(others) < 2_000


@asynccontextmanager
async def served(
    format: CaptureFormat, sampler: Sampler, record: Record, continues: bool
) -> AsyncIterator[tuple[AgentEpisode, openai.AsyncOpenAI, AnswerLog]]:
    log = record.log(asyncio.Event(), continues)
    serving = AgentEndpoint(sampler, format.chat, 500)
    async with serving as endpoint, endpoint.episode(SAMPLE, SAMPLE.sampling, log) as episode:
        url, key = episode.base_url, episode.api_key
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            yield episode, client, log


async def test_another_worker_serves_the_same_keys_and_the_responses_that_were_named(
    format: CaptureFormat,
) -> None:
    sampler, record = Sampler(format.chat), Record()
    async with served(format, sampler, record, False) as (episode, client, log):
        record.kept.agent, path = log.agent, httpx.URL(episode.base_url).path
        first = await client.responses.create(model="m", instructions="be brief", input="2 + 3?")
    async with served(format, sampler, record, True) as (episode, client, log):
        assert (log.agent, httpx.URL(episode.base_url).path) == (record.kept.agent, path)
        await client.responses.create(
            model="m", instructions="be short", previous_response_id=first.id, input="sure?"
        )
        prompt = format.chat.tokenizer.decode(sampler.requests[-1].prompt_ids)
        assert ("be brief" in prompt, "be short" in prompt, "2 + 3?" in prompt) == (
            *(False, True, True),
        )
