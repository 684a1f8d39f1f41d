"""Agents that send seeded sequences of requests: edits, retries, parallel calls, lost connections.

What each of them got is kept beside what the endpoint captured.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, replace
from typing import Any

from scripted_generation import ADD, a_sample

from composer_mesh.actors.rollout_workers.agent_episode import (
    AgentEpisode,
    Ask,
    ChatQuestion,
    Exchange,
    TextQuestion,
)
from composer_mesh.rollouts.captured_episode import CaptureFormat
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Sample
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import Message

MARKS = ("red", "blue")
"""A word in everything that a session says and samples."""
PARTS = ("", "", "", "", "other")
"""Headers X-Session-ID: its agents quote each other, and must not continue each other."""


def spoken(rng: random.Random, mark: str) -> str:
    """A text of an answer; few differ, so that some answers read the same."""
    thinking = rng.choice(["", "", "<think>hm</think>", "<think>\nno\n</think>\n\n", "<think>"])
    call = call_text("add", {"a": rng.randrange(2)})
    text = f"{mark} {rng.randrange(3)}"
    return thinking + rng.choice(
        [text, text, f"{text} {call}", f"{text} {call}{call}", f"{text} <tool_call>"]
    )


class RandomGeneration:
    """Samples for all sessions; the first log-prob of an answer is the number of its request."""

    def __init__(self, chat: ChatFormat, rng: random.Random) -> None:
        self._chat, self._rng = chat, rng
        self.requests: list[GenerationRequest] = []
        self.results: dict[int, GenerationResult] = {}

    async def generate(self, request: GenerationRequest, group: str) -> GenerationResult:
        number = len(self.requests)
        self.requests.append(request)
        for _ in range(self._rng.randrange(4)):
            await asyncio.sleep(0)
        session = int(request.request_id.split("-")[1])
        ids = self._chat.action(spoken(self._rng, MARKS[session]))[: request.max_new_tokens]
        reason = "stop" if ids[-1] == self._chat.stop_ids[0] else "length"
        count = len(ids)
        name, logprobs = request.request_id, [-float(number), *[-0.5] * (count - 1)]
        result = GenerationResult(name, ids, logprobs, [number] * count, reason)
        self.results[number] = result
        return result


@dataclass(frozen=True)
class Asked:
    """What an agent sends, and all of it as one key."""

    ask: Ask
    part: str = ""

    @property
    def key(self) -> bytes:
        asked = [
            [getattr(q, "messages", None), getattr(q, "given", None), getattr(q, "tools", 0)]
            for q in self.ask.questions
        ]
        return json.dumps([asked, self.ask.n, self.ask.stops, self.ask.max_tokens]).encode()


class FuzzedAgent:
    """One session: it goes on from what it got, rewrites it, repeats it, or loses it."""

    def __init__(
        self, format: CaptureFormat, generation: RandomGeneration, session: int, seed: int
    ) -> None:
        self._rng, self._mark = random.Random(f"{seed} {session}"), MARKS[session]
        sample: Sample = a_sample(session)
        wait_s = self._rng.choice([0.0, 600.0])
        self.episode = AgentEpisode(format, generation, sample, sample.sampling, wait_s)
        self._known: list[list[Message]] = [[self._user()]]
        self._texts = [f"{self._mark} text"]
        self._sent: list[Asked] = []
        self.got: dict[int, str] = {}
        """Numbers of the requests whose answers were received, with their header X-Session-ID."""

    async def play(self) -> None:
        for _ in range(self._rng.randrange(1, 6)):
            several = self._rng.choice([1, 1, 1, 2, 3])
            await asyncio.gather(*(self._request() for _ in range(several)))
        await self.episode.close()

    async def _request(self) -> None:
        repeats = self._sent and self._rng.random() < 0.25
        asked = self._rng.choice(self._sent) if repeats else self._next()
        asked = replace(asked, part=self._rng.choice(PARTS))
        self._sent.append(asked)
        if self._rng.random() < 0.2:
            await self._lose(asked)
            if self._rng.random() < 0.5:
                return
        retry = bool(repeats) and self._rng.random() < 0.5
        exchange = await self.episode.answer(asked.ask, asked.key, retry, asked.part)
        for _ in range(self._rng.randrange(3)):
            await asyncio.sleep(0)
        sent = self._rng.random() < 0.9
        self.episode.release(exchange, sent)
        if sent:
            self._receive(asked, exchange)

    async def _lose(self, asked: Asked) -> None:
        """Send a request whose connection is lost sooner or later."""
        answering = self.episode.answer(asked.ask, asked.key, False, asked.part)
        asking = asyncio.create_task(answering)
        for _ in range(self._rng.randrange(6)):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        if not asking.cancelled():
            self.episode.release(asking.result(), sent=False)

    def _receive(self, asked: Asked, exchange: Exchange) -> None:
        question = asked.ask.questions[0]
        for turn in exchange.turns:
            self.got[int(-turn.turn.logprobs[0])] = asked.part
            if isinstance(question, ChatQuestion):
                self._known.append([*question.messages, self._echo(turn.answer)])
            elif isinstance(question.given, str):
                self._texts.append(question.given + turn.answer["content"])

    def _echo(self, answer: Message) -> Message:
        """The answer as some client would send it back."""
        kept: Any = json.loads(json.dumps(answer))
        if self._rng.random() < 0.5:
            kept.pop("reasoning_content", None)
            kept["refusal"] = None
        if self._rng.random() < 0.3:
            kept["content"] = [{"type": "text", "text": kept["content"] or ""}]
        return dict(kept)

    def _next(self) -> Asked:
        ask = Ask([self._question()], n=self._rng.choice([1, 1, 1, 2]))
        if self._rng.random() < 0.2:
            ask = replace(ask, stops=("2", f"{self._mark} 1"))
        if self._rng.random() < 0.2:
            ask = replace(ask, max_tokens=self._rng.randrange(1, 12))
        return Asked(ask)

    def _question(self) -> ChatQuestion | TextQuestion:
        if self._rng.random() < 0.15:
            return TextQuestion(f"{self._rng.choice(self._texts)} {self._mark}")
        messages = list(self._rng.choice(self._known))
        if self._rng.random() < 0.3:
            messages = self._edited(messages)
        if messages[-1]["role"] == "assistant":
            messages += self._heard(messages[-1])
        return ChatQuestion(messages, [ADD] if self._rng.random() < 0.9 else [])

    def _edited(self, messages: list[Message]) -> list[Message]:
        """A history that was rewritten: cut, summed up, or changed at one place."""
        place = self._rng.randrange(len(messages))
        kept = messages[: place + 1]
        changed = {"role": kept[-1]["role"], "content": f"{self._mark} edited"}
        if kept[-1].get("tool_call_id"):
            changed["tool_call_id"] = kept[-1]["tool_call_id"]
        return self._rng.choice(
            [kept, [*kept[:-1], changed, *messages[place + 1 :]], [self._user()]]
        )

    def _heard(self, answer: Message) -> list[Message]:
        calls = answer.get("tool_calls") or []
        if not calls:
            return [self._user()]
        text = f"{self._mark} result"
        return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]

    def _user(self) -> Message:
        return {"role": "user", "content": f"{self._mark} question {self._rng.randrange(4)}"}
