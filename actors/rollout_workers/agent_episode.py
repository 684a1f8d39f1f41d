"""Answers an agent's requests in one episode by sampling, and captures what was sampled.

A request that is sent again, because its connection was lost, gets the answer of the first one. All
methods are for the event loop of the rollout worker. Nothing here knows HTTP.

Each answer is recorded before it is sent, where there is an `AnswerLog`: another worker restores
the episode from it. Requests that were not answered are sampled again, by the same names.
"""

from __future__ import annotations

import asyncio
import pickle
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from typing import Any

from composer_mesh.mesh.waiting import cancel_and_wait, together
from composer_mesh.rollouts.captured_episode import CapturedEpisode, CaptureFormat
from composer_mesh.rollouts.captured_turns import CapturedPrompt, CapturedTrajectory, CapturedTurn
from composer_mesh.rollouts.chat import encoded
from composer_mesh.rollouts.episode import (
    EpisodeRecord,
    Generation,
    Sample,
    Sampling,
    seed_of,
)
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult, tokens_of
from composer_mesh.rollouts.traces import Message

SessionKey = tuple[str, bytes]
"""A session, and the key that its equal requests share."""
MOST_TURNS = 4096
"""Answers that are sampled in one episode at most."""


class EpisodeEnded(Exception):
    """The episode of a request is over."""


class NoRoomForAnswer(ValueError):
    """A request's prompt leaves no room for an answer."""


class TooManyTurns(ValueError):
    """An episode has sampled as many answers as it may."""


@dataclass(frozen=True)
class ChatQuestion:
    """Messages to answer."""

    messages: list[Message]
    tools: list[dict[str, Any]]


@dataclass(frozen=True)
class TextQuestion:
    """A text or ids to continue."""

    given: str | list[int]


Question = ChatQuestion | TextQuestion


@dataclass(frozen=True)
class Ask:
    """What one request wants: `n` answers to each question."""

    questions: Sequence[Question]
    n: int = 1
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    inherited_from: int | None = None
    """The message from which on a later request may inherit the conversation, by its name."""


@dataclass
class AnswerLog:
    """Where answers are recorded, each with its name, and the record of a worker that has died.

    `keep` returns once an answer is recorded; `sent` says whether the agent has received it.
    """

    keep: Callable[[bytes], Awaitable[None]]
    sent: Callable[[str, bool], None]
    record: EpisodeRecord | None = None
    agent: bytes = b""
    """The keys of the episode's endpoint."""


@dataclass(frozen=True)
class RecordedTurn:
    """A sampled answer; `parent` is the number of the request of its parent.

    Its prompt has no ids of other turns. `tools` are None where they are those of the parent.
    """

    parent: int | None
    prompt: CapturedPrompt
    tools: list[dict[str, Any]] | None
    question: Question
    result: GenerationResult


@dataclass(frozen=True)
class RecordedAnswer:
    """An answered request, or the `error` of one that could not be answered."""

    key: SessionKey
    name: str
    inherited_from: int | None
    stops: tuple[str, ...]
    turns: list[RecordedTurn]
    tokens: Counter[str]
    error: str = ""


class AnswerLost(Exception):
    """A request that another worker, which has died, could not answer."""


@dataclass(eq=False)
class Exchange:
    """A request and its answers, which several connections may wait for after a retry."""

    sampling: asyncio.Future[list[CapturedTurn]]
    captured: CapturedEpisode
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    listeners: int = 0
    delivered: bool = False
    given_up: bool = False
    timer: asyncio.TimerHandle | None = None
    """Gives it up when it fires, unless a connection waits for it again."""

    @property
    def turns(self) -> list[CapturedTurn]:
        """The answers, in the order of the questions."""
        return self.sampling.result()

    @property
    def failed(self) -> bool:
        task = self.sampling
        return self.given_up or (task.done() and (task.cancelled() or task.exception() is not None))


class AgentEpisode:
    """One attempt at a sample that an agent plays by requests."""

    def __init__(
        self,
        format: CaptureFormat,
        generation: Generation,
        sample: Sample,
        sampling: Sampling,
        retry_wait_s: float,
        log: AnswerLog | None = None,
    ) -> None:
        """A request whose connection is lost is cancelled after `retry_wait_s` without a retry."""
        self._generation, self._sample, self._sampling = generation, sample, sampling
        self._chat, self._retry_wait_s = format.chat, retry_wait_s
        self._format, self._log = format, log
        self._numbers: Iterator[int] = count()
        """Of requests to generators; those that a dead worker has not answered come first."""
        self._numbers_of: dict[CapturedTurn, int] = {}
        self._captured: dict[str, CapturedEpisode] = {}
        self._exchanges: defaultdict[SessionKey, list[Exchange]] = defaultdict(list)
        self._failures: dict[SessionKey, Exception] = {}
        self._requested = 0
        self.tokens = Counter[str]()
        """Tokens of the answers so far, received or not, as `tokens_of` counts them."""
        self._ended = False
        self._in_order = asyncio.Lock()
        """Held while a prompt is made, so that a retry finds the request that it repeats."""
        self.base_url = self.api_key = ""
        """Where an agent reaches it, once an endpoint serves it."""
        self.responses: dict[str, list[Message]] = {}
        """Conversations of the Responses API by the exchange of their last response."""

    async def restore(self, record: EpisodeRecord) -> None:
        """Continue from what another worker has recorded. Waits for a thread that reads it.

        Answers of which nothing is known may have been received; an equal request gets them.
        """
        for answer, turns in await asyncio.to_thread(self._rebuilt, record):
            sampled = asyncio.get_running_loop().create_future()
            sampled.set_result(turns)
            exchange = Exchange(sampled, self._captured[answer.key[0]], answer.name)
            exchange.delivered = record.sent.get(answer.name, False)
            self._exchanges[answer.key].append(exchange)
            if answer.inherited_from is not None:
                self.responses[exchange.id] = turns[0].conversation()[answer.inherited_from :]

    def token_text(self, token: int) -> str:
        """Return the text of one token id."""
        return self._chat.tokenizer.decode([token], skip_special_tokens=False)

    @property
    def max_context(self) -> int:
        """Tokens of a prompt and its answer at most."""
        return self._sampling.max_context

    def trajectories(self, session: str | None = None) -> list[CapturedTrajectory]:
        """Return what the agent, or one session of it, sampled and received, as paths through the
        tree of its requests."""
        sessions = self._captured if session is None else {session} & self._captured.keys()
        return [path for name in sessions for path in self._captured[name].trajectories()]

    def failures(self) -> list[Exception]:
        """Return the errors of generation at requests that no retry has answered."""
        return list(self._failures.values())

    async def answer(self, ask: Ask, key: bytes, retry: bool, session: str = "") -> Exchange:
        """Return the answers to a request; `release` must be called when they were sent.

        Sessions share no conversation. In a session requests with equal keys are equal. One of them
        that is a `retry`, or follows one that lost its connection, gets the earlier answers. Waits
        for the last token; raises UnusableMessages, ContextFull, TooManyTurns, EpisodeEnded, or the
        error of the generation.
        """
        if self._ended:
            raise EpisodeEnded
        async with self._in_order:
            exchange = self._earlier((session, key), retry)
            if exchange is None:
                prompts = await self._prompts(ask.questions, session, ask.stops)
                exchange = self._started(ask, key, session, prompts)
        exchange.listeners += 1
        if exchange.timer is not None:
            exchange.timer.cancel()
        try:
            await asyncio.wait({exchange.sampling})
            if exchange.sampling.cancelled():
                raise EpisodeEnded
            exchange.sampling.result()
        except BaseException:
            self.release(exchange, sent=False)
            raise
        # Before it is sent, so that whoever got an answer finds it among the trajectories.
        for turn in exchange.turns:
            turn.deliver()
        return exchange

    async def prompt_tokens(self, question: ChatQuestion, session: str = "") -> int:
        """Return how many tokens the prompt of a question has; raises UnusableMessages."""
        if self._ended:
            raise EpisodeEnded
        (prompt,) = await self._prompts([question], session, ())
        return len(prompt.ids)

    def release(self, exchange: Exchange, sent: bool) -> None:
        """Say that a connection has sent the answers of an exchange, or was lost before."""
        exchange.listeners -= 1
        exchange.delivered = exchange.delivered or sent
        if self._log is not None and not exchange.listeners:
            self._log.sent(exchange.id, exchange.delivered)
        if exchange.delivered or exchange.listeners or exchange.failed:
            return
        if exchange.sampling.done():
            for turn in exchange.turns:
                exchange.captured.withdraw(turn)
        else:
            loop = asyncio.get_running_loop()
            exchange.timer = loop.call_later(self._retry_wait_s, self._give_up, exchange)

    async def close(self) -> None:
        """End all requests; later ones raise EpisodeEnded."""
        self._ended = True
        exchanges = [one for found in self._exchanges.values() for one in found]
        for exchange in exchanges:
            if exchange.timer is not None:
                exchange.timer.cancel()
        await cancel_and_wait([one.sampling for one in exchanges])

    def _earlier(self, key: SessionKey, retry: bool) -> Exchange | None:
        """Return the exchange that a request repeats: one that nobody got, or for a retry any."""
        usable = [one for one in self._exchanges.get(key, []) if not one.failed]
        lost = [one for one in usable if not one.listeners and not one.delivered]
        return next(iter(lost or (usable[::-1] if retry else [])), None)

    async def _prompts(
        self, questions: Sequence[Question], session: str, stops: Sequence[str]
    ) -> list[CapturedPrompt]:
        """Return the prompts of questions; the event loop continues while long ones are made."""
        captured = self._captured.get(session) or CapturedEpisode(self._format)
        messages = [message for question in questions for message in _messages(question)]
        make = partial(_prompt, captured, stops=stops)
        return await encoded(messages, lambda: [make(question) for question in questions])

    def _started(
        self, ask: Ask, key: bytes, session: str, prompts: list[CapturedPrompt]
    ) -> Exchange:
        if self._ended:
            raise EpisodeEnded
        self._check_turns(len(prompts) * ask.n)
        requests = [self._request(prompt, ask) for prompt in prompts for _ in range(ask.n)]
        captured = self._captured.setdefault(session, CapturedEpisode(self._format))
        name = secrets.token_hex(12)
        sampling = self._sampled(name, ask, (session, key), captured, prompts, requests)
        exchange = Exchange(asyncio.create_task(sampling), captured, name)
        exchange.sampling.add_done_callback(_retrieve)
        self._exchanges[session, key].append(exchange)
        return exchange

    def _request(self, prompt: CapturedPrompt, ask: Ask) -> GenerationRequest:
        sampling = self._sampling
        remaining = sampling.max_context - len(prompt.ids)
        if remaining <= 0:
            raise NoRoomForAnswer(
                f"the prompt has {len(prompt.ids)} tokens and the context of this run is "
                f"{sampling.max_context}: send less, or raise policy.max_context"
            )
        request_id = f"{self._sample.trace_id}-{next(self._numbers):02d}"
        self._requested += 1
        most = min(sampling.max_new_tokens, remaining)
        return GenerationRequest(
            request_id,
            list(prompt.ids),
            most if ask.max_tokens is None else min(most, ask.max_tokens),
            sampling.temperature,
            seed_of(sampling.seed, request_id),
            list(dict.fromkeys([*self._chat.stop_ids, *ask.stop_ids])),
            sampling.deadline_s,
            sampling.truncation,
        )

    def _check_turns(self, wanted: int) -> None:
        if self._requested + wanted > MOST_TURNS:
            raise TooManyTurns(
                f"the episode has requested {self._requested} answers and may request "
                f"{MOST_TURNS}: end it"
            )

    async def _sampled(
        self,
        name: str,
        ask: Ask,
        key: SessionKey,
        captured: CapturedEpisode,
        prompts: list[CapturedPrompt],
        requests: list[GenerationRequest],
    ) -> list[CapturedTurn]:
        group = self._sample.group
        try:
            sampled = [self._generation.generate(request, group) for request in requests]
            results = await together(*sampled)
        except (
            Exception
        ) as error:  # supervision boundary: the agent gets a status, the run the error
            self._failures[key] = error
            said = f"{type(error).__name__}: {error}"
            await self._keep(name, key, ask, [], Counter(), said)
            raise
        self._failures.pop(key, None)
        tokens = Counter[str]()
        for request, result in zip(requests, results, strict=True):
            tokens += tokens_of(len(request.prompt_ids), result)
        self.tokens += tokens
        requested = [
            (q, p) for q, p in zip(ask.questions, prompts, strict=True) for _ in range(ask.n)
        ]
        answered = [(*one, result) for one, result in zip(requested, results, strict=True)]
        # Recorded first: cancelled meanwhile, it is no turn that others may have as their parent.
        await self._keep(name, key, ask, answered, tokens)
        return [self._added(captured, *one, ask.stops) for one in answered]

    def _added(
        self,
        captured: CapturedEpisode,
        question: Question,
        prompt: CapturedPrompt,
        result: GenerationResult,
        stops: Sequence[str],
    ) -> CapturedTurn:
        turn = _record(captured, question, prompt, result, stops)
        self._numbers_of[turn] = _number(result)
        return turn

    async def _keep(
        self,
        name: str,
        key: SessionKey,
        ask: Ask,
        answered: Sequence[tuple[Question, CapturedPrompt, GenerationResult]],
        tokens: Counter[str],
        error: str = "",
    ) -> None:
        if self._log is not None:
            turns = [self._recorded(*one) for one in answered]
            kept = RecordedAnswer(key, name, ask.inherited_from, ask.stops, turns, tokens, error)
            await self._log.keep(pickle.dumps(kept))

    def _recorded(
        self, question: Question, prompt: CapturedPrompt, result: GenerationResult
    ) -> RecordedTurn:
        """Return what is recorded of an answer, without what the answers before it tell."""
        before = prompt.parent
        parent = None if before is None else self._numbers_of[before]
        tools = None if before is not None and before.tools == prompt.tools else prompt.tools
        if isinstance(question, ChatQuestion):
            question = ChatQuestion([], [])
        elif not isinstance(question.given, str):
            question = TextQuestion([])
        bare = replace(prompt, parent=None, ids=[], tools=[])
        return RecordedTurn(parent, bare, tools, question, result)

    def _rebuilt(self, record: EpisodeRecord) -> list[tuple[RecordedAnswer, list[CapturedTurn]]]:
        answered = []
        turn_of = dict[int, CapturedTurn]()
        for contents in record.turns:
            answer: RecordedAnswer = pickle.loads(contents)
            self._failures.pop(answer.key, None)
            if answer.error:
                self._failures[answer.key] = AnswerLost(answer.error)
                continue
            captured = self._captured.setdefault(answer.key[0], CapturedEpisode(self._format))
            turns = []
            for one in answer.turns:
                parent = None if one.parent is None else turn_of[one.parent]
                tools = parent.tools if parent is not None and one.tools is None else one.tools
                prompt = replace(one.prompt, parent=parent, tools=tools or [])
                turn = self._added(captured, one.question, prompt, one.result, answer.stops)
                turn_of[self._numbers_of[turn]] = turn
                turns.append(turn)
                if record.sent.get(answer.name, True):  # or it was being sent
                    turn.deliver()
            self.tokens += answer.tokens
            answered.append((answer, turns))
        free = [number for number in range(max(turn_of, default=0)) if number not in turn_of]
        self._numbers = chain(free, count(max(turn_of, default=-1) + 1))
        self._requested = len(turn_of)
        return answered

    def _give_up(self, exchange: Exchange) -> None:
        if not exchange.sampling.done():
            exchange.given_up = True
            exchange.sampling.cancel()


def _messages(question: Question) -> list[Message]:
    """Return what has to be encoded of a question."""
    if isinstance(question, ChatQuestion):
        return question.messages
    return [{"role": "user", "content": question.given}] if isinstance(question.given, str) else []


def _prompt(captured: CapturedEpisode, question: Question, stops: Sequence[str]) -> CapturedPrompt:
    if isinstance(question, ChatQuestion):
        return captured.chat_prompt(question.messages, question.tools, stops)
    return captured.text_prompt(question.given)


def _record(
    captured: CapturedEpisode,
    question: Question,
    prompt: CapturedPrompt,
    result: GenerationResult,
    stops: Sequence[str],
) -> CapturedTurn:
    if isinstance(question, ChatQuestion):
        return captured.record_chat(prompt, result, stops)
    return captured.record_text(prompt, question.given, result, stops)


def _number(result: GenerationResult) -> int:
    """Return the number of the request of a result, within its episode."""
    return int(result.request_id.rpartition("-")[2])


def _retrieve(sampling: asyncio.Future[list[CapturedTurn]]) -> None:
    """Retrieve an error that no connection waits for; it is among the episode's failures."""
    if not sampling.cancelled():
        sampling.exception()
