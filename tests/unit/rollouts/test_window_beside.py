"""The window where versions travel beside steps: a machine that does whatever may happen next.

Two generators pull at different times, groups finish in any order, a step is trained while the
version before it is on its way, one sync at a time.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from composer_mesh.rollouts.window import Window

GENERATORS = 2


class Beside(RuleBasedStateMachine):
    """A run of the controller's rules, without a controller."""

    @initialize(
        prompts=st.integers(1, 3),
        max_lag=st.integers(1, 3),
        steps=st.integers(1, 5),
        start=st.integers(0, 2),
    )
    def begin(self, prompts: int, max_lag: int, steps: int, start: int) -> None:
        self.prompts, self.max_lag, self.steps = prompts, max_lag, start + steps
        self.window = Window(prompts, max_lag, self.steps, start)
        self.trained = self.resume_state = self.served = start
        self.serves = [start] * GENERATORS
        self.copied = True
        self.sync: int | None = None
        self.versions: dict[int, list[int]] = {}
        self.finished: set[int] = set()
        self.order: list[int] = list(range(start * prompts))
        self.lags: list[int] = []

    # --- what may happen

    @property
    def may_enter(self) -> bool:
        return self.window.may_enter()

    @property
    def running(self) -> list[int]:
        return [group for group in self.versions if group not in self.finished]

    @property
    def on_snapshot(self) -> bool:
        """All groups of the step are there, and its version was held and copied, or is served."""
        batch = range(self.resume_state * self.prompts, (self.resume_state + 1) * self.prompts)
        follows = self.resume_state == self.trained == (self.sync or self.served)
        return self.resume_state < self.steps and follows and self.finished.issuperset(batch)

    @property
    def may_update(self) -> bool:
        return self.resume_state > self.trained and self.copied

    @property
    def may_sync(self) -> bool:
        return self.sync is None and self.resume_state == self.trained > self.served

    @property
    def behind(self) -> list[int]:
        """Generators that have not pulled what is on its way."""
        if self.sync is None or not self.copied:
            return []
        return [place for place, version in enumerate(self.serves) if version != self.sync]

    @property
    def done(self) -> bool:
        return self.trained == self.served == self.steps and not self.window.may_enter()

    # --- what happens

    @precondition(lambda self: self.may_enter)
    @rule(place=st.integers(0, GENERATORS - 1))
    def enter(self, place: int) -> None:
        self.versions[self.window.enter()] = [self.serves[place]]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), place=st.integers(0, GENERATORS - 1), finish=st.booleans())
    def sample(self, data: st.DataObject, place: int, finish: bool) -> None:
        group = data.draw(st.sampled_from(self.running))
        self.versions[group].append(self.serves[place])
        if finish:
            self.finished.add(group)

    @precondition(lambda self: self.on_snapshot)
    @rule()
    def train(self) -> None:
        first = self.resume_state * self.prompts
        for group in range(first, first + self.prompts):
            self.order.append(group)
            self.lags += [self.resume_state - version for version in self.versions[group]]
        self.resume_state += 1

    @precondition(lambda self: self.may_update)
    @rule()
    def update(self) -> None:
        self.trained = self.resume_state

    @precondition(lambda self: self.may_sync)
    @rule()
    def hold(self) -> None:
        self.sync, self.copied = self.trained, False

    @precondition(lambda self: self.sync is not None and not self.copied)
    @rule()
    def copy(self) -> None:
        assert self.sync == self.trained, "an update came before the copy"
        self.copied = True

    @precondition(lambda self: self.behind)
    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        assert self.sync is not None
        self.serves[data.draw(st.sampled_from(self.behind))] = self.sync
        if not self.behind:
            self.served, self.sync = self.sync, None
            self.window.pulled(self.served)

    @precondition(lambda self: self.done)
    @rule()
    def rest(self) -> None:
        assert not self.running

    # --- what holds

    @invariant()
    def no_token_is_older_than_the_bound_or_newer_than_its_step(self) -> None:
        if hasattr(self, "lags"):
            assert all(0 <= lag <= self.max_lag for lag in self.lags)

    @invariant()
    def groups_are_trained_once_and_in_order(self) -> None:
        if hasattr(self, "order"):
            assert self.order == list(range(len(self.order)))

    @invariant()
    def something_can_happen_until_all_is_trained_and_served(self) -> None:
        if hasattr(self, "window"):
            copying = self.sync is not None and not self.copied
            moves: list[Any] = [self.may_enter, self.running, self.on_snapshot, self.may_update]
            assert self.done or copying or any([*moves, self.may_sync, self.behind])


Beside.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=80,
    # Few moves are open at a time, and that is the point: most draws meet a closed one.
    suppress_health_check=[HealthCheck.filter_too_much],
)
TestWindowBesideSteps = Beside.TestCase
