"""Shows an evaluation: a table by task, and one JSON object.

The directory of an evaluation: what it is about, so that only the same one continues in it.

Figures of an evaluation: success, pass@k and rewards by task, with intervals by episode.

An episode is one trial, however many samples it has: repeats make its estimate better, and the
interval no narrower. Pure functions over traces.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from composer_mesh.configs.paths import with_whole_paths
from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.open_folder import write_whole
from composer_mesh.mesh.untrusted_json import parsed_json, short_reason
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.directory.report import ABOUT_EVALUATION_FILE, wilson_interval
from composer_mesh.services.evaluation.target import EvalRefused, Target
from composer_mesh.services.inspection.page import plain_text


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


def evaluation_table(figures: Sequence[TaskFigures]) -> Table:
    """Return the figures as a printable table, a column for each task."""
    table = Table("", box=SIMPLE_HEAD)
    table.columns[0].style = "cyan"
    for one in figures:
        table.add_column(Text(plain_text(one.task, 40)))
    for label in dict.fromkeys(label for one in figures for label in _rows(one)):
        table.add_row(
            Text(plain_text(label, 40)), *(Text(_rows(one).get(label, "")) for one in figures)
        )
    return table


def evaluation_json(
    about: Mapping[str, Any], figures: Sequence[TaskFigures], failed: int
) -> dict[str, Any]:
    """Return the evaluation as a JSON object: what was evaluated, and the figures by task."""
    tasks = {one.task: one.as_json() for one in figures}
    return {**about, "failed_samples": failed, "tasks": tasks}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object in place of a file; raises OSError."""
    write_whole(path, json.dumps(value, indent=2, allow_nan=False).encode() + b"\n")


def _rows(one: TaskFigures) -> dict[str, str]:
    repeated = {f"pass@{k}": _share(share) for k, share in one.pass_at.items() if k > 1}
    return {
        "episodes": f"{one.episodes:,}",
        "samples": f"{one.samples:,}",
        "success": _share(one.success),
        **repeated,
        "reward": f"{one.reward:.3f}",
        **{f"  {name}": f"{value:.3f}" for name, value in one.rewards.items()},
        "turns": f"{one.turns:.1f}",
        "errors": f"{one.errors:.1f}",
    }


def _share(share: Share) -> str:
    low, high = share.interval
    return f"{share.mean:.1%}  ({low:.1%} to {high:.1%})"


LONGEST = 1 << 20
SECTIONS = ("data", "environment", "policy", "generator", "rollouts")
"""Sections of the config on which results depend."""


def about(target: Target, model: str, samples: int, max_tokens: int) -> dict[str, Any]:
    """Return what an evaluation is about; equal ones may share their results."""
    config = with_whole_paths(target.config)
    return {
        "target": target.name,
        "model": model,
        "task": config.data.task,
        "samples": samples,
        "temperature": config.eval.temperature,
        "max_tokens": max_tokens,
        "seed": config.run.seed,
        "config": _digest(config),
    }


def open_output(output: Path, now: Mapping[str, Any], resume: bool) -> str:
    """Write what the evaluation is about, or compare it with what is there; raises EvalRefused.

    Returns the day on which it began, as 2026-01-31.
    """
    today = date.today().isoformat()
    if resume:
        return str(_same(output, now).get("begun", today))
    write_json(output / ABOUT_EVALUATION_FILE, {**now, "begun": today})
    return today


def _same(output: Path, now: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a directory says its evaluation is about, which has to be the same."""
    path = output / ABOUT_EVALUATION_FILE
    try:
        before = parsed_json(read_regular(path, LONGEST))
    except (OSError, ValueError) as error:
        raise EvalRefused(
            f"--resume: {path} cannot be read ({short_reason(error)}): leave --resume out to begin"
        ) from None
    for key, value in now.items():
        found = before.get(key) if isinstance(before, dict) else None
        if found != value:
            raise EvalRefused(
                f"--resume {output}: its {key} is {json.dumps(found)[:80]} but that of this "
                f"command is {json.dumps(value)[:80]}: give the same, or leave --resume out"
            )
    return dict(before)


def _digest(config: Config) -> str:
    parts = [config.model_dump_json(include={name}) for name in SECTIONS]
    return sha256("\n".join(parts).encode()).hexdigest()[:16]
