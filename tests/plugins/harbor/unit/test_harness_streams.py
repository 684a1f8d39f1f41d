"""A stream to a harness is cut by the death of its rollout worker, and whole at the next one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from agent_templates import FAMILIES
from chat_templates import with_template
from scripted_generation import ScriptedGeneration, a_sample

from composer_mesh.actors.rollout_workers.agent_endpoint import AgentEndpoint
from composer_mesh.actors.rollout_workers.agent_episode import AgentEpisode, AnswerLog
from composer_mesh.plugins.harbor.box_ports import CHUNK, served
from composer_mesh.plugins.harbor.harness import LOOPBACK, Relay
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import EpisodeRecord

SAMPLE = a_sample()
SAID = "it is 5, and that is what two and three make"
LARGE = 1 << 30
BODY = {"model": "m", "messages": [{"role": "user", "content": "2 + 3?"}], "stream": True}


@pytest.fixture(scope="module")
def chat(tokenizer: Any) -> ChatFormat:
    return ChatFormat(with_template(tokenizer, FAMILIES["qwen"]), [])


@dataclass
class Worker:
    """A rollout worker, whose `kill` ends its connections and what it sends to the environment.

    With `most` it dies while it sends an answer, after so many bytes.
    """

    record: EpisodeRecord
    generation: ScriptedGeneration
    most: int = LARGE
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    episode: AgentEpisode | None = None
    port: int = 0

    @asynccontextmanager
    async def serving(self, continues: bool) -> AsyncIterator[None]:
        async def keep(answer: bytes) -> None:
            if not self.dead.is_set():
                self.record.turns.append(answer)

        def sent(name: str, received: bool) -> None:
            if not self.dead.is_set() and self.most > CHUNK:  # a smaller one is never sent
                self.record.sent[name] = received

        log = AnswerLog(keep, sent, self.record if continues else None)
        chat = self.generation.chat
        async with AsyncExitStack() as stack:
            serving = AgentEndpoint(self.generation, chat, 500, stream_wait_s=0.01)
            endpoint = await stack.enter_async_context(serving)
            opening = endpoint.episode(SAMPLE, SAMPLE.sampling, log)
            self.episode = await stack.enter_async_context(opening)
            self.record.agent = log.agent
            self.behind = httpx.URL(self.episode.base_url).port
            listening = socket.create_server((LOOPBACK, 0))
            self.port = listening.getsockname()[1]
            self.server = await asyncio.start_server(self._serve, sock=listening)
            yield
            self.kill()

    def kill(self) -> None:
        self.dead.set()
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(LOOPBACK, self.behind)
        self.writers += [writer, ours]
        sending = asyncio.create_task(self._sent(reader, ours))
        while not self.dead.is_set() and (content := await theirs.read(CHUNK)):
            writer.write(content[: self.most])
            await writer.drain()
            self.most -= len(content)
            if self.most <= 0:
                self.kill()
        sending.cancel()

    async def _sent(self, reader: asyncio.StreamReader, ours: asyncio.StreamWriter) -> None:
        while content := await reader.read(CHUNK):
            ours.write(content)


@asynccontextmanager
async def two_workers(
    chat: ChatFormat, most: int
) -> AsyncIterator[tuple[Worker, Worker, httpx.AsyncClient]]:
    """Two workers, the second of which is started by `serving`, and a client in the box."""
    record, generation = EpisodeRecord([]), ScriptedGeneration(chat, SAID, SAID)
    first, second = (Worker(record, generation, one) for one in (most, LARGE))
    relay = Relay(lambda: second.port or first.port)
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    async with first.serving(False), served(listening, relay._serve):
        assert first.episode is not None
        path = httpx.URL(first.episode.base_url).path
        headers = {"Authorization": f"Bearer {first.episode.api_key}"}
        url = f"http://{LOOPBACK}:{port}{path}"
        async with httpx.AsyncClient(
            base_url=url, headers=headers, trust_env=False, timeout=None
        ) as web:
            yield first, second, web
    assert relay.unreachable == []


async def streamed(web: httpx.AsyncClient, begun: asyncio.Event | None = None) -> str:
    """Return a streamed answer; raises where its end is missing."""
    text = ""
    async with web.stream("POST", "/chat/completions", json=BODY) as stream:
        async for piece in stream.aiter_text():
            text += piece
            if begun is not None:
                begun.set()
    return text


async def test_a_stream_that_had_begun_is_cut_and_its_request_sampled_again(
    chat: ChatFormat,
) -> None:
    async with two_workers(chat, LARGE) as (first, second, web):
        first.generation.open.clear()
        begun = asyncio.Event()
        streaming = asyncio.create_task(streamed(web, begun))
        await begun.wait()  # by a sign of life
        first.kill()
        with pytest.raises(httpx.RemoteProtocolError):
            await streaming
        again = asyncio.create_task(streamed(web))  # which waits for the other worker
        first.generation.open.set()
        async with second.serving(True):
            assert "[DONE]" in await again
            assert second.episode is not None
            (path,) = second.episode.trajectories()
        lost, answered = first.generation.requests
        assert lost == answered
        assert [turn.action_ids for turn in path.turns] == [chat.action(SAID)]


async def test_an_answer_that_is_cut_anywhere_is_sent_again_and_not_sampled_again(
    chat: ChatFormat,
) -> None:
    async with two_workers(chat, LARGE) as (_, _, web):
        whole = await streamed(web)
    for most in range(250, len(whole), 97):
        async with two_workers(chat, most) as (first, second, web):
            with pytest.raises(httpx.RemoteProtocolError):
                await streamed(web)
            assert first.dead.is_set()
            again = asyncio.create_task(streamed(web))
            async with second.serving(True):
                assert "[DONE]" in await again
                assert second.episode is not None
                (path,) = second.episode.trajectories()
            (result,) = first.generation.results
            assert [turn.action_ids for turn in path.turns] == [result.token_ids]
            assert [turn.logprobs for turn in path.turns] == [result.logprobs]
