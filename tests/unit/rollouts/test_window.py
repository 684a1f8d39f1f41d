"""The window: under every interleaving no token is too old, and the run never gets stuck."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_mesh.rollouts.window import Window

SIZES = {
    "prompts": st.integers(1, 4),
    "max_lag": st.integers(0, 3),
    "steps": st.integers(1, 6),
    "start": st.integers(0, 3),
    "data": st.data(),
}


class Simulation:
    """A run in which anything that may happen next does happen, in the order that it is told.

    Groups enter, sample tokens at the version then served, and finish in any order; a step takes
    the next groups in order of entry once all of them have finished; its pull comes later. The
    first `start` steps were done before.
    """

    def __init__(self, prompts: int, max_lag: int, steps: int, start: int = 0) -> None:
        self.window = Window(prompts, max_lag, steps, start)
        self.prompts, self.steps = prompts, steps
        self.served = self.trained = start
        self.lags: list[int] = []
        self.versions: dict[int, list[int]] = {}
        self.finished: set[int] = set()
        self.most_running = 0

    def moves(self) -> list[str]:
        batch = range(self.trained * self.prompts, (self.trained + 1) * self.prompts)
        found = {
            "enter": self.window.may_enter(),
            "sample": bool(self._running()),
            "finish": bool(self._running()),
            "train": self.trained < self.steps
            and self.trained == self.served
            and self.finished.issuperset(batch),
            "pull": self.trained > self.served,
        }
        return [move for move, possible in found.items() if possible]

    def _running(self) -> list[int]:
        return [group for group in self.versions if group not in self.finished]

    def do(self, move: str, draw: st.DataObject) -> None:
        if move == "enter":
            self.versions[self.window.enter()] = [self.served]
            self.most_running = max(self.most_running, len(self._running()))
        elif move in ("sample", "finish"):
            group = draw.draw(st.sampled_from(self._running()))
            self.versions[group].append(self.served)
            if move == "finish":
                self.finished.add(group)
        elif move == "train":
            first = self.trained * self.prompts
            for group in range(first, first + self.prompts):
                self.lags += [self.trained - version for version in self.versions[group]]
            self.trained += 1
        else:
            self.served = self.trained
            self.window.pulled(self.served)


def play(prompts: int, max_lag: int, steps: int, start: int, data: st.DataObject) -> Simulation:
    run = Simulation(prompts, max_lag, start + steps, start)
    idle = 0
    while moves := run.moves():
        # Sampling alone makes no progress, so it may not be all that ever happens.
        if idle > 5 and "sample" in moves:
            moves.remove("sample")
        move = data.draw(st.sampled_from(moves))
        idle = idle + 1 if move == "sample" else 0
        run.do(move, data)
    return run


@given(**SIZES)
def test_no_token_is_older_than_max_lag_in_any_interleaving(
    prompts: int, max_lag: int, steps: int, start: int, data: st.DataObject
) -> None:
    run = play(prompts, max_lag, steps, start, data)
    assert max(run.lags) <= max_lag
    assert min(run.lags) >= 0


@given(**SIZES)
def test_every_interleaving_ends_with_every_step_trained(
    prompts: int, max_lag: int, steps: int, start: int, data: st.DataObject
) -> None:
    run = play(prompts, max_lag, steps, start, data)
    assert run.trained == run.served == start + steps
    assert not run.window.may_enter()
    assert list(run.versions) == list(range(start * prompts, (start + steps) * prompts))


@given(**SIZES)
def test_never_more_groups_run_than_the_window_holds(
    prompts: int, max_lag: int, steps: int, start: int, data: st.DataObject
) -> None:
    run = play(prompts, max_lag, steps, start, data)
    assert run.most_running <= (max_lag + 1) * prompts


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
