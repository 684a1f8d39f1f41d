"""Metrics: counts and means of one step, and how old what it trained on was."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from composer_mesh.channels.policy import policy_sample
from composer_mesh.rollouts.alignment import HintedView
from composer_mesh.rollouts.batches import PairSample, StepBatch
from composer_mesh.rollouts.traces import ErrorSite, Trace, Turn
from composer_mesh.services.replay.late_rewards import Corrections
from composer_mesh.services.replay.pair_stream import TakenPairs
from composer_mesh.services.schedule.metrics import step_metrics
from composer_mesh.services.steps.step_manifest import ReplayOutcome

SITE = ErrorSite(0, "no_answer", "no_answer", {})
VIEW = HintedView("g0-0", 0, [1, 2, 3], [0, 1], [0, 1], [2, 3])


def trace_of(group: int, sample: int, reward: float, versions: list[int], sites: int = 0) -> Trace:
    turns = [Turn([1], [2], [-1.0], [version], "stop") for version in versions]
    name = f"g{group}-{sample}"
    found = [SITE] * sites
    return Trace(name, group, sample, "t", "train", 0, turns, [], reward, reward == 1, found)


TRACES = [
    trace_of(0, 0, 1.0, [4, 5], 1),
    trace_of(0, 1, 0.0, [3], 2),
    trace_of(1, 0, 0.5, [5]),
    trace_of(1, 1, 0.5, [5]),
]


def batch_of(traces: list[Trace]) -> StepBatch:
    samples = [policy_sample(trace, 0.0) for trace in traces]
    return StepBatch(5, samples, [VIEW], [PairSample("p", [1], [2], [3])])


def test_a_step_reports_what_it_trained_on() -> None:
    replay_outcome = ReplayOutcome(
        states=6,
        skipped=3,
        answers=16,
        cached=4,
        usd=0.25,
        outcomes=Counter(pair=5, tie=1),
        failures=Counter(rate=2),
        dropped=Counter(length=4),
    )
    taken = TakenPairs([], replay_outcome, expired=1, waiting=7, usd_total=1.5, saved_usd=0.125)
    corrections = Corrections([(TRACES[0], 1.0)], Counter(rewards=2))
    metrics = step_metrics(batch_of(TRACES), TRACES, taken, corrections, {"loss/total": 0.5})
    assert metrics == {
        "step": 6,
        "policy_version": 6,
        "loss/total": 0.5,
        "reward/mean": 0.5,
        "reward/success": 0.25,
        "rollouts/count": 4,
        "rollouts/error_sites": 3,
        "rollouts/turns": 1.25,
        "rollouts/tokens": 1.25,
        "rollouts/entropy": 1.0,
        "rollouts/cut_turns": 0.0,
        "rollouts/groups": 2,
        "rollouts/flat_groups": 1,
        "sdpo/views": 1,
        "sdpo/refused_hints": 0,
        "sdpo/tokens": 2,
        "replay/states": 6,
        "replay/skipped": 3,
        "replay/answers": 16,
        "replay/cached": 4,
        "replay/pairs": 1,
        "replay/failures": 2,
        "replay/failed/rate": 2,
        "replay/outcome/pair": 5,
        "replay/outcome/tie": 1,
        "replay/dropped/length": 4,
        "replay/waiting": 7,
        "replay/expired": 1,
        "replay/age": 0.0,
        "replay/teacher_margin": None,
        "replay/agreement": 0.0,
        "replay/usd": 0.25,
        "replay/usd_total": 1.5,
        "replay/saved_usd": 0.125,
        "late/rewards": 2,
        "late/expired": 0,
        "late/samples": 1,
        "lag/mean": pytest.approx(3 / 5),
        "lag/max": 2,
    }


def test_lag_is_counted_for_every_token_against_the_version_that_is_trained() -> None:
    turn = Turn([1], [2, 3, 4], [-1.0] * 3, [5, 2, 5], "stop")
    trace = Trace("g", 0, 0, "t", "train", 0, [turn], [], 0.0, False, [])
    metrics = step_metrics(batch_of([trace]), [trace], None, Corrections(), {})
    assert (metrics["lag/max"], metrics["lag/mean"]) == (3, 1.0)


def test_a_step_without_a_sampled_token_has_figures_all_the_same() -> None:
    empty = Trace("g", 0, 0, "t", "train", 0, [], [], 0.0, False, [])
    metrics = step_metrics(StepBatch(0, [], [], []), [empty], None, Corrections(), {})
    assert (metrics["lag/max"], metrics["lag/mean"], metrics["rollouts/turns"]) == (0, 0.0, 0.0)
    assert (metrics["rollouts/tokens"], metrics["rollouts/entropy"]) == (0.0, None)


def test_sampled_tokens_their_entropy_and_the_turns_that_were_cut() -> None:
    turns = [
        Turn([1], [2, 3, 4], [-1.0, -0.5, 0.0], [0] * 3, "stop"),
        Turn([1], [2], [-2.5], [0], "length"),
        Turn([1], [2] * 9, [0.0] * 9, [0] * 9, "length", trained=False),
    ]
    traces = [Trace("g", 0, n, "t", "train", 0, turns[n:], [], 0.0, False, []) for n in (0, 1)]
    metrics = step_metrics(batch_of(traces), traces, None, Corrections(), {})
    assert metrics["rollouts/tokens"] == (4 + 1) / 2
    assert metrics["rollouts/entropy"] == pytest.approx((1.5 + 2 * 2.5) / 5)
    assert metrics["rollouts/cut_turns"] == pytest.approx(2 / 3)


def test_what_groups_cost_adds_up() -> None:
    total = ReplayOutcome(states=1, failures=Counter(rate=1), usd=0.1)
    total += ReplayOutcome(states=2, failures=Counter(rate=1, timeout=1), usd=0.2)
    assert (total.states, total.failures) == (3, {"rate": 2, "timeout": 1})
    assert total.usd == pytest.approx(0.3)


def test_rewards_of_turns_are_means_over_the_rollouts_that_have_the_turn() -> None:
    traces = [
        replace(TRACES[0], turn_rewards=[1.0, 0.5]),
        replace(TRACES[1], turn_rewards=[0.0]),
        TRACES[2],
    ]
    metrics = step_metrics(batch_of(traces), traces, None, Corrections(), {})
    found = {name: value for name, value in metrics.items() if name.startswith("reward/turn/")}
    assert found == {"reward/turn/1": 0.5, "reward/turn/2": 0.5}
