"""Which groups a step takes: a function of their contents, in the order of entry."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.configs.schedule import ScheduleConfig
from composer_mesh.rollouts.traces import Trace, Turn
from composer_mesh.services.schedule.step_builder import Group, StepGroups
from composer_mesh.services.steps.hint_writing import WrittenHints

PLAIN = ScheduleConfig(prompts_per_step=2)
DYNAMIC = ScheduleConfig(prompts_per_step=2, max_lag=1, dynamic_sampling=True, oversampling=2.5)


def group_of(group_id: int, rewards: Sequence[float], version: int = 3) -> Group:
    turn = Turn([1], [2], [-1.0], [version], "stop")
    traces = [
        Trace(f"{group_id}-{n}", group_id, n, "t", "train", 0, [turn], [], reward, False, [])
        for n, reward in enumerate(rewards)
    ]
    return Group(group_id, traces, WrittenHints())


FLAT, TEACHING = [1.0, 1.0], [0.0, 1.0]


def taken(config: ScheduleConfig, groups: Sequence[Group], step: int = 3) -> StepGroups:
    """What a step takes of groups that come as it wants them."""
    found, left = StepGroups(config, step), list(groups)
    while wanted := found.wanted:
        found.take(left[:wanted])
        del left[:wanted]
    return found


def ids(groups: Sequence[Group]) -> list[int]:
    return [group.group_id for group in groups]


def test_without_dynamic_sampling_every_group_is_kept() -> None:
    found = taken(PLAIN, [group_of(0, FLAT), group_of(1, []), group_of(2, TEACHING)])
    assert (ids(found.kept), found.dropped, found.missing) == ([0, 1], [], 0)
    assert found.figures() == {}


def test_groups_with_equal_rewards_are_dropped_and_the_next_ones_taken_for_them() -> None:
    kinds = [FLAT, TEACHING, [], TEACHING, TEACHING]
    found = taken(DYNAMIC, [group_of(n, rewards) for n, rewards in enumerate(kinds)])
    assert (ids(found.kept), ids(found.dropped)) == ([1, 3], [0, 2])
    assert found.figures() == {
        "rollouts/dropped_groups": 2,
        "rollouts/missing_groups": 0,
        "rollouts/sampled": 6,
        "reward/sampled": 4 / 6,
    }


def test_a_step_that_has_taken_its_most_trains_what_it_has_and_says_so() -> None:
    kinds = [FLAT, FLAT, TEACHING, FLAT, FLAT, TEACHING]
    found = taken(DYNAMIC, [group_of(n, rewards) for n, rewards in enumerate(kinds)])
    assert (ids(found.kept), found.taken, found.missing) == ([2], 5, 1)
    assert found.figures()["rollouts/missing_groups"] == 1
    for part in ("step 4 trains 1 of 2 groups", "has taken 5", "oversampling above 2.5"):
        assert part in found.shortage()


def test_a_group_of_which_one_rollout_is_left_teaches_nothing() -> None:
    found = taken(DYNAMIC, [group_of(0, [1.0]), group_of(1, TEACHING), group_of(2, TEACHING)])
    assert ids(found.kept) == [1, 2]


def test_a_group_that_is_too_old_is_dropped() -> None:
    groups = [group_of(n, TEACHING, version) for n, version in enumerate([1, 2, 3])]
    found = taken(DYNAMIC, groups)
    assert (ids(found.dropped), ids(found.kept)) == ([0], [1, 2])


@given(
    st.integers(1, 4),
    st.floats(1, 4),
    st.lists(st.booleans(), min_size=16, max_size=16),
)
def test_a_step_takes_at_least_its_prompts_and_at_most_its_oversampling(
    prompts: int, oversampling: float, teaching: list[bool]
) -> None:
    config = ScheduleConfig(
        prompts_per_step=prompts, dynamic_sampling=True, oversampling=oversampling
    )
    groups = [group_of(n, TEACHING if one else FLAT) for n, one in enumerate(teaching)]
    found = taken(config, groups)
    assert prompts <= found.taken <= config.groups_per_step <= round(4 * prompts)
    assert ids(found.kept) == [n for n in range(found.taken) if teaching[n]]
    assert found.missing == 0 or found.taken == config.groups_per_step
