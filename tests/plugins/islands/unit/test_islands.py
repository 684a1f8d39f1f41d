"""The section [islands]: what is refused, with its repair; what may change on a resume."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from composer_mesh.configs.changes import changes
from composer_mesh.configs.islands import IslandsConfig, OuterAdam, OuterSgd

STORE = {"store": "s3://bucket/run"}
LIGHTHOUSE = {"lighthouse": "http://10.0.0.1:29510"}


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"store": "/shared"}, "must begin with one of file://, s3://, gs://, az://"),
        ({"store": "s3://key:secret@bucket"}, "credentials or options in its address"),
        ({"rank": 2, "world_size": 2}, "give a rank from 0 to 1"),
        ({"quorum": 3, "world_size": 2}, "no round could ever close"),
        ({"steps_per_round": 4, "overlap_steps": 4}, "lower overlap_steps to 3 or less"),
        ({"steps_per_round": 4, "fragments": 3}, "make steps_per_round a multiple of fragments"),
        (STORE | LIGHTHOUSE, "store and lighthouse are both set"),
        ({"lighthouse": "10.0.0.1:29510"}, "must be http://HOST:PORT"),
        ({"lighthouse": "http://10.0.0.1"}, "must be http://HOST:PORT"),
        ({"lighthouse": "http://10.0.0.1:x"}, "must be http://HOST:PORT"),
        ({"lighthouse": "https://10.0.0.1:29510"}, "must be http://HOST:PORT"),
        (
            LIGHTHOUSE | {"max_staleness": 3},
            "max_staleness is 3 but is a rule of rounds in a store",
        ),
        (LIGHTHOUSE | {"absent_after": 3}, "absent_after is 3"),
        (LIGHTHOUSE | {"rounds_kept": 3}, "rounds_kept is 3"),
        (
            LIGHTHOUSE | {"steps_per_round": 4, "fragments": 2, "overlap_steps": 2},
            "lower overlap_steps to 1 or less",
        ),
        (LIGHTHOUSE | {"world_size": 2}, "set host to this machine's address"),
        (LIGHTHOUSE | {"host": "::1"}, "host"),
        ({"host": "10.0.0.2"}, "only islands with a lighthouse listen"),
        (STORE | {"host": "10.0.0.2"}, "only islands with a lighthouse listen"),
    ],
)
def test_what_does_not_fit_is_refused(table: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        IslandsConfig.model_validate(table)


def test_the_outer_optimizer_is_that_of_diloco_unless_another_is_named() -> None:
    assert IslandsConfig().outer == OuterSgd(lr=0.7, momentum=0.9, nesterov=True)
    adam = IslandsConfig.model_validate({"outer": {"type": "adam"}}).outer
    assert isinstance(adam, OuterAdam)


def test_a_run_without_a_store_is_no_island() -> None:
    assert not IslandsConfig().on
    assert IslandsConfig().longest_wait_s == 0
    assert IslandsConfig.model_validate(STORE).on


def test_islands_may_meet_by_a_lighthouse() -> None:
    found = IslandsConfig.model_validate(LIGHTHOUSE | {"host": "10.0.0.2", "fragments": 2})
    assert found.on
    assert found.address == LIGHTHOUSE["lighthouse"]
    one = IslandsConfig.model_validate(STORE)
    assert found.longest_wait_s == 3 * one.longest_wait_s
    again = IslandsConfig.model_validate(found.model_dump())
    assert again == found


def test_the_way_to_meet_is_part_of_a_run_and_its_address_is_not(build_config: Any) -> None:
    before = build_config(islands=LIGHTHOUSE)
    moved = build_config(islands={"lighthouse": "http://10.0.0.9:29510", "host": "10.0.0.8"})
    assert all(one.safe for one in changes(before, moved))
    assert not all(one.safe for one in changes(before, build_config(islands=STORE)))
    assert not all(one.safe for one in changes(build_config(islands=STORE), before))


def test_patience_may_change_on_a_resume_and_rules_may_not(build_config: Any) -> None:
    before = build_config(islands=STORE)
    after = build_config(
        islands={**STORE, "deadline_s": 5.0, "rounds_kept": 3, "steps_per_round": 2}
    )

    assert {one.key: one.safe for one in changes(before, after)} == {
        "islands.deadline_s": True,
        "islands.rounds_kept": True,
        "islands.steps_per_round": False,
    }
