"""Figures of an evaluation: success, pass@k and rewards by task, with intervals by episode.

An episode is one trial, however many samples it has: repeats make its estimate better, and the
interval no narrower. Pure functions over traces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.directory.report import wilson_interval


@dataclass(frozen=True)
class Share:
    """A mean over `episodes` episodes of values between 0 and 1."""

    mean: float
    episodes: int

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval; at least that for more than one sample an episode."""
        return wilson_interval(self.mean, self.episodes)

    def as_json(self) -> dict[str, Any]:
        low, high = self.interval
        interval = [round(low, 4), round(high, 4)]
        return {"mean": self.mean, "episodes": self.episodes, "interval_95": interval}


@dataclass(frozen=True)
class TaskFigures:
    """Figures of one task; `pass_at` has those episodes that have at least k samples."""

    task: str
    episodes: int
    samples: int
    success: Share
    pass_at: dict[int, Share]
    reward: float
    rewards: dict[str, float]
    turns: float
    errors: float

    def as_json(self) -> dict[str, Any]:
        return {
            "episodes": self.episodes,
            "samples": self.samples,
            "success": self.success.as_json(),
            "pass_at": {str(k): share.as_json() for k, share in self.pass_at.items()},
            "reward": self.reward,
            "rewards": self.rewards,
            "turns": self.turns,
            "errors": self.errors,
        }


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k samples succeeds.

    1 - C(samples - successes, k) / C(samples, k), of Chen et al., 2021; raises ValueError where
    there are fewer than k samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k} but there are {samples} samples: choose k from 1 to {samples}")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def figures_by_task(traces: Iterable[Trace]) -> list[TaskFigures]:
    """Return the figures of each task, by name."""
    found: dict[str, dict[int, list[Trace]]] = {}
    for trace in traces:
        found.setdefault(trace.task, {}).setdefault(trace.index, []).append(trace)
    return [_figures(task, list(found[task].values())) for task in sorted(found)]


def _figures(task: str, episodes: Sequence[Sequence[Trace]]) -> TaskFigures:
    traces = [trace for episode in episodes for trace in episode]
    names = sorted({name for trace in traces for name in trace.rewards})
    largest = max(len(episode) for episode in episodes)
    return TaskFigures(
        task,
        len(episodes),
        len(traces),
        _pass_at(episodes, 1),
        {k: _pass_at(episodes, k) for k in _ks(largest)},
        _mean_by_episode([[trace.reward for trace in episode] for episode in episodes]),
        {
            name: _mean_by_episode([[one.rewards.get(name, 0.0) for one in e] for e in episodes])
            for name in names
        },
        _mean_by_episode([[float(_turns(trace)) for trace in episode] for episode in episodes]),
        _mean_by_episode([[float(len(one.error_sites)) for one in e] for e in episodes]),
    )


def _pass_at(episodes: Sequence[Sequence[Trace]], k: int) -> Share:
    counted = [
        pass_at_k(len(episode), sum(trace.success for trace in episode), k)
        for episode in episodes
        if len(episode) >= k
    ]
    return Share(sum(counted) / len(counted), len(counted))


def _ks(samples: int) -> list[int]:
    """Return 1, 2, 4, … up to the number of samples, and that number."""
    powers = [2**power for power in range(samples.bit_length()) if 2**power <= samples]
    return sorted({*powers, samples})


def _mean_by_episode(values: Sequence[Sequence[float]]) -> float:
    return sum(sum(one) / len(one) for one in values) / len(values)


def _turns(trace: Trace) -> int:
    return sum(message["role"] == "assistant" for message in trace.messages)
