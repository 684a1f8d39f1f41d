"""The audit of a chaos run: each promise broken once, and found."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest

from composer_mesh.configs.schedule import ScheduleConfig
from composer_mesh.rollouts.traces import Trace, Turn

chaos: Any = importlib.import_module("chaos_audit")
taken_groups: Any = importlib.import_module("taken_groups")

RULES = ScheduleConfig(prompts_per_step=2, group_size=2, max_lag=1)
DYNAMIC = RULES.model_copy(update={"dynamic_sampling": True, "oversampling": 2.0})
STEPS = 2


def trace(group: int, sample: int, version: int, reward: float = 1.0) -> Trace:
    turn = Turn([1, 2], [3, 4], [-0.1, -0.2], [version, version], "stop")
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    name = f"train-{group:06d}-{sample:03d}"
    return Trace(name, group, sample, "toolbox", "train", group, [turn], said, reward, True, [])


def whole_run() -> list[Trace]:
    """Every sample of two steps, each sampled by the version that was newest."""
    return [trace(group, sample, group // 2) for group in range(4) for sample in range(2)]


def metrics(counts: tuple[int, ...], given_up: int) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [
        {"step": n, "rollouts/count": count} for n, count in enumerate(counts, 1)
    ]
    lines[0]["rollouts/given_up"] = given_up
    return lines


def steps_of(*taken: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Any]:
    """The groups that each step trained and dropped."""
    return [taken_groups.TakenGroups(step, *groups) for step, groups in enumerate(taken)]


TAKEN = steps_of(((0, 1), ()), ((2, 3), ()))


def found(traces: list[Trace], *, counts: tuple[int, ...] = (4, 4), **given: Any) -> Any:
    steps = metrics(counts, given.get("given_up", 0))
    seen, poisoned = given.get("first_seen", {}), given.get("poisoned", [])
    return chaos.audit(traces, steps, TAKEN[: len(counts)], seen, poisoned, RULES)


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


def sampled_dynamically() -> list[Trace]:
    """Two steps of two groups each, and group 1 between them, whose rewards are equal."""
    versions = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1}
    return [
        trace(group, sample, version, float(group == 1 or sample))
        for group, version in versions.items()
        for sample in range(2)
    ]


REFILLED = steps_of(((0, 2), (1,)), ((3, 4), ()))


def found_dynamically(
    traces: list[Trace], taken: list[Any] = REFILLED, sampled: tuple[int, int] = (6, 4)
) -> Any:
    lines = [
        line | {"rollouts/sampled": count}
        for line, count in zip(metrics((4, 4), 0), sampled, strict=True)
    ]
    return chaos.audit(traces, lines, taken, {}, [], DYNAMIC)


def test_a_group_that_dynamic_sampling_dropped_and_replaced_is_nothing_to_tell() -> None:
    assert found_dynamically(sampled_dynamically()) == chaos.Audit(0, 0, 0, 0, 0)


@pytest.mark.parametrize("gone", range(10))
def test_a_sample_is_lost_whether_its_group_was_trained_or_dropped(gone: int) -> None:
    traces = sampled_dynamically()
    del traces[gone]
    assert found_dynamically(traces).traces_lost == 1


def test_a_trained_group_is_as_new_as_the_step_needs_that_took_it() -> None:
    traces = sampled_dynamically()
    traces[-2:] = [trace(4, sample, 2, float(sample)) for sample in range(2)]
    assert found_dynamically(traces).lag_breaks == 4


@pytest.mark.parametrize(
    ("taken", "what"),
    [
        (steps_of(((0, 1), ()), ((2, 3), ())), "trained group 1, whose rewards are all equal"),
        (steps_of(((0, 3), (1, 2)), ((4, 5), ())), "dropped group 2, whose rewards differ"),
        (steps_of(((0, 3), (1,)), ((2, 4), ())), "took the groups [0, 1, 3] and not [0, 1, 2]"),
        (steps_of(((0, 2), (1,)), ((2, 3), ())), "took the groups [2, 3] and not [3, 4]"),
        (steps_of(((0,), (1,)), ((2, 3), ())), "trained 1 groups, and stopped after 2 of 4"),
        (steps_of(((0, 2, 3), (1,)), ((4, 5), ())), "trained 3 groups in place of 2"),
        (steps_of(((0,), (1, 5, 6, 7)), ((8, 9), ())), "took 5 groups and may take 4"),
    ],
)
def test_what_a_step_took_or_dropped_against_the_rules_is_told(taken: list[Any], what: str) -> None:
    assert any(what in one for one in found_dynamically(sampled_dynamically(), taken).violations)


def test_a_group_with_tokens_that_are_too_old_may_be_dropped() -> None:
    traces = sampled_dynamically()
    refilled = steps_of(((0, 2), (1,)), ((4, 5), (3,)))
    traces += [trace(5, sample, 1, float(sample)) for sample in range(2)]
    assert found_dynamically(traces, refilled, (6, 6)).violations
    late = [*refilled, taken_groups.TakenGroups(2, (7, 8), (6,))]
    for group, version in ((6, 0), (7, 1), (8, 1)):
        traces += [trace(group, sample, version, float(sample)) for sample in range(2)]
    told = found_dynamically(traces, late, (6, 6)).violations
    assert not any("group 6" in one for one in told)


def test_a_run_without_dynamic_sampling_drops_nothing() -> None:
    taken = steps_of(((0, 2), (1,)), ((3, 4), ()))
    told = chaos.audit(sampled_dynamically(), metrics((4, 4), 0), taken, {}, [], RULES).violations
    assert any("dropped group 1" in one for one in told)
