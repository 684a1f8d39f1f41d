"""The first step says what a run will take; rewards that teach nothing are warned of."""

from __future__ import annotations

from typing import Any

import pytest

from composer_mesh.services.schedule.metrics import FLAT_STEPS, Outlook


@pytest.fixture
def outlook(build_config: Any) -> Any:
    def build(steps: int = 20, every: int = 0) -> Outlook:
        return Outlook(build_config(run={"name": "o", "steps": steps}, eval={"every": every}))

    return build


def metrics(
    step: int, *, flat: int = 0, reward: float = 0.5, seconds: float = 165
) -> dict[str, Any]:
    return {
        "step": step,
        "time/step_s": seconds,
        "rollouts/groups": 8,
        "rollouts/flat_groups": flat,
        "reward/mean": reward,
    }


def test_the_first_step_says_what_the_others_will_take(outlook: Any) -> None:
    found = outlook()
    assert list(found.after(metrics(1))) == [
        (
            "run_outlook",
            "step 1 took 2 min 45 s; 19 more will take about 52 min 15 s, and evaluations, of "
            "which none has been measured",
        )
    ]
    assert list(found.after(metrics(2))) == []


def test_evaluations_that_were_measured_are_counted(outlook: Any) -> None:
    found = outlook(steps=20, every=5)
    found.evaluated(60.0)
    ((_, text),) = found.after(metrics(5))
    # After steps 5, 10 and 15, and at the end.
    assert text.endswith("15 more will take about 41 min 15 s, and 4 evaluations 4 min 00 s")


def test_a_run_of_one_step_has_nothing_to_foretell(outlook: Any) -> None:
    assert list(outlook(steps=1).after(metrics(1))) == []


def warnings(found: Outlook, *steps: dict[str, Any]) -> list[tuple[int, str]]:
    return [
        (step["step"], text)
        for step in steps
        for kind, text in found.after(step)
        if kind == "nothing_learned"
    ]


def test_flat_steps_in_a_row_are_warned_of_at_doubling_distances(outlook: Any) -> None:
    steps = [metrics(one, flat=8, reward=0.0) for one in range(1, 45)]
    told = warnings(outlook(100), *steps)
    assert [step for step, _ in told] == [
        FLAT_STEPS,
        2 * FLAT_STEPS,
        4 * FLAT_STEPS,
        8 * FLAT_STEPS,
    ]
    assert "in the last 5 steps no group had different rewards" in told[0][1]
    assert "no rollout earned a reward" in told[0][1]
    assert "composer-mesh sft" in told[0][1]


def test_a_step_with_a_mixed_group_begins_the_count_again(outlook: Any) -> None:
    steps = [metrics(one, flat=7 if one == 5 else 8, reward=1.0) for one in range(1, 11)]
    ((step, text),) = warnings(outlook(), *steps)
    assert step == 10
    assert "rewards are equal in step 10" in text


def test_a_step_without_groups_has_no_gradient(outlook: Any) -> None:
    steps = [{**metrics(one), "rollouts/groups": 0} for one in range(1, 6)]
    assert len(warnings(outlook(), *steps)) == 1


def test_a_supervised_run_is_not_warned_of_rewards(build_config: Any) -> None:
    sft = {"steps": 20, "demonstrations": 4}
    found = Outlook(build_config(run={"name": "o", "steps": 20}, sft=sft))
    steps = [{**metrics(one), "rollouts/groups": 0} for one in range(1, 12)]
    assert [kind for step in steps for kind, _ in found.after(step)] == ["run_outlook"]


def compared(step: int, sites: int, wins: float | None) -> dict[str, Any]:
    """A step that compared the hinted teacher with the student at some right actions."""
    return {**metrics(step), "sdpo/advantage_sites": sites, "sdpo/advantage_wins": wins}


def hints_warned(found: Outlook, *steps: dict[str, Any]) -> list[tuple[int, str]]:
    events = [(step["step"], *event) for step in steps for event in found.after(step)]
    return [(step, text) for step, kind, text in events if kind == "hints_do_not_help"]


def test_hints_that_help_at_half_of_the_sites_or_fewer_are_warned_of(outlook: Any) -> None:
    steps = [compared(one, 4, 0.25) for one in range(1, 20)]
    told = hints_warned(outlook(100), *steps)
    assert [step for step, _ in told] == [4, 8, 16]
    assert "at 4 of 16 sites" in told[0][1]


def test_hints_that_help_are_not_warned_of(outlook: Any) -> None:
    assert hints_warned(outlook(), *[compared(one, 4, 0.75) for one in range(1, 10)]) == []
    assert hints_warned(outlook(), *[compared(one, 0, None) for one in range(1, 10)]) == []


def asked(step: int, answers: int, failures: int) -> dict[str, Any]:
    """A step whose teachers gave so many answers."""
    failed = {"replay/failed/connect": failures} if failures else {}
    return {**metrics(step), "replay/answers": answers, "replay/failures": failures, **failed}


def test_teachers_that_never_answer_are_warned_of(outlook: Any) -> None:
    found = outlook(100)
    steps = [asked(1, 0, 6), asked(2, 0, 0), asked(3, 0, 6), asked(4, 0, 6), asked(5, 0, 6)]
    steps += [asked(6, 1, 5), asked(7, 0, 6)]
    events = [(step["step"], *event) for step in steps for event in found.after(step)]
    told = [(step, text) for step, kind, text in events if kind == "teachers_do_not_answer"]
    assert [step for step, _ in told] == [1, 3, 5, 7]
    assert "no teacher has answered in 2 steps (connect in step 3)" in told[1][1]
    assert "serve them at the base_url" in told[0][1]
