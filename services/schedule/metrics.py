"""Metrics of one optimizer step: counts, means and durations. Pure functions.

Knows neither actors nor clocks: durations are passed to it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from composer_mesh.rollouts.batches import StepBatch, by_group
from composer_mesh.rollouts.pairs import teachers_margin
from composer_mesh.rollouts.traces import Trace, equal_rewards
from composer_mesh.services.replay.late_rewards import Corrections
from composer_mesh.services.replay.pair_stream import TakenPairs
from composer_mesh.services.steps.step_manifest import ReplayOutcome

MOST_TURNS = 10
"""Turns whose rewards are in the metrics."""


def step_metrics(
    batch: StepBatch,
    traces: Sequence[Trace],
    taken: TakenPairs | None,
    corrections: Corrections,
    trained: dict[str, Any],
) -> dict[str, Any]:
    """Return the counts and means of a step. Lags are in policy versions, money in US dollars."""
    versions = [version for trace in traces for version in trace.versions()]
    oldest = batch.oldest
    lags = [batch.step - one for one in versions if oldest is None or one >= oldest]
    return {
        "step": batch.step + 1,
        "policy_version": batch.step + 1,
        **trained,
        "reward/mean": _mean([trace.reward for trace in traces]),
        "reward/success": _mean([float(trace.success) for trace in traces]),
        **_named_rewards(traces),
        **_turn_rewards(traces),
        **{f"reward/success/{task}": one for task, (one, _) in success_of_tasks(traces).items()},
        "rollouts/count": len(traces),
        "rollouts/error_sites": sum(len(trace.error_sites) for trace in traces),
        "rollouts/turns": _mean([float(len(trace.turns)) for trace in traces]),
        **_sampled(traces),
        "rollouts/groups": len(by_group(traces)),
        "rollouts/flat_groups": _flat_groups(traces),
        "sdpo/views": len(batch.trained_views),
        "sdpo/refused_hints": batch.refused_hints,
        "sdpo/tokens": batch.sdpo_tokens,
        **_compared(batch),
        **(batch.hints.metrics() if batch.hints else {}),
        "replay/pairs": len(batch.pairs),
        **replay_metrics(batch.step, taken),
        **{f"late/{name}": corrections.counts[name] for name in ("rewards", "expired")},
        **_left_out(traces),
        "late/samples": len(corrections.changes),
        **({} if oldest is None else {"tokens/aged": len(versions) - len(lags)}),
        "lag/mean": _mean([float(lag) for lag in lags]),
        "lag/max": max(lags, default=0),
    }


def replay_metrics(step: int, taken: TakenPairs | None) -> dict[str, Any]:
    """Return the teachers' metrics since the previous step and the outcomes of their pairs.

    Dollars are what was charged; `saved_usd` is an estimate. Ages are in policy versions.
    """
    taken = taken or TakenPairs([], ReplayOutcome())
    replay_outcome = taken.replay_outcome
    margins = [teachers_margin(pair) for pair in taken.pairs]
    ages = [float(step - pair.rejected_version) for pair in taken.pairs]
    return {
        "replay/states": replay_outcome.states,
        "replay/skipped": replay_outcome.skipped,
        "replay/answers": replay_outcome.answers,
        "replay/cached": replay_outcome.cached,
        "replay/failures": sum(replay_outcome.failures.values()),
        **_named("replay/failed", replay_outcome.failures),
        **_named("replay/failed_by", replay_outcome.failed_by),
        **_named("replay/answered_by", replay_outcome.answered_by),
        **_named("replay/outcome", replay_outcome.outcomes),
        **_named("replay/dropped", replay_outcome.dropped),
        "replay/waiting": taken.waiting,
        "replay/expired": taken.expired,
        "replay/age": _mean(ages),
        "replay/teacher_margin": _mean(margins) if margins else None,
        "replay/agreement": replay_outcome.agreement,
        "replay/usd": replay_outcome.usd,
        "replay/usd_total": taken.usd_total,
        "replay/saved_usd": taken.saved_usd,
    }


def sync_metrics(waited_s: float, took_s: float) -> dict[str, float | None]:
    """Return the loop's wait for weights, the duration of the syncs, and the share that was
    overlapped.

    The share is None where no sync has ended.
    """
    return {
        "time/weight_sync_s": waited_s,
        "time/weight_sync_total_s": took_s,
        "weights/hidden_share": max(0.0, 1 - waited_s / took_s) if took_s else None,
    }


def success_of_tasks(traces: Sequence[Trace]) -> dict[str, tuple[float, int]]:
    """Return success and number of episodes of each task; empty where there is only one."""
    found: dict[str, list[float]] = {}
    for trace in traces:
        found.setdefault(trace.task, []).append(float(trace.success))
    if len(found) < 2:
        return {}
    return {task: (_mean(values), len(values)) for task, values in found.items()}


def _named_rewards(traces: Sequence[Trace]) -> dict[str, float]:
    """Return the mean of each reward function over the traces that have it, before weights."""
    names = sorted({name for trace in traces for name in trace.rewards})
    return {
        f"reward/of/{name}": _mean([t.rewards[name] for t in traces if name in t.rewards])
        for name in names
    }


def _turn_rewards(traces: Sequence[Trace]) -> dict[str, float]:
    """Return the mean reward of the first turns over the traces that give rewards to turns."""
    given = [trace.turn_rewards for trace in traces if trace.turn_rewards]
    turns = min(MOST_TURNS, max(map(len, given), default=0))
    return {
        f"reward/turn/{turn + 1}": _mean([one[turn] for one in given if turn < len(one)])
        for turn in range(turns)
    }


def _named(prefix: str, counts: Mapping[str, int]) -> dict[str, int]:
    return {f"{prefix}/{name}": counts[name] for name in sorted(counts)}


def _left_out(traces: Sequence[Trace]) -> dict[str, int]:
    """Return how many rollouts do without a reward whose judge could not be called."""
    count = sum(bool(trace.left_out) for trace in traces)
    return {"judge/left_out": count} if count else {}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _sampled(traces: Sequence[Trace]) -> dict[str, float | None]:
    """Return the sampled tokens of a rollout, their entropy, and the share of turns cut short.

    The entropy is the mean of -log p of the sampled tokens, in nats, which is without bias that of
    the distributions that they were sampled from; None without a token.
    """
    turns = [turn for trace in traces for turn in trace.turns if turn.trained]
    tokens = sum(len(turn.action_ids) for turn in turns)
    surprise = -sum(math.fsum(turn.logprobs) for turn in turns)
    return {
        "rollouts/tokens": tokens / len(traces) if traces else 0.0,
        "rollouts/entropy": surprise / tokens if tokens else None,
        "rollouts/cut_turns": _mean([float(turn.stop_reason == "length") for turn in turns]),
    }


def _flat_groups(traces: Sequence[Trace]) -> int:
    """Count the groups whose rewards are all equal."""
    return sum(map(equal_rewards, by_group(traces).values()))


def _compared(batch: StepBatch) -> dict[str, int]:
    """Return the number of right actions at which teacher and student are compared, if any."""
    compared = len(batch.views) - len(batch.trained_views)
    return {"sdpo/advantage_sites": compared} if compared else {}
