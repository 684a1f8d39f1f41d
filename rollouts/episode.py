"""Plays one episode: the policy acts, the environment replies, and a trace is returned.

The conversation grows by token ids. Pure but for its ports; who plays which episode when, and what
happens to a failed attempt, is decided elsewhere.

What an episode is played against, as protocols that actors and test fakes implement.
"""

import hashlib
import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.chat import ChatFormat, encoded
from composer_mesh.rollouts.generation import WHOLE, GenerationRequest, GenerationResult, Truncation
from composer_mesh.rollouts.tasks import Episode, Outcome, StepResult
from composer_mesh.rollouts.traces import IDS, ErrorSite, Message, Trace, Turn


class Generation(Protocol):
    """Samples tokens. Requests of one `group` have prompts in common."""

    async def generate(self, request: GenerationRequest, group: str, /) -> GenerationResult: ...


@dataclass
class EpisodeRecord:
    """What an environment keeps of a session's episode, so that another worker can continue it.

    `messages` are those that the policy reads next, `turns` are pickled; after the last step of the
    episode it is `done`. Where an agent behind an endpoint plays, `agent` has the keys of that, the
    turns are its answers, and `sent` says of an answer whether the agent got it.
    """

    messages: list[Message]
    turns: list[bytes] = field(default_factory=list)
    sites: list[ErrorSite] = field(default_factory=list)
    done: bool = False
    agent: bytes = b""
    sent: dict[str, bool] = field(default_factory=dict)

    def add(self, turn: bytes, step: StepResult) -> None:
        """Add a turn and the result of its action."""
        self.turns.append(turn)
        self.messages, self.done = step.messages, step.done
        if step.error is not None:
            self.sites.append(step.error)


class Environments(Protocol):
    """Steps episodes, each in a session that is started, and then finished or abandoned.

    A session whose steps are given their turns can be adopted from its `home` after the death of
    the worker that began it; None is returned for one that is not open there.
    """

    async def begin(self, session_id: str, episode: Episode) -> list[Message]: ...

    async def adopt(self, session_id: str, home: str) -> EpisodeRecord | None: ...

    async def step(self, session_id: str, text: str, turn: Turn | None = None) -> StepResult: ...

    async def finish(self, session_id: str) -> Outcome: ...

    def abandon(self, session_id: str) -> None: ...


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of an episode; a turn ends after `deadline_s` without progress."""

    temperature: float
    max_new_tokens: int
    max_context: int
    seed: int
    deadline_s: float | None = None
    truncation: Truncation = WHOLE
    experts: bool = False
    """Whether generators tell the experts of a mixture."""

    @classmethod
    def training(cls, config: Config) -> "Sampling":
        generator = config.generator
        return cls(
            generator.temperature,
            generator.max_new_tokens,
            config.policy.max_context,
            config.run.seed,
            config.run.deadline_s,
            Truncation(generator.top_p, generator.top_k, generator.min_p),
            config.trainer.moe.router_replay,
        )

    @classmethod
    def evaluation(cls, config: Config) -> "Sampling":
        generator = config.generator
        return cls(
            config.eval.temperature,
            generator.max_new_tokens,
            config.policy.max_context,
            config.run.seed,
            config.run.deadline_s,
        )


@dataclass
class _Growing:
    """A trace under construction."""

    turns: list[Turn] = field(default_factory=list)
    sites: list[ErrorSite] = field(default_factory=list)
    ids: "array[int]" = field(default_factory=lambda: array(IDS))
    fresh: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    routed: int = 0

    def read(self, ids: Sequence[int]) -> None:
        self.ids.extend(ids)
        self.fresh += ids

    def act(self, result: GenerationResult) -> None:
        turn = Turn(
            self.fresh,
            result.token_ids,
            result.logprobs,
            result.versions,
            result.stop_reason,
            experts=result.experts,
        )
        self.prompt_tokens += len(self.ids)
        self.cached_tokens += result.cached_tokens
        self._add(turn)

    def restore(self, record: EpisodeRecord) -> None:
        """Add the turns of a record, whose requests were made by another worker."""
        for turn in map(pickle.loads, record.turns):
            self.ids.extend(turn.context_ids)
            self._add(turn)
        self.sites += record.sites

    def judge(self, step: StepResult) -> None:
        if step.error is not None:
            self.sites.append(step.error)

    def _add(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.routed += turn.experts.positions if turn.experts is not None else 0
        self.ids.extend(turn.action_ids)
        self.fresh = []


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
        return f"{self.group}-{self.sample:03d}"

    @property
    def group(self) -> str:
        """Identifies the samples that have their first prompt in common."""
        return f"{self.episode.split}-{self.group_id:06d}"


@dataclass(frozen=True)
class Played:
    """A finished episode's trace; its requests had `prompt_tokens`, of which `cached_tokens` were
    not computed again. Without an agent they are those of its last worker.

    A workflow's generators have sampled `sampled_tokens` for it, in its trace or not.
    """

    trace: Trace
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0

    @property
    def trained_tokens(self) -> int:
        """How many sampled tokens the trajectories of the trace train."""
        turns = [turn for one in self.trace.trajectories() for turn in one.turns]
        return sum(len(turn.action_ids) for turn in turns if turn.trained)


class EpisodePlayer:
    """Plays episodes against a generation and an environment port."""

    def __init__(
        self, generation: Generation, environments: Environments, chat: ChatFormat
    ) -> None:
        self._generation, self._environments, self._chat = generation, environments, chat

    async def play(self, sample: Sample, session: str, home: str = "") -> Played:
        """Play one attempt at a sample, in its own environment session. Waits for its last turn.

        A session that another worker has left at its `home` is continued, if it is still open. The
        last answer that fits is as long as there is room; an episode whose context is full ends
        there without success.
        """
        try:
            return await self._play(sample, session, home)
        except BaseException:
            self._environments.abandon(session)
            raise

    async def _play(self, sample: Sample, session: str, home: str) -> Played:
        growing, sampling = _Growing(), sample.sampling
        record = await self._environments.adopt(session, home) if home else None
        if record is None:
            record = EpisodeRecord(await self._environments.begin(session, sample.episode))
        growing.restore(record)
        messages, done = record.messages, record.done
        while not done:
            await self._read(growing, messages)
            if not growing.turns:
                _check_prompt_fits(sample.trace_id, len(growing.ids), sampling)
            if (remaining := sampling.max_context - len(growing.ids)) <= 0:
                break
            request = self._request(sample, growing, remaining)
            growing.act(await self._generation.generate(request, sample.group))
            turn = growing.turns[-1]
            text = self._chat.action_text(turn.action_ids)
            step = await self._environments.step(session, text, turn)
            growing.judge(step)
            messages, done = step.messages, step.done
        outcome = await self._environments.finish(session)
        trace = _trace(sample, growing, outcome)
        return Played(trace, growing.prompt_tokens, growing.cached_tokens)

    async def _read(self, growing: _Growing, messages: list[Message]) -> None:
        """Read the first messages, or those that follow the last action."""
        ids = partial(self._chat.first_prompt, messages)
        if growing.turns:
            ids = partial(self._chat.continuation, messages, growing.turns[-1].action_ids)
        growing.read(await encoded(messages, ids))

    def _request(self, sample: Sample, growing: _Growing, remaining: int) -> GenerationRequest:
        sampling = sample.sampling
        request_id = f"{sample.trace_id}-{len(growing.turns):02d}"
        return GenerationRequest(
            request_id,
            growing.ids[:],
            min(sampling.max_new_tokens, remaining),
            sampling.temperature,
            seed_of(sampling.seed, request_id),
            list(self._chat.stop_ids),
            sampling.deadline_s,
            sampling.truncation,
            growing.routed if sampling.experts else None,
        )


class PromptTooLong(ValueError):
    """An episode's first prompt leaves no context for a turn."""

    failure_class = "data"


def _check_prompt_fits(trace_id: str, prompt: int, sampling: Sampling) -> None:
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


def _trace(sample: Sample, growing: _Growing, outcome: Outcome) -> Trace:
    episode = sample.episode
    return Trace(
        sample.trace_id,
        sample.group_id,
        sample.sample,
        episode.task,
        episode.split,
        episode.index,
        growing.turns,
        outcome.messages,
        outcome.reward,
        outcome.success,
        growing.sites,
        dict(outcome.rewards),
        outcome.answer,
        advantage=0.0 if outcome.screened else None,
        penalty=outcome.penalty,
        left_out=list(outcome.left_out),
        turn_rewards=outcome.turn_rewards,
        episode_id=outcome.episode_id,
        screened=outcome.screened,
    )
