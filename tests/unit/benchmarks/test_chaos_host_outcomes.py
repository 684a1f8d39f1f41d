"""What became of a host that was struck, told from the events of the run and its last process."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

told: Any = importlib.import_module("chaos_outcomes")
schedule: Any = importlib.import_module("chaos_schedule")

HostFault = schedule.HostFault


def struck(
    fault: Any = HostFault.KILLED, *actors: str, gone: float | None = None, host: str = "host-0"
) -> Any:
    planned = schedule.PlannedHost(0, 0.5, 0, fault)
    return told.StruckHost(planned, 100.0, host, actors or ("generator-0", "trainer"), gone)


def event(time: float, kind: str, actor: str = "", host: str = "host-0") -> dict[str, Any]:
    fields = {"host": host}
    return {"time": time, "event": kind, "actor": actor, "detail": "", "fields": fields}


LOST = event(102.0, "host_lost")
BACK = [
    event(105.0, "actor_restarted", "generator-0.2", "host-1"),
    event(120.0, "trainer_restarted", "trainer.2", "host-1"),
]


def only(one: Any, *events: dict[str, Any]) -> Any:
    (outcome,) = told.host_outcomes([one], events)
    return outcome


def test_a_loss_is_timed_to_its_word_and_to_the_last_actor_elsewhere() -> None:
    outcome = only(struck(), LOST, *BACK)
    assert outcome.healed
    assert (outcome.detected_s, outcome.recovered_s) == (2.0, 20.0)


def test_a_loss_that_the_run_never_tells_of_is_not_healed() -> None:
    assert not only(struck(), *BACK).healed
    assert only(struck(), *BACK).detected_s is None


def test_the_loss_of_another_host_is_not_this_one() -> None:
    assert only(struck(), event(102.0, "host_lost", host="host-1"), *BACK).detected_s is None


def test_an_actor_that_stays_away_leaves_the_loss_unhealed() -> None:
    outcome = only(struck(), LOST, *BACK[:1])
    assert (outcome.healed, outcome.recovered_s) == (False, None)


def test_a_restart_on_the_very_host_heals_nothing() -> None:
    assert not only(
        struck(HostFault.KILLED, "generator-0"),
        event(101.0, "actor_restarted", "generator-0.2", "host-0"),
        LOST,
    ).healed


def test_a_trainer_that_begins_again_is_back_though_its_event_names_no_host() -> None:
    began = {"time": 110.0, "event": "trainer_restarted", "actor": "trainer.2", "detail": ""}
    assert only(struck(HostFault.KILLED, "trainer"), LOST, began).recovered_s == 10.0


@pytest.mark.parametrize(("finished", "healed"), [(104.0, True), (110.0, False)])
def test_a_run_that_finishes_soon_after_a_loss_owes_no_replacement(
    finished: float, healed: bool
) -> None:
    assert only(struck(), LOST, event(finished, "run_finished")).healed is healed


@pytest.mark.parametrize(
    ("gone", "fenced_s", "healed", "late"),
    [(101.5, 1.5, True, False), (103.0, 3.0, True, True), (None, None, False, True)],
)
def test_a_cut_host_must_have_ended_its_own_before_others_get_its_work(
    gone: float | None, fenced_s: float | None, healed: bool, late: bool
) -> None:
    cut = struck(HostFault.CUT, gone=gone)
    outcome = only(cut, LOST, *BACK)
    assert (outcome.fenced_s, outcome.healed, outcome.fenced_late) == (fenced_s, healed, late)


def test_a_short_cut_must_lose_nothing() -> None:
    assert only(struck(HostFault.SHORT)).healed
    assert not only(struck(HostFault.SHORT), LOST).healed


def test_what_comes_after_the_next_fault_on_the_same_host_is_that_one_s_work() -> None:
    short, cut = struck(HostFault.SHORT), struck(HostFault.CUT, gone=156.0)
    cut.time = 150.0
    lost, back = event(158.0, "host_lost"), [{**one, "time": one["time"] + 60} for one in BACK]
    first, second = told.host_outcomes([short, cut], [lost, *back])
    assert first.healed
    assert (second.healed, second.detected_s, second.fenced_s) == (True, 8.0, 6.0)


def test_deaths_on_a_lost_host_are_explained_and_others_are_not() -> None:
    deaths = [
        event(102.0, "actor_died", "generator-0"),
        event(102.0, "actor_died", "generator-1", "host-1"),
        event(300.0, "actor_died", "trainer"),
    ]
    assert told.unexplained([], [struck()], deaths) == deaths[1:]
    assert told.unexplained([], [struck(HostFault.SHORT)], deaths) == deaths


def test_a_host_that_was_lost_without_a_fault_that_ends_one_is_told() -> None:
    other = event(50.0, "host_lost", host="host-1")
    early = event(90.0, "host_lost")
    assert told.lost_for_nothing([struck()], [early, LOST, other]) == [early, other]
    assert told.lost_for_nothing([struck(HostFault.SHORT)], [LOST]) == [LOST]
    assert told.lost_for_nothing([struck()], [LOST]) == []


def test_a_row_tells_medians_and_how_many_went_as_they_must() -> None:
    found = [
        only(struck(HostFault.CUT, gone=101.0), LOST, *BACK),
        only(struck(HostFault.CUT), LOST, *BACK),
    ]
    assert told.cells(found) == ["2", "2.0 / 2.0", "20.0 / 20.0", "1.0 / 1.0", "1"]
