"""Names of figures in trackers: those of TRL where it has one, our own for the rest.

Whoever compares with a run of TRL finds the same quantity under the same name. docs/trackers.md has
the table, which a test compares with this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

NAMES = {
    "loss/total": "train/loss",
    "loss/policy": "train/policy_loss",
    "loss/sdpo": "train/sdpo_loss",
    "loss/replay": "train/replay_loss",
    "policy/lr": "train/learning_rate",
    "policy/grad_norm": "train/grad_norm",
    "policy/entropy": "train/entropy",
    "policy/clipped_fraction": "train/clip_ratio/region_mean",
    "reward/mean": "train/reward",
    "reward/success": "train/success_rate",
    "logprob_mismatch/mean": "train/sampling/sampling_logp_difference/mean",
    "logprob_mismatch/max": "train/sampling/sampling_logp_difference/max",
    "replay/accuracy": "train/rewards/accuracies",
    "replay/margin": "train/rewards/margins",
    "replay/chosen_reward": "train/rewards/chosen",
    "replay/rejected_reward": "train/rewards/rejected",
    "time/step_s": "train/step_time",
}
"""Names in trackers by those of `metrics.jsonl`."""
REWARD_FUNCTION = "reward/of/"


class Names:
    """Converts metrics of steps in order; counts what trackers show as totals."""

    def __init__(self, trained_tokens: float = 0.0) -> None:
        self._tokens = trained_tokens

    def of_step(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return the finite numbers of a step under their names in trackers."""
        values = {
            name_of(key): float(value)
            for key, value in metrics.items()
            if key != "step" and is_figure(value)
        }
        self._tokens += values.get("tokens/trained", 0.0)
        values["train/num_tokens"] = self._tokens
        if seconds := metrics.get("time/step_s"):
            values["perf/tokens_per_s"] = float(metrics.get("tokens/trained") or 0) / seconds
        return values


def trained_tokens(steps: Iterable[Mapping[str, Any]]) -> float:
    """Return the tokens that these steps have trained."""
    return math.fsum(step.get("tokens/trained") or 0 for step in steps)


def name_of(key: str) -> str:
    """Return the name of a metric in trackers."""
    if key.startswith(REWARD_FUNCTION):
        return f"train/rewards/{key.removeprefix(REWARD_FUNCTION)}/mean"
    return NAMES.get(key, key)


def of_evaluation(
    success: float,
    interval: tuple[float, float],
    episodes: int,
    tasks: Mapping[str, tuple[float, int]],
) -> dict[str, float]:
    """Return the figures of a held-out evaluation; the interval is the 95 % one of its success."""
    return {
        "eval/success_rate": success,
        "eval/success_low": interval[0],
        "eval/success_high": interval[1],
        "eval/episodes": float(episodes),
        **{f"eval/success_rate/{task}": share for task, (share, _) in tasks.items()},
    }


def is_figure(value: Any) -> bool:
    """Whether a metric is a finite number; channels that are off have none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
