"""What became of a fault, told from the events of the run around it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

told: Any = importlib.import_module("chaos_outcomes")
schedule: Any = importlib.import_module("chaos_schedule")
inject: Any = importlib.import_module("chaos_inject")

Fault, Fate = schedule.Fault, told.Fate


def struck(actor: str, fault: Any = Fault.KILL, time: float = 100.0, number: int = 7) -> Any:
    kind = actor.partition("-")[0]
    planned = schedule.Planned(number, 0.5, 0.0, kind, 0, fault)
    return inject.Applied(planned, time, actor, 4711)


def event(time: float, kind: str, actor: str = "", detail: str = "") -> dict[str, Any]:
    return {"time": time, "event": kind, "actor": actor, "detail": detail}


def only(fault: Any, *events: dict[str, Any]) -> Any:
    (outcome,) = told.outcomes([fault], events)
    return outcome


def test_a_death_that_is_noticed_and_healed_is_timed_from_the_fault() -> None:
    outcome = only(
        struck("generator-0"),
        event(100.5, "actor_died", "generator-0"),
        event(104.0, "actor_restarted", "generator-0.2"),
    )
    assert outcome.fate is Fate.RESTARTED
    assert (outcome.detected_s, outcome.recovered_s) == (0.5, 4.0)


def test_the_restart_of_another_slot_heals_nothing() -> None:
    outcome = only(
        struck("generator-0"),
        event(100.5, "actor_died", "generator-0"),
        event(104.0, "actor_restarted", "generator-1.2"),
    )
    assert outcome.fate is Fate.LOST
    assert outcome.recovered_s is None


def test_an_earlier_restart_of_the_slot_is_not_this_one() -> None:
    outcome = only(
        struck("generator-0.2"),
        event(90.0, "actor_died", "generator-0"),
        event(95.0, "actor_restarted", "generator-0.2"),
        event(101.0, "actor_died", "generator-0.2"),
        event(105.0, "actor_restarted", "generator-0.3"),
    )
    assert (outcome.detected_s, outcome.recovered_s) == (1.0, 5.0)


def test_a_hang_is_noticed_when_the_run_says_so() -> None:
    outcome = only(
        struck("environment-1", Fault.STOP),
        event(110.0, "actor_hung", "environment-1"),
        event(110.5, "actor_died", "environment-1"),
        event(113.0, "actor_restarted", "environment-1.2"),
    )
    assert (outcome.fate, outcome.detected_s) == (Fate.RESTARTED, 10.0)


def test_an_ended_process_that_nobody_noticed_is_lost() -> None:
    assert only(struck("reference")).fate is Fate.LOST


def test_an_exception_after_which_the_process_goes_on_is_absorbed() -> None:
    outcome = only(
        struck("environment-0", Fault.RAISE),
        event(100.2, "rollout_retried", "", "RuntimeError: injected fault 7: in step"),
    )
    assert (outcome.fate, outcome.recovered_s) == (Fate.ABSORBED, None)
    assert outcome.detected_s == pytest.approx(0.2)


def test_the_word_of_another_fault_is_not_taken_for_this_one() -> None:
    outcome = only(
        struck("environment-0", Fault.RAISE),
        event(100.2, "rollout_retried", "", "RuntimeError: injected fault 77: in step"),
    )
    assert outcome.detected_s is None


def test_a_replica_beyond_its_budget_is_given_up() -> None:
    outcome = only(
        struck("teacher_replay-0", Fault.EXIT),
        event(100.5, "actor_died", "teacher_replay-0"),
        event(100.6, "actor_given_up", "teacher_replay-0"),
    )
    assert outcome.fate is Fate.GIVEN_UP


@pytest.mark.parametrize(("finished", "fate"), [(102.0, Fate.ENDED_FIRST), (104.5, Fate.LOST)])
def test_a_run_that_finishes_soon_after_a_death_owes_no_replacement(
    finished: float, fate: Fate
) -> None:
    outcome = only(
        struck("teacher_replay-0", Fault.STOP),
        event(100.5, "actor_died", "teacher_replay-0"),
        event(finished, "run_finished"),
    )
    assert outcome.fate is fate


def test_a_death_that_nobody_noticed_is_lost_however_soon_the_run_finishes() -> None:
    assert only(struck("reference"), event(100.5, "run_finished")).fate is Fate.LOST


def test_a_trainer_that_begins_again_for_an_error_is_healed() -> None:
    began = "RuntimeError: injected fault 7: in train; began again from step 10's checkpoint"
    outcome = only(
        struck("trainer", Fault.RAISE),
        event(109.0, "trainer_restarted", "trainer.2", began),
    )
    assert (outcome.fate, outcome.recovered_s) == (Fate.RESTARTED, 9.0)
    assert outcome.detected_s is None


def test_a_restart_for_another_error_heals_nothing() -> None:
    began = "RuntimeError: injected fault 6: in train; began again from step 10's checkpoint"
    outcome = only(
        struck("trainer", Fault.CUT),
        event(109.0, "trainer_restarted", "trainer.2", began),
    )
    assert (outcome.fate, outcome.recovered_s) == (Fate.ABSORBED, None)


def test_a_death_after_a_restart_of_the_same_name_is_another_ones() -> None:
    outcome = only(
        struck("sdpo_teacher", Fault.CUT),
        event(120.0, "actor_restarted", "sdpo_teacher"),
        event(130.0, "actor_died", "sdpo_teacher"),
    )
    assert outcome.fate is Fate.ABSORBED


def test_a_row_tells_medians_and_fates() -> None:
    faults = [
        only(
            struck("generator-0"),
            event(100.0 + n, "actor_died", "generator-0"),
            event(110.0 + n, "actor_restarted", "generator-0.2"),
        )
        for n in (1, 2, 3)
    ]
    row = told.Summary.of([*faults, only(struck("reference"))])
    assert row.cells() == ["4", "2.0 / 3.0", "12.0 / 13.0", "3", "", "", "", "1"]


def test_a_row_without_times_says_so() -> None:
    assert told.Summary.of([]).cells()[:3] == ["0", "-", "-"]


def test_deaths_that_no_fault_explains_are_told() -> None:
    deaths = [
        event(100.5, "actor_died", "generator-0"),
        event(100.6, "actor_died", "generator-1"),
        event(300.0, "actor_died", "generator-0"),
    ]
    assert told.unprovoked([struck("generator-0")], deaths) == deaths[1:]


def test_an_end_long_after_a_fault_that_left_the_process_whole_is_not_its_work() -> None:
    outcome = only(
        struck("environment-0", Fault.CUT),
        event(300.0, "actor_died", "environment-0"),
        event(303.0, "actor_restarted", "environment-0.2"),
    )
    assert (outcome.fate, outcome.detected_s) == (Fate.ABSORBED, None)


def test_an_end_belongs_to_the_newest_fault_on_its_process() -> None:
    cut, kill = struck("environment-0", Fault.CUT), struck("environment-0", time=105.0)
    events = [
        event(106.0, "actor_died", "environment-0"),
        event(108.0, "actor_restarted", "environment-0.2"),
    ]
    fates = [one.fate for one in told.outcomes([cut, kill], events)]
    assert fates == [Fate.ABSORBED, Fate.RESTARTED]


def test_a_process_that_dies_of_a_memory_limit_is_its_work() -> None:
    outcome = only(
        struck("environment-0", Fault.MEMORY),
        event(103.0, "actor_died", "environment-0"),
        event(108.0, "actor_restarted", "environment-0.2"),
    )
    assert (outcome.fate, outcome.detected_s) == (Fate.RESTARTED, 3.0)
