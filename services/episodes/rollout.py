"""Samples of episodes, played by a port and retried where an attempt fails.

The controller schedules episodes; `rollouts.episode` says how one is played, `retries` what happens
to a failed attempt.
"""

import asyncio
from contextlib import AbstractContextManager
from functools import partial

from composer_mesh.rollouts.episode import Sample, Sampling
from composer_mesh.rollouts.group_rewards import (
    SMALLEST_GROUP,
    FinishedRollout,
    GroupScore,
    with_group_score,
    without_left_out,
)
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.episodes.retries import EpisodeTrial, Retries
from composer_mesh.services.steps.ports import Player
from composer_mesh.tasks.task import Task


class Rollouts:
    """Plays samples of episodes with retries, on one event loop."""

    def __init__(self, player: Player, retries: Retries) -> None:
        self.retries = retries
        self._player = player
        self._tokens = (0, 0)

    def start(
        self, episode: Episode, group_id: int, size: int, sampling: Sampling
    ) -> list[asyncio.Task[Trace | None]]:
        """Start `size` samples of an episode; all of them are announced before any of them runs.

        A sample that is given up, by itself or with its episode, returns None.
        """
        samples = [Sample(episode, group_id, number, sampling) for number in range(size)]
        announced = self._player.announce(samples)
        trial = self.retries.trial(episode)
        return [
            asyncio.create_task(self._announced(live, trial, sample))
            for live, sample in zip(announced, samples, strict=True)
        ]

    async def comparable(self, task: Task, traces: list[Trace]) -> list[Trace]:
        """Return the finished samples of one episode with rewards that can be compared.

        Group rewards are added, and what one sample does without is left out of all. None are left
        where a group reward failed as often as a sample may. Waits for the group rewards.
        """
        if not traces:
            return traces
        part, first = task.of(traces[0].task), traces[0]
        weights = part.reward_weights
        whole = without_left_out(traces, weights)
        if not part.group_rewards or len(whole) < SMALLEST_GROUP:
            return whole
        episode = Episode(first.task, first.split, first.index)
        group = [FinishedRollout.of(trace) for trace in whole]

        async def attempt(_: str) -> GroupScore:
            return await self._player.score_group(episode, group)

        name = f"{first.split}-{first.group_id:06d}-group"
        score = await self.retries.trial(episode).sample(name, attempt)
        return [] if score is None else with_group_score(whole, score, weights)

    def cached_prompts(self) -> dict[str, float | None]:
        """Return how many prompt tokens this process had sampled from since the last call.

        Without those of rollouts that an earlier process of the run has stored.
        """
        (prompt, cached), self._tokens = self._tokens, (0, 0)
        return {
            "generator/prompt_tokens": prompt,
            "generator/cached_tokens": cached,
            "generator/prefix_hit": cached / prompt if prompt else None,
        }

    async def close(self) -> None:
        """End the connections to whatever plays, after every sample has ended."""
        await self._player.close()

    async def _announced(
        self, live: AbstractContextManager[None], trial: EpisodeTrial, sample: Sample
    ) -> Trace | None:
        with live:
            return await trial.sample(sample.trace_id, partial(self._play, sample))

    async def _play(self, sample: Sample, session: str) -> Trace:
        played = await self._player.play(sample, session)
        prompt, cached = self._tokens
        self._tokens = (prompt + played.prompt_tokens, cached + played.cached_tokens)
        return played.trace
