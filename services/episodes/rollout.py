"""Samples of episodes, played by a port and retried where an attempt fails.

The controller schedules episodes; `rollouts.episode` says how one is played, `retries` what happens
to a failed attempt.
"""

import asyncio
from collections import Counter
from contextlib import AbstractContextManager
from functools import partial

from composer_mesh.rollouts.episode import Sample, Sampling
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.episodes.retries import EpisodeTrial, Retries
from composer_mesh.services.steps.ports import Player


class Rollouts:
    """Plays samples of episodes with retries, on one event loop."""

    def __init__(self, player: Player, retries: Retries) -> None:
        self.retries = retries
        self._player = player
        self._tokens: Counter[str] = Counter()

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

    def figures(self) -> dict[str, int]:
        """Return the counts since the last call: of failures, and of prompt tokens."""
        tokens, self._tokens = self._tokens, Counter()
        return self.retries.figures() | {
            f"generator/{name}": tokens[name] for name in ("prompt_tokens", "cached_tokens")
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
        self._tokens["prompt_tokens"] += played.prompt_tokens
        self._tokens["cached_tokens"] += played.cached_tokens
        return played.trace
