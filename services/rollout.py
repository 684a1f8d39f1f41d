"""One episode: the policy acts, the environment answers, a trace is left.

The conversation grows by token ids. Which episodes run when is the controller's business.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.tasks import Episode, StepResult
from composer_mesh.rollouts.traces import ErrorSite, Message, Trace, Turn
from composer_mesh.services.ports import Environments, Generation


@dataclass(frozen=True)
class Sampling:
    """How an episode is sampled."""

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
    """A trace in the making."""

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


class Rollouts:
    """Runs episodes against a generation and an environment port."""

    def __init__(
        self, generation: Generation, environments: Environments, chat: ChatFormat
    ) -> None:
        self._generation, self._environments, self._chat = generation, environments, chat

    def start(
        self, episode: Episode, group_id: int, size: int, sampling: Sampling
    ) -> list[asyncio.Task[Trace]]:
        """Begin `size` samples of an episode; every one is announced before any of them runs."""
        announced = [self._generation.episode() for _ in range(size)]
        return [
            asyncio.create_task(self._announced(live, episode, group_id, sample, sampling))
            for sample, live in enumerate(announced)
        ]

    async def _announced(
        self,
        live: AbstractContextManager[None],
        episode: Episode,
        group_id: int,
        sample: int,
        sampling: Sampling,
    ) -> Trace:
        with live:
            return await self.run(episode, group_id, sample, sampling)

    async def run(self, episode: Episode, group_id: int, sample: int, sampling: Sampling) -> Trace:
        """One sample of an episode. Waits for its last turn.

        An episode whose context is full ends there without success.
        """
        trace_id = f"{episode.split}-{group_id:06d}-{sample:03d}"
        growing = _Growing()
        messages = await self._environments.begin(trace_id, episode)
        growing.read(self._chat.first_prompt(messages))
        _check_room(trace_id, len(growing.ids), sampling)
        while len(growing.ids) + sampling.max_new_tokens <= sampling.max_context:
            result = await self._generation.generate(self._request(trace_id, growing, sampling))
            growing.act(result)
            text = self._chat.action_text(result.token_ids)
            step = await self._environments.step(trace_id, text)
            growing.judge(step)
            if step.done:
                break
            growing.read(self._chat.continuation(step.messages, result.stop_reason == "stop"))
        conversation = await self._environments.finish(trace_id)
        return _trace(trace_id, episode, group_id, sample, growing, conversation)

    def _request(self, trace_id: str, growing: _Growing, sampling: Sampling) -> GenerationRequest:
        request_id = f"{trace_id}-{len(growing.turns):02d}"
        return GenerationRequest(
            request_id,
            list(growing.ids),
            sampling.max_new_tokens,
            sampling.temperature,
            seed_of(sampling.seed, request_id),
            [self._chat.stop_id],
        )


class PromptTooLong(ValueError):
    """An episode's first prompt leaves no room for a turn."""


def _check_room(trace_id: str, prompt: int, sampling: Sampling) -> None:
    if prompt + sampling.max_new_tokens > sampling.max_context:
        raise PromptTooLong(
            f"{trace_id} begins with {prompt} tokens and a turn may take "
            f"{sampling.max_new_tokens}, but policy.max_context is {sampling.max_context}: raise "
            "policy.max_context, lower generator.max_new_tokens, or leave the row out of the data"
        )


def seed_of(seed: int, name: str) -> int:
    """A 63-bit seed for one named draw of a run."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def _trace(
    trace_id: str,
    episode: Episode,
    group_id: int,
    sample: int,
    growing: _Growing,
    conversation: list[Message],
) -> Trace:
    return Trace(
        trace_id,
        group_id,
        sample,
        episode.task,
        episode.split,
        episode.index,
        growing.turns,
        conversation,
        growing.reward,
        growing.success,
        growing.sites,
    )
