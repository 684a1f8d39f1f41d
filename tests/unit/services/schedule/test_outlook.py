"""The first step says what a run will take; configured parts without effect are warned of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from composer_mesh.services.directory.channel_activity import WARNINGS
from composer_mesh.services.schedule.outlook import IDLE_STEPS, Outlook

Step = dict[str, Any]


@pytest.fixture
def outlook(build_config: Any) -> Any:
    def build(steps: int = 20, every: int = 0, channels: tuple[str, ...] = ("policy",)) -> Outlook:
        config = build_config(run={"name": "o", "steps": steps}, eval={"every": every})
        return Outlook(config, channels)

    return build


def metrics(step: int, *, flat: int = 0, reward: float = 0.5, seconds: float = 165) -> Step:
    return {
        "step": step,
        "time/step_s": seconds,
        "rollouts/count": 64,
        "rollouts/groups": 8,
        "rollouts/flat_groups": flat,
        "reward/mean": reward,
        "loss/policy": 0.1,
        "loss/sdpo": None,
        "loss/replay": None,
    }


def events(
    found: Outlook, *steps: Step, reasons: Mapping[str, str] | None = None
) -> list[tuple[int, str, str]]:
    return [(step["step"], *event) for step in steps for event in found.after(step, reasons or {})]


def warnings(found: Outlook, kind: str, *steps: Step, **given: Any) -> list[tuple[int, str]]:
    assert kind in WARNINGS
    return [(step, text) for step, one, text in events(found, *steps, **given) if one == kind]


def test_the_first_step_says_what_the_others_will_take(outlook: Any) -> None:
    found = outlook()
    assert events(found, metrics(1), metrics(2)) == [
        (
            1,
            "run_outlook",
            "step 1 took 2 min 45 s; 19 more will take about 52 min 15 s, and evaluations, of "
            "which none has been measured",
        )
    ]


def test_evaluations_that_were_measured_are_counted(outlook: Any) -> None:
    found = outlook(steps=20, every=5)
    found.evaluated(60.0)
    ((_, _, text),) = events(found, metrics(5))
    # After steps 5, 10 and 15, and at the end.
    assert text.endswith("15 more will take about 41 min 15 s, and 4 evaluations 4 min 00 s")


def test_a_run_of_one_step_has_nothing_to_foretell(outlook: Any) -> None:
    assert events(outlook(steps=1), metrics(1)) == []


def test_flat_steps_in_a_row_are_warned_of_at_doubling_distances(outlook: Any) -> None:
    steps = [metrics(one, flat=8, reward=0.0) for one in range(1, 45)]
    found = warnings(outlook(100), "groups_flat", *steps)
    assert [step for step, _ in found] == [
        IDLE_STEPS,
        2 * IDLE_STEPS,
        4 * IDLE_STEPS,
        8 * IDLE_STEPS,
    ]
    assert found[0][1].startswith(
        "policy: configured, active in 0 of the last 5 steps: 40 of 40 groups had equal rewards; "
        "no rollout earned a reward: raise schedule.group_size"
    )
    assert "0 of the last 10 steps: in the last 5: 40 of 40 groups" in found[1][1]
    assert found[0][1].endswith("composer-mesh sft")


def test_a_step_with_a_mixed_group_begins_the_count_again(outlook: Any) -> None:
    steps = [metrics(one, flat=7 if one == 5 else 8, reward=1.0) for one in range(1, 11)]
    ((step, text),) = warnings(outlook(), "groups_flat", *steps)
    assert step == 10
    assert "no rollout earned" not in text


def test_a_step_without_groups_has_no_gradient(outlook: Any) -> None:
    dropped = {"rollouts/groups": 0, "rollouts/flat_groups": 0, "rollouts/dropped_groups": 16}
    steps = [metrics(one) | dropped for one in range(1, 6)]
    ((_, text),) = warnings(outlook(), "groups_flat", *steps)
    assert "80 of 80 groups had equal rewards" in text


def test_a_supervised_run_is_not_warned_of_rewards(outlook: Any) -> None:
    steps = [metrics(n) | {"loss/sft": 1.0, "rollouts/groups": 0} for n in range(1, 12)]
    found = events(outlook(channels=("sft",)), *steps)
    assert [kind for _, kind, _ in found] == ["run_outlook"]


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ({}, "no error sites in 320 rollouts"),
        ({"rollouts/error_sites": 3}, "no hint source had a hint for 15 error sites"),
        ({"rollouts/error_sites": 3, "hints/unwritten": 2}, "10 hints could not be written"),
        ({"rollouts/error_sites": 3, "hints/refused": 3}, "15 hints contained the answer"),
        ({"sdpo/views": 2}, "10 hinted turns had no answer of an SDPO teacher"),
    ],
)
def test_an_sdpo_channel_without_hints_is_warned_of(outlook: Any, step: Step, why: str) -> None:
    found = outlook(channels=("policy", "sdpo"))
    ((at, text),) = warnings(found, "hints_missing", *[metrics(n) | step for n in range(1, 10)])
    assert at == IDLE_STEPS
    assert text.startswith(f"sdpo: configured, active in 0 of the last 5 steps: {why}: ")
    assert text.endswith("set sdpo.alpha to 0")


def test_steps_in_which_the_schedule_rests_a_channel_are_not_warned_of(outlook: Any) -> None:
    steps = [metrics(one) | {"sdpo/alpha": 0.0} for one in range(1, 10)]
    assert warnings(outlook(channels=("sdpo",)), "hints_missing", *steps) == []


def test_a_channel_of_a_plugin_without_samples_is_warned_of(outlook: Any) -> None:
    steps = [metrics(one) | {"loss/echo": None, "echo/weight": 0.1} for one in range(1, 6)]
    ((_, text),) = warnings(outlook(channels=("policy", "echo")), "channel_inactive", *steps)
    assert text == (
        "echo: configured, active in 0 of the last 5 steps: no samples of 320 rollouts: look at "
        "what its samples() returns, or set channels.echo.weight to 0"
    )


def test_a_short_run_is_warned_at_its_end_of_channels_that_never_worked(outlook: Any) -> None:
    found = outlook(steps=2, channels=("policy", "sdpo", "replay"))
    agree = {"replay/answers": 9, "replay/outcome/student_agrees": 3}
    step = metrics(1) | {"loss/sdpo": 0.1} | agree
    assert [kind for _, kind, _ in events(found, step, metrics(2, flat=8))] == ["run_outlook"]
    ((kind, text),) = found.at_end({}, {})
    assert kind == "channel_inactive"
    assert text.startswith(
        "replay: configured, active in 0 of the last 2 steps: 3 x student agrees: lower replay."
    )


def compared(step: int, sites: int, wins: float | None) -> Step:
    """A step that compared the hinted teacher with the student at some right actions."""
    return {**metrics(step), "sdpo/advantage_sites": sites, "sdpo/advantage_wins": wins}


def test_hints_that_help_at_half_of_the_sites_or_fewer_are_warned_of(outlook: Any) -> None:
    steps = [compared(one, 4, 0.25) for one in range(1, 20)]
    found = warnings(outlook(100), "hints_do_not_help", *steps)
    assert [step for step, _ in found] == [4, 8, 16]
    assert "at 4 of 16 sites" in found[0][1]


def test_hints_that_help_are_not_warned_of(outlook: Any) -> None:
    kind, steps = "hints_do_not_help", range(1, 10)
    assert warnings(outlook(), kind, *[compared(one, 4, 0.75) for one in steps]) == []
    assert warnings(outlook(), kind, *[compared(one, 0, None) for one in steps]) == []


def asked(step: int, answered: Mapping[str, int], failed: Mapping[str, int]) -> Step:
    """A step whose teachers gave so many answers, and failed so often ("401/NAME")."""
    return {
        **metrics(step),
        "replay/answers": sum(answered.values()),
        "replay/failures": sum(failed.values()),
        **{f"replay/answered_by/{name}": count for name, count in answered.items()},
        **{f"replay/failed_by/{place}": count for place, count in failed.items()},
    }


REASONS = {
    "401/a": "teacher 'a': status 401: no key: check the key",
    "budget/b": "teacher 'b': at most 1 USD: raise replay.budget.usd",
    "suspended/a": "teacher 'a': 5 requests failed in a row: see to what it last failed with",
}


def test_teachers_that_never_answer_are_warned_of(outlook: Any) -> None:
    refused, found = {"401/a": 6, "401/b": 6}, outlook(100)
    steps = [asked(1, {}, refused), asked(2, {}, {}), asked(3, {}, refused), asked(4, {}, refused)]
    steps += [asked(5, {}, refused), asked(6, {"a": 1, "b": 1}, refused), asked(7, {}, refused)]
    told = warnings(found, "teacher_failing", *steps, reasons=REASONS)
    assert [step for step, _ in told] == [1, 3, 5, 7]
    assert told[0][1] == (
        "a and b answered none of 12 queries in step 1 (12 x 401): teacher 'a': status 401: no "
        "key: check the key"
    )


def test_one_teacher_that_fails_among_others_is_warned_of(outlook: Any) -> None:
    step = asked(1, {"b": 4, "vendor/c": 4}, {"timeout/b": 1, "404/vendor/a": 5})
    ((_, text),) = warnings(outlook(), "teacher_failing", step)
    assert text == (
        "vendor/a answered none of 5 queries in step 1 (5 x 404): serve them at the base_url of "
        "[[replay.teachers]], or set replay.beta to 0"
    )


def test_refusals_by_budget_and_suspended_teachers_have_events_of_their_own(outlook: Any) -> None:
    step = asked(1, {"b": 9}, {"budget/b": 36, "budget/c": 3, "suspended/a": 12})
    found = events(outlook(steps=1), step, reasons=REASONS)
    assert sorted(text for _, _, text in found) == [
        "12 of 60 queries to a not sent in step 1: teacher 'a': 5 requests failed in a row: see "
        "to what it last failed with",
        "39 of 60 queries to b and c refused by budget in step 1: teacher 'b': at most 1 USD: "
        "raise replay.budget.usd",
    ]
    assert {kind for _, kind, _ in found} == {"budget_reached", "teacher_suspended"}


def test_a_replay_channel_whose_teachers_all_fail_is_warned_of_once(outlook: Any) -> None:
    # Late answers are counted in every other step.
    steps = [asked(one, {}, {"401/a": 6} if one % 2 else {}) for one in range(1, 12)]
    found = outlook(channels=("replay",))
    assert {kind for _, kind, _ in events(found, *steps)} == {"run_outlook", "teacher_failing"}
    short = outlook(steps=2, channels=("replay",))
    assert events(short, asked(2, {}, {})) == []
    late = asked(3, {}, {"401/a": 6})
    assert [kind for kind, _ in short.at_end(late, {})] == ["teacher_failing"]


def test_failures_after_the_last_step_are_warned_of(outlook: Any) -> None:
    found = outlook(steps=1)
    assert events(found, metrics(1)) == []
    ((kind, text),) = found.at_end({"replay/failed_by/401/a": 3, "replay/failures": 3}, REASONS)
    assert kind == "teacher_failing"
    assert text.startswith("a answered none of 3 queries after the last step (3 x 401): teacher")


def flagged(*shares: float | None) -> list[Step]:
    steps = [{**metrics(n), "reward/of/flagged": share} for n, share in enumerate(shares, 1)]
    return [{key: one for key, one in step.items() if one is not None} for step in steps]


def test_the_onset_of_flagged_rollouts_is_reported_once(outlook: Any) -> None:
    rising = flagged(*[0.0] * 10, *[0.25] * 10)
    assert [step for step, _ in warnings(outlook(), "flagged_onset", *rising)] == [12]
    again = flagged(*[0.0] * 10, *[0.25] * 10, *[0.0] * 10, *[1.0] * 3)
    assert [step for step, _ in warnings(outlook(), "flagged_onset", *again)] == [12, 31]


@pytest.mark.parametrize("shares", [[0.05] * 40, [*[0.0] * 10, 0.2, *[0.0] * 9], [None]])
def test_a_share_that_does_not_rise_and_stay_is_no_onset(outlook: Any, shares: list[float]) -> None:
    assert warnings(outlook(), "flagged_onset", *flagged(*shares)) == []


def test_flagged_rollouts_from_the_start_are_an_onset(outlook: Any) -> None:
    steps = flagged(*[0.5] * 12)
    ((step, text),) = warnings(outlook(), "flagged_onset", *steps)
    assert step == 1
    assert "after 0% before" in text
