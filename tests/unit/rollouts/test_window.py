"""The window: under every interleaving no token is too old, and the run never gets stuck.

With dynamic sampling steps are of unequal length, and their ends are known late.
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
    dropped; a step takes the next groups in order of entry once they have finished; its pull comes
    later. The first `start` steps were done before. Without `spare` groups each step takes as many.
    """

    def __init__(
        self, prompts: int, most: int, max_lag: int, steps: int, start: int, data: st.DataObject
    ) -> None:
        self.prompts, self.most, self.max_lag, self.steps = prompts, most, max_lag, steps
        self.data, self.trained, self.served = data, start, start
        self.first = data.draw(st.integers(start * prompts, start * most))
        sampling = {"taken": self.first, "groups_per_step": most} if most > prompts else {}
        self.window = Window(prompts, max_lag, steps, start, **sampling)
        self.most_running = 0
        self.next = self.first
        self.versions: dict[int, list[int]] = {}
        self.flat: dict[int, bool] = {}
        """The groups that have finished, and whether they are dropped."""
        self.lags: list[int] = []
        self.taken: list[int] = []

    @property
    def running(self) -> list[int]:
        return [group for group in self.versions if group not in self.flat]

    def batch(self) -> list[int] | None:
        """The groups of the next step, None while one of them has not finished."""
        found: list[int] = []
        kept = 0
        while kept < self.prompts and len(found) < self.most:
            group = self.next + len(found)
            if group not in self.flat:
                return None
            found.append(group)
            kept += not self.flat[group]
        return found

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
        self.most_running = max(self.most_running, len(self.running))

    def _finish(self) -> None:
        group = self.data.draw(st.sampled_from(self.running))
        self.flat[group] = self.data.draw(st.booleans())
        if self.flat[group]:
            self.window.drop(group)

    def _train(self) -> None:
        batch = self.batch()
        assert batch is not None
        self.lags += [self.trained - version for group in batch for version in self.versions[group]]
        self.taken.append(len(batch))
        self.next += len(batch)
        self.window.took(len(batch))
        self.trained += 1

    def _pull(self) -> None:
        self.served = self.data.draw(st.integers(self.served + 1, self.trained))
        self.window.pulled(self.served)


def play(
    prompts: int, spare: int, max_lag: int, steps: int, start: int, data: st.DataObject
) -> Simulation:
    run = Simulation(prompts, prompts + spare, max_lag, start + steps, start, data)
    while moves := run.moves():
        run.do(data.draw(st.sampled_from(moves)))
    return run


@given(**SIZES)
def test_no_token_is_older_than_max_lag_in_any_interleaving(
    prompts: int, spare: int, max_lag: int, steps: int, start: int, data: st.DataObject
) -> None:
    run = play(prompts, spare, max_lag, steps, start, data)
    assert all(0 <= lag <= max_lag for lag in run.lags)
    assert run.most_running <= (max_lag + 1) * (prompts + spare)


@given(**SIZES)
def test_every_step_is_trained_and_no_group_is_sampled_that_no_step_takes(
    prompts: int, spare: int, max_lag: int, steps: int, start: int, data: st.DataObject
) -> None:
    run = play(prompts, spare, max_lag, steps, start, data)
    assert run.trained == run.served == start + steps
    assert not run.window.may_enter()
    assert list(run.versions) == list(range(run.first, run.next))
    assert all(prompts <= taken <= prompts + spare for taken in run.taken)


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
