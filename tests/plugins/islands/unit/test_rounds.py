"""The rules of a round: who is waited for, what is added late, what is dropped."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from composer_mesh.configs.validation import validated
from composer_mesh.plugins.islands.rounds.rounds import (
    Contribution,
    Manifest,
    RefusedContribution,
    RoundRules,
    Unanswered,
)

RULES = RoundRules(3, quorum=2, deadline_s=60, max_staleness=1, absent_after=2)


def manifest(number: int, *islands: int, late: tuple[Contribution, ...] = ()) -> Manifest:
    own = tuple(Contribution(number - 1, island) for island in islands)
    return Manifest(number, (*late, *own), (), 0, "digest")


def test_a_round_closes_when_all_expected_islands_are_there() -> None:
    assert not RULES.may_close({0, 1}, {0, 1, 2}, 59)
    assert RULES.may_close({0, 1, 2}, {0, 1, 2}, 0)


def test_a_round_closes_after_its_deadline_with_a_quorum() -> None:
    assert RULES.may_close({0, 1}, {0, 1, 2}, 60)
    assert not RULES.may_close({0}, {0, 1, 2}, 1e9)


def test_the_first_rounds_wait_for_every_island() -> None:
    assert RULES.expected(1, {}) == RULES.expected(2, {1: manifest(1, 0)}) == {0, 1, 2}


def test_an_island_that_missed_rounds_is_not_waited_for_until_it_is_back() -> None:
    missed = {3: manifest(3, 0, 1), 4: manifest(4, 0, 1)}

    assert RULES.expected(5, missed) == {0, 1}
    assert RULES.expected(6, {4: missed[4], 5: manifest(5, 0, 1, 2)}) == {0, 1, 2}


def test_a_late_contribution_is_open_for_the_next_round_only() -> None:
    late = Contribution(3, 2)

    assert RULES.is_open(late, 4, {})
    assert RULES.is_open(late, 5, {4: manifest(4, 0, 1)})
    assert not RULES.is_open(late, 6, {4: manifest(4, 0, 1), 5: manifest(5, 0, 1)})


def test_a_contribution_is_used_once() -> None:
    assert not RULES.is_open(Contribution(3, 1), 5, {4: manifest(4, 0, 1)})


def test_a_manifest_is_restored_from_its_table() -> None:
    one = Manifest(
        4,
        (Contribution(2, 2), Contribution(3, 0)),
        (RefusedContribution(3, 1, "is gone"),),
        0,
        "d",
    )

    assert validated(Manifest, json.loads(json.dumps(asdict(one)))) == one


@pytest.mark.parametrize("table", [{}, {"round": 1, "contributions": 3}])
def test_a_table_that_is_no_manifest_is_refused(table: dict[str, object]) -> None:
    assert not RULES.is_manifest(1, table)


def test_an_island_hears_what_became_of_its_contributions() -> None:
    unanswered = Unanswered(2, max_staleness=1)
    for base in (3, 5, 7, 9):
        unanswered.sent(base)
    refused = Manifest(10, (), (RefusedContribution(9, 2, "has a wrong checksum"),), 0, "")

    answers = unanswered.answered(
        [
            manifest(4, 0, 1, 2),
            manifest(5, 0, 1),
            manifest(6, 0, 1),
            manifest(7, 0, 1, late=(Contribution(5, 2),)),
            manifest(8, 0, 1),
            manifest(9, 0, 1),
            refused,
        ]
    )

    assert [kind for kind, _ in answers] == ["late", "dropped", "refused"]
