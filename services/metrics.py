"""The metrics of one optimizer step, from what was trained and how long it took.

Pure; which step it is and where it is written are the controller's and the store's business.
"""

from collections.abc import Sequence
from typing import Any

from composer_mesh.rollouts.batches import StepBatch
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.replay import Replayed


def step_metrics(
    batch: StepBatch, traces: Sequence[Trace], replayed: Replayed, trained: dict[str, Any]
) -> dict[str, Any]:
    """Counts and means over a step. Lags are in policy versions, money in US dollars."""
    lags = [
        batch.step - version
        for trace in traces
        for turn in trace.turns
        for version in turn.versions
    ]
    return {
        "step": batch.step + 1,
        "policy_version": batch.step + 1,
        **trained,
        "reward/mean": _mean([trace.reward for trace in traces]),
        "reward/success": _mean([float(trace.success) for trace in traces]),
        "rollouts/count": len(traces),
        "rollouts/error_sites": sum(len(trace.error_sites) for trace in traces),
        "rollouts/turns": _mean([float(len(trace.turns)) for trace in traces]),
        "rollouts/flat_groups": _flat_groups(traces),
        "sdpo/views": len(batch.views),
        "sdpo/refused_hints": batch.refused_hints,
        "sdpo/tokens": batch.sdpo_tokens,
        **(batch.hints.metrics() if batch.hints else {}),
        "replay/states": replayed.states,
        "replay/pairs": len(batch.pairs),
        "replay/failures": replayed.failures,
        "replay/usd": replayed.usd,
        "lag/mean": _mean([float(lag) for lag in lags]),
        "lag/max": max(lags, default=0),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _flat_groups(traces: Sequence[Trace]) -> int:
    """Groups whose rewards are all equal; they teach the policy channel nothing."""
    rewards: dict[int, set[float]] = {}
    for trace in traces:
        rewards.setdefault(trace.group_id, set()).add(trace.reward)
    return sum(len(values) == 1 for values in rewards.values())
