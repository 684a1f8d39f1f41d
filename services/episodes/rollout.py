"""Runs one episode: the policy acts, the environment replies, and a trace is returned.

The conversation grows by token ids. The controller schedules episodes; `retries` handles failed
attempts.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.tasks import Episode, StepResult
from composer_mesh.rollouts.traces import ErrorSite, Message, Trace, Turn
from composer_mesh.services.episodes.retries import EpisodeTrial, Retries
from composer_mesh.services.steps.ports import Environments, Generation


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of an episode."""

    temperature: float
    max_new_tokens: int
    max_context: int
    seed: int

    @classmethod
    def training(cls, config: Config) -> "Sampling":
        generator = config.generator
        return cls(
            generator.temperature,
            generator.max_new_tokens,
            config.policy.max_context,
            config.run.seed,
        )

    @classmethod
    def evaluation(cls, config: Config) -> "Sampling":
        generator = config.generator
        return cls(
            config.eval.temperature,
            generator.max_new_tokens,
            config.policy.max_context,
            config.run.seed,
        )


@dataclass
class _Growing:
    """A trace under construction."""

    turns: list[Turn] = field(default_factory=list)
    sites: list[ErrorSite] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    reward: float = 0.0
    success: bool = False

    def read(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.fresh += ids

    def act(self, result: GenerationResult) -> None:
        turn = Turn(
            self.fresh, result.token_ids, result.logprobs, result.versions, result.stop_reason
        )
        self.turns.append(turn)
        self.ids, self.fresh = self.ids + result.token_ids, []

    def judge(self, step: StepResult) -> None:
        if step.error is not None:
            self.sites.append(step.error)
        if step.done:
            self.reward, self.success = step.reward, step.success


@dataclass(frozen=True)
class Sample:
    """One rollout of an episode: its index in its group, and its sampling parameters."""

    episode: Episode
    group_id: int
    sample: int
    sampling: Sampling

    @property
    def trace_id(self) -> str:
        """Identifies the rollout in every attempt; the names and seeds of its requests derive from
        it."""
        return f"{self.episode.split}-{self.group_id:06d}-{self.sample:03d}"


class Rollouts:
    """Runs episodes against a generation and an environment port."""

    def __init__(
        self,
        generation: Generation,
        environments: Environments,
        chat: ChatFormat,
        retries: Retries,
    ) -> None:
        self._generation, self._environments, self._chat = generation, environments, chat
        self.retries = retries

    def start(
        self, episode: Episode, group_id: int, size: int, sampling: Sampling
    ) -> list[asyncio.Task[Trace | None]]:
        """Start `size` samples of an episode; all of them are announced before any of them runs.

        A sample that is given up, by itself or with its episode, returns None.
        """
        announced = [self._generation.episode() for _ in range(size)]
        trial = self.retries.trial(episode)
        return [
            asyncio.create_task(
                self._announced(live, trial, Sample(episode, group_id, number, sampling))
            )
            for number, live in enumerate(announced)
        ]

    async def _announced(
        self, live: AbstractContextManager[None], trial: EpisodeTrial, sample: Sample
    ) -> Trace | None:
        with live:
            return await trial.sample(sample.trace_id, partial(self.run, sample))

    async def run(self, sample: Sample, session: str) -> Trace:
        """Run one attempt at a sample, in its own environment session. Waits for its last turn.

        The last answer that fits is as long as there is room; an episode whose context is full ends
        there without success.
        """
        try:
            return await self._run(sample, session)
        except BaseException:
            self._environments.abandon(session)
            raise

    async def _run(self, sample: Sample, session: str) -> Trace:
        growing, sampling = _Growing(), sample.sampling
        messages = await self._environments.begin(session, sample.episode)
        growing.read(self._chat.first_prompt(messages))
        _check_room(sample.trace_id, len(growing.ids), sampling)
        while (room := sampling.max_context - len(growing.ids)) > 0:
            result = await self._generation.generate(self._request(sample, growing, room))
            growing.act(result)
            text = self._chat.action_text(result.token_ids)
            step = await self._environments.step(session, text)
            growing.judge(step)
            if step.done:
                break
            growing.read(self._chat.continuation(step.messages, result.stop_reason == "stop"))
        conversation = await self._environments.finish(session)
        return _trace(sample, growing, conversation)

    def _request(self, sample: Sample, growing: _Growing, room: int) -> GenerationRequest:
        sampling = sample.sampling
        request_id = f"{sample.trace_id}-{len(growing.turns):02d}"
        return GenerationRequest(
            request_id,
            list(growing.ids),
            min(sampling.max_new_tokens, room),
            sampling.temperature,
            seed_of(sampling.seed, request_id),
            [self._chat.stop_id],
        )


class PromptTooLong(ValueError):
    """An episode's first prompt leaves no context for a turn."""

    failure_class = "data"


def _check_room(trace_id: str, prompt: int, sampling: Sampling) -> None:
    if prompt + sampling.max_new_tokens > sampling.max_context:
        raise PromptTooLong(
            f"{trace_id} begins with {prompt} tokens and a turn may take "
            f"{sampling.max_new_tokens}, but policy.max_context is {sampling.max_context}: raise "
            "policy.max_context, lower generator.max_new_tokens, or leave the row out of the data"
        )


def seed_of(seed: int, name: str) -> int:
    """Return a 63-bit seed for one named draw of a run."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def _trace(sample: Sample, growing: _Growing, conversation: list[Message]) -> Trace:
    episode = sample.episode
    return Trace(
        sample.trace_id,
        sample.group_id,
        sample.sample,
        episode.task,
        episode.split,
        episode.index,
        growing.turns,
        conversation,
        growing.reward,
        growing.success,
        growing.sites,
    )
