"""The audit of a chaos run: each promise broken once, and found."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest

from composer_mesh.rollouts.traces import Trace, Turn

chaos: Any = importlib.import_module("chaos_audit")

RULES = chaos.Rules(prompts_per_step=2, group_size=2, max_lag=1)
STEPS = 2


def trace(group: int, sample: int, version: int) -> Trace:
    turn = Turn([1, 2], [3, 4], [-0.1, -0.2], [version, version], "stop")
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    name = f"train-{group:06d}-{sample:03d}"
    return Trace(name, group, sample, "toolbox", "train", group, [turn], said, 1.0, True, [])


def whole_run() -> list[Trace]:
    """Every sample of two steps, each sampled by the version that was newest."""
    return [trace(group, sample, group // 2) for group in range(4) for sample in range(2)]


def metrics(counts: tuple[int, ...], given_up: int) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [
        {"step": n, "rollouts/count": count} for n, count in enumerate(counts, 1)
    ]
    lines[0]["rollouts/given_up"] = given_up
    return lines


def found(traces: list[Trace], *, counts: tuple[int, ...] = (4, 4), **given: Any) -> Any:
    steps = metrics(counts, given.get("given_up", 0))
    seen, poisoned = given.get("first_seen", {}), given.get("poisoned", [])
    return chaos.audit(traces, steps, seen, poisoned, RULES)


def test_a_whole_run_has_nothing_to_tell() -> None:
    assert found(whole_run()) == chaos.Audit(0, 0, 0, 0, 0)


def test_a_sample_of_a_trained_step_that_is_not_on_disk_is_lost() -> None:
    assert found(whole_run()[1:]).traces_lost == 1


def test_a_group_that_the_run_shortened_without_a_word_is_lost_too() -> None:
    assert found(whole_run()[1:], counts=(3, 4)).traces_lost == 1


def test_samples_of_a_poisoned_episode_are_set_aside_and_not_lost() -> None:
    poisoned = [{"episode": {"split": "train", "index": 0}}]
    verdict = found(whole_run()[1:], counts=(3, 4), poisoned=poisoned)
    assert (verdict.traces_lost, verdict.given_up) == (0, 1)


def test_a_poisoned_episode_excuses_no_sample_that_was_trained() -> None:
    poisoned = [{"episode": {"split": "train", "index": 0}}]
    assert found(whole_run()[1:], counts=(4, 4), poisoned=poisoned).traces_lost == 1


def test_a_sample_whose_retries_the_run_says_were_used_up_is_not_lost() -> None:
    verdict = found(whole_run()[1:], counts=(3, 4), given_up=1)
    assert (verdict.traces_lost, verdict.given_up) == (0, 1)
    assert found(whole_run()[2:], counts=(2, 4), given_up=1).traces_lost == 1


def test_groups_that_no_step_has_taken_yet_are_not_missed() -> None:
    assert found(whole_run()[:5], counts=(4,)).traces_lost == 0


def test_a_trace_that_is_stored_twice_is_counted() -> None:
    assert found([*whole_run(), whole_run()[0]]).duplicates == 1


@pytest.mark.parametrize("version", [-1, 2])
def test_tokens_outside_the_window_are_counted(version: int) -> None:
    traces = whole_run()
    traces[0] = trace(0, 0, version)
    assert found(traces).lag_breaks == 2


def test_a_token_may_be_as_old_as_the_largest_lag() -> None:
    traces = whole_run()
    traces[-1] = trace(3, 1, 0)
    assert found(traces).lag_breaks == 0


def test_a_token_of_a_version_that_was_not_published_yet_is_counted() -> None:
    name = whole_run()[-1].trace_id
    traces = [*whole_run()[:-1], trace(3, 1, 2)]
    assert found(traces, first_seen={name: 0}).from_the_future == 2
    assert found(traces, first_seen={name: 1}).from_the_future == 0


@pytest.mark.parametrize(
    "wrong",
    [
        replace(trace(0, 0, 0), turns=[]),
        replace(trace(0, 0, 0), messages=[]),
        replace(trace(0, 0, 0), turns=[Turn([1], [], [], [], "stop")]),
    ],
    ids=["no turn", "no answer told", "an empty turn"],
)
def test_a_trace_that_is_no_finished_episode_is_broken(wrong: Trace) -> None:
    assert found([wrong, *whole_run()[1:]]).broken == 1


def test_held_out_traces_are_not_judged_by_the_schedule() -> None:
    heldout = replace(trace(9, 0, 7), trace_id="heldout-000009-000", split="heldout")
    assert found([*whole_run(), heldout]) == chaos.Audit(0, 0, 0, 0, 0)
