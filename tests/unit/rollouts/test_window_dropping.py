"""The window with dynamic sampling: steps of unequal length, whose ends are known late."""

from __future__ import annotations

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


class Dropping:
    """A run of the controller's rules, in which groups finish in any order."""

    def __init__(
        self, prompts: int, most: int, max_lag: int, steps: int, start: int, data: st.DataObject
    ) -> None:
        self.prompts, self.most, self.max_lag, self.steps = prompts, most, max_lag, steps
        self.data, self.trained, self.served = data, start, start
        self.first = data.draw(st.integers(start * prompts, start * most))
        self.window = Window(prompts, max_lag, steps, start, taken=self.first, groups_per_step=most)
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
) -> Dropping:
    run = Dropping(prompts, prompts + spare, max_lag, start + steps, start, data)
    while moves := run.moves():
        run.do(data.draw(st.sampled_from(moves)))
    return run


@given(**SIZES)
def test_no_token_is_older_than_max_lag_whatever_is_dropped(
    prompts: int, spare: int, max_lag: int, steps: int, start: int, data: st.DataObject
) -> None:
    run = play(prompts, spare, max_lag, steps, start, data)
    assert all(0 <= lag <= max_lag for lag in run.lags)


@given(**SIZES)
def test_every_step_is_trained_and_no_group_is_sampled_that_no_step_takes(
    prompts: int, spare: int, max_lag: int, steps: int, start: int, data: st.DataObject
) -> None:
    run = play(prompts, spare, max_lag, steps, start, data)
    assert run.trained == start + steps
    assert list(run.versions) == list(range(run.first, run.next))
    assert all(prompts <= taken <= prompts + spare for taken in run.taken)


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
