"""Sticky routing: a request goes where its prefix is, unless that generator is far busier."""

from __future__ import annotations

from collections import Counter

import pytest

from composer_mesh.actors.rollout_workers.peers import FACTOR, SLACK, StickyRouting

NAMES = ["g-0", "g-1", "g-2"]


def routing() -> tuple[StickyRouting, Counter[str]]:
    load: Counter[str] = Counter()
    made = StickyRouting(load.__getitem__)
    made.begin("a")
    return made, load


def test_a_group_stays_with_the_least_busy_generator_that_it_began_at() -> None:
    made, load = routing()
    load.update({"g-0": 3, "g-1": 1, "g-2": 2})
    assert made.take("a", "a-0", NAMES) == "g-1"
    load["g-1"] = 9
    assert made.take("a", "a-1", NAMES) == "g-1"
    assert made.take("b", "b-0", NAMES) == "g-2"


@pytest.mark.parametrize("least", [0, 1, 7])
def test_a_request_leaves_a_generator_only_beyond_the_stated_bound(least: int) -> None:
    made, load = routing()
    assert made.take("a", "a-0", NAMES) == "g-0"
    load.update(dict.fromkeys(NAMES, least))
    load["g-0"] = FACTOR * least + SLACK
    assert made.take("a", "a-0", NAMES) == "g-0"
    load["g-0"] += 1
    assert made.take("a", "a-0", NAMES) == "g-1"
    load["g-0"] = 0
    assert made.take("a", "a-0", NAMES) == "g-1"  # its newest prefix is there
    assert made.take("a", "a-1", NAMES) == "g-1"  # and its group's


def test_an_episode_leaves_a_generator_that_is_gone() -> None:
    made, load = routing()
    assert made.take("a", "a-0", NAMES) == "g-0"
    load.update({"g-1": 1})
    assert made.take("a", "a-0", ["g-1", "g-2"]) == "g-2"


def test_nothing_is_kept_of_a_group_whose_episodes_have_ended() -> None:
    made, load = routing()
    made.begin("a")
    made.take("a", "a-0", NAMES)
    made.take("a", "a-1", NAMES)
    made.end("a", "a-0")
    load["g-0"] = 5
    assert made.take("a", "a-1", NAMES) == "g-0"
    made.end("a", "a-1")
    assert [made._groups, made._episodes, made._members] == [{}, {}, {}]
