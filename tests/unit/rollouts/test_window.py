"""The window: under every interleaving no token is too old, and the run never gets stuck.

With dynamic sampling steps are of unequal length, and their ends are known late. With carried
groups they pass over what has not finished.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.rollouts.window import Window

SIZES = {
    "prompts": st.integers(1, 3),
    "spare": st.integers(0, 4),
    "max_lag": st.integers(0, 3),
    "steps": st.integers(1, 5),
    "start": st.integers(0, 2),
    "data": st.data(),
}


class Simulation:
    """A run in which anything that may happen next does happen, in the order that is drawn.

    Groups enter, sample at versions then served, and finish in any order, some of them to be
    dropped; a step takes the first finished groups in order of entry, once it need not pass over
    more than `carries`; its pull comes later. The first `start` steps were done before. Without
    `spare` groups each step takes as many.
    """

    def __init__(
        self,
        prompts: int,
        most: int,
        max_lag: int,
        steps: int,
        start: int,
        data: st.DataObject,
        carries: int = 0,
    ) -> None:
        self.prompts, self.most, self.max_lag, self.steps = prompts, most, max_lag, steps
        self.data, self.trained, self.served = data, start, start
        self.carries = carries
        taken = data.draw(st.integers(start * prompts, start * most))
        behind = data.draw(st.integers(0, carries if start else 0))
        self.first = taken + behind
        order = data.draw(st.permutations(range(self.first)))
        self.carried = sorted(order[:behind])
        sampling = {"taken": self.first, "groups_per_step": most, "carried": self.carried}
        self.window = Window(prompts, max_lag, steps, start, **sampling)
        self.most_untaken = self.most_carried = 0
        self.passed = set(self.carried)
        """Groups that a step has passed over."""
        self.versions: dict[int, list[int]] = {}
        self.flat: dict[int, bool] = {}
        """The groups that have finished, and whether they are dropped."""
        self.lags: list[int] = []
        """Of groups that no step has passed over."""
        self.taken: list[list[int]] = []

    @property
    def untaken(self) -> list[int]:
        taken = {group for batch in self.taken for group in batch}
        return [group for group in self.versions if group not in taken]

    @property
    def running(self) -> list[int]:
        return [group for group in self.versions if group not in self.flat]

    def batch(self) -> list[int] | None:
        """The groups of the next step, None while too few have finished."""
        found: list[int] = []
        kept = passed = 0
        for group in self.untaken:
            if group in self.flat:
                found.append(group)
                kept += not self.flat[group]
            else:
                passed += 1
            if kept == self.prompts or len(found) == self.most:
                return found
            if passed > self.carries:
                return None
        return None

    def moves(self) -> list[str]:
        may_train = self.trained < self.steps and self.batch() is not None
        may_train = may_train and self.trained - self.served <= (self.max_lag > 0)
        moves = ["enter"] * self.window.may_enter() + ["finish"] * bool(self.running)
        return [*moves, *["train"] * may_train, *["pull"] * (self.trained > self.served)]

    def do(self, move: str) -> None:
        getattr(self, f"_{move}")()

    def _enter(self) -> None:
        newest = self.data.draw(st.integers(self.served, self.trained))
        self.versions[self.window.enter()] = [self.served, newest]
        self.most_untaken = max(self.most_untaken, len(self.untaken))

    def _finish(self) -> None:
        group = self.data.draw(st.sampled_from(self.running))
        self.flat[group] = self.data.draw(st.booleans())
        if self.flat[group]:
            self.window.drop(group)

    def _train(self) -> None:
        batch = self.batch()
        assert batch is not None
        self.lags += [
            self.trained - version
            for group in batch
            if group not in self.passed
            for version in self.versions[group]
        ]
        self.taken.append(batch)
        self.window.took(batch)
        self.passed |= {group for group in self.untaken if group < max(batch)}
        self.most_carried = max(self.most_carried, self.window.carried)
        self.trained += 1

    def _pull(self) -> None:
        self.served = self.data.draw(st.integers(self.served + 1, self.trained))
        self.window.pulled(self.served)


def play(
    prompts: int,
    spare: int,
    max_lag: int,
    steps: int,
    start: int,
    data: st.DataObject,
    carries: int = 0,
) -> Simulation:
    run = Simulation(prompts, prompts + spare, max_lag, start + steps, start, data, carries)
    while moves := run.moves():
        run.do(data.draw(st.sampled_from(moves)))
    return run


@given(**SIZES)
def test_no_token_is_older_than_max_lag_in_any_interleaving(
    prompts: int, spare: int, max_lag: int, steps: int, start: int, data: st.DataObject
) -> None:
    run = play(prompts, spare, max_lag, steps, start, data)
    assert all(0 <= lag <= max_lag for lag in run.lags)
    assert run.most_untaken <= (max_lag + 1) * (prompts + spare)


@given(**SIZES)
def test_every_step_is_trained_and_no_group_is_sampled_that_no_step_takes(
    prompts: int, spare: int, max_lag: int, steps: int, start: int, data: st.DataObject
) -> None:
    run = play(prompts, spare, max_lag, steps, start, data)
    assert run.trained == run.served == start + steps
    assert not run.window.may_enter()
    assert not run.untaken
    assert [group for batch in run.taken for group in batch] == list(run.versions)
    assert list(run.versions) == list(range(run.first, run.first + len(run.versions)))
    assert all(prompts <= len(batch) <= prompts + spare for batch in run.taken)


CARRYING = SIZES | {"max_lag": st.integers(1, 3), "carries": st.integers(1, 4)}


@given(**CARRYING)
def test_a_carrying_run_trains_every_step_within_its_bounds_in_any_interleaving(
    prompts: int,
    spare: int,
    max_lag: int,
    steps: int,
    start: int,
    data: st.DataObject,
    carries: int,
) -> None:
    run = play(prompts, spare, max_lag, steps, start, data, carries)
    assert run.trained == run.served == start + steps
    assert run.most_carried <= carries
    assert run.most_untaken <= (max_lag + 1) * (prompts + spare) + carries
    taken = [group for batch in run.taken for group in batch]
    assert len(set(taken)) == len(taken)
    assert list(run.versions)[: len(run.carried)] == run.carried, "they enter again first"
    kept = [sum(not run.flat[group] for group in batch) for batch in run.taken]
    assert all(one == prompts or len(b) == run.most for one, b in zip(kept, run.taken, strict=True))
    if spare == 0:
        assert all(0 <= lag <= max_lag + -(-carries // prompts) for lag in run.lags)
    if set(kept) == {prompts}:
        assert not run.untaken, "every sampled group was taken"


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_the_lag_bound_is_reached_when_rollouts_run_as_far_ahead_as_they_may(
    prompts: int, steps: int, max_lag: int
) -> None:
    window = Window(prompts, max_lag, steps)
    while window.may_enter():
        last = window.enter()
    assert last // prompts == min(max_lag, steps - 1)


def test_synchronous_means_that_exactly_one_steps_groups_are_in_between_two_pulls() -> None:
    window = Window(prompts_per_step=3, max_lag=0, steps=4)
    for version in range(4):
        entered = []
        while window.may_enter():
            entered.append(window.enter())
        assert entered == [3 * version, 3 * version + 1, 3 * version + 2]
        window.pulled(version + 1)
    assert not window.may_enter()


def test_entering_a_full_window_is_refused_with_the_version_waited_for() -> None:
    window = Window(prompts_per_step=1, max_lag=0, steps=2)
    window.enter()
    with pytest.raises(RuntimeError, match="group 1 may not enter at version 0 with max_lag 0"):
        window.enter()


def test_versions_never_go_back() -> None:
    window = Window(prompts_per_step=1, max_lag=0, steps=5)
    window.pulled(2)
    with pytest.raises(ValueError, match="from version 2 back to 1"):
        window.pulled(1)


def test_a_dropped_group_makes_room_for_one_more_and_only_once() -> None:
    window = Window(prompts_per_step=2, max_lag=0, steps=1, groups_per_step=3)
    assert [window.enter(), window.enter()] == [0, 1]
    assert not window.may_enter()
    window.drop(0)
    window.drop(0)
    assert window.enter() == 2
    window.drop(1)
    assert not window.may_enter(), "three groups are the most that a step takes"


def test_without_oversampling_nothing_replaces_a_dropped_group() -> None:
    window = Window(prompts_per_step=2, max_lag=0, steps=2)
    window.enter()
    window.drop(0)
    window.enter()
    assert not window.may_enter()
