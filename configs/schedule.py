"""Rollouts per step: how many, how far ahead of the trainer, and which of them are trained.

The section `[rollouts]`: the actors that play episodes. `[late_rewards]`: rewards after training.
`[eval]`: held-out rollouts.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from composer_mesh.configs.base import (
    CountOrZero,
    FreeTable,
    ImportPath,
    Processes,
    Seconds,
    Section,
    Temperature,
)


class RolloutsConfig(Section):
    """The actors that play episodes: they render chats, tokenize and call generators and
    environments."""

    workers: Processes | None = None
    """Number of rollout workers; by default one for every 256 episodes in flight, 16 at most."""

    workflow: ImportPath | None = None
    """Your own workflow class, as "my_package.my_module:MyWorkflow" or "my_file.py:MyWorkflow"; by
    default one agent acts until its session ends."""

    options: FreeTable = Field(default_factory=dict)
    """Keyword arguments of your workflow's class."""

    workflow_s: Seconds = 3600.0
    """Seconds that a workflow may take for one episode."""


OVERSAMPLING = 3.0


class ScheduleConfig(Section):
    """Rollouts per step and their maximum policy lag."""

    prompts_per_step: Annotated[int, Field(ge=1, le=100_000)] = 8
    """Number of prompt groups per optimizer step."""

    group_size: Annotated[int, Field(ge=2, le=10_000)] = 8
    """Number of rollouts per prompt; the group is its own baseline."""

    max_lag: Annotated[int, Field(ge=0, le=1000)] = 1
    """Maximum lag in policy versions of a rollout when it is trained; 0 is synchronous."""

    dynamic_sampling: bool = False
    """Whether a step replaces groups whose rewards are all equal by other groups, as in DAPO."""

    oversampling: Annotated[float, Field(ge=1, le=1000)] = OVERSAMPLING
    """Largest number of groups that dynamic sampling takes for a step, as a multiple of
    prompts_per_step. A step that finds too few groups to keep trains on fewer."""

    overprovision: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Number of rollouts per prompt that are sampled beyond group_size: the first group_size to
    finish are kept and the others cancelled. This favours short rollouts; needs max_lag above 0."""

    carried_groups: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Number of unfinished groups that steps may pass over; each is trained by the first step after
    it has finished. Needs max_lag above 0."""

    max_token_age: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Maximum lag in policy versions of a sampled token when it is trained; older tokens are only
    context. Needs carried_groups above 0. By default it is max_lag plus carried_groups divided by
    prompts_per_step, rounded up: groups that were not passed over lose no token."""

    @property
    def groups_per_step(self) -> int:
        """Largest number of groups that a step takes, including those that it drops."""
        factor = self.oversampling if self.dynamic_sampling else 1
        return round(self.prompts_per_step * factor)

    @property
    def groups_in_flight(self) -> int:
        """Largest number of groups that have entered and that no step has taken, if none drops."""
        return self.prompts_per_step * (self.max_lag + 1) + self.carried_groups

    def oldest_trained(self, step: int) -> int | None:
        """Version of the oldest tokens that a step trains; None if the window alone bounds it."""
        if not self.carried_groups:
            return None
        if self.max_token_age is not None:
            return step - self.max_token_age
        return step - self.max_lag - -(-self.carried_groups // self.prompts_per_step)

    @property
    def samples_per_group(self) -> int:
        """Number of rollouts that are started for a prompt."""
        return self.group_size + self.overprovision

    def _problems(self) -> Iterator[str]:
        if self.oversampling != OVERSAMPLING and not self.dynamic_sampling:
            yield (
                f"oversampling is {self.oversampling:g} but dynamic_sampling is false, so no group "
                "is dropped or replaced: set dynamic_sampling to true or remove oversampling"
            )
        if self.overprovision and self.max_lag == 0:
            yield (
                f"overprovision is {self.overprovision} but max_lag is 0, and a synchronous run "
                "repeats bit for bit, unlike the order in which rollouts finish: set max_lag to "
                "1 or more, or overprovision to 0"
            )
        yield from self._carry_problems()

    def _carry_problems(self) -> Iterator[str]:
        carried, age = self.carried_groups, self.max_token_age
        if carried and self.max_lag == 0:
            yield (
                f"carried_groups is {carried} but max_lag is 0, and a synchronous step waits for "
                "all of its rollouts: set max_lag to 1 or more, or carried_groups to 0"
            )
        if age is not None and not carried:
            yield (
                f"max_token_age is {age} but carried_groups is 0, so no token is older than "
                "max_lag: set carried_groups above 0 or remove max_token_age"
            )
        if age is not None and age < self.max_lag:
            yield (
                f"max_token_age is {age} but max_lag is {self.max_lag}, so rollouts that no step "
                "has passed over would lose tokens: raise max_token_age to max_lag or more, or "
                "lower max_lag"
            )


class LateRewardsConfig(Section):
    """Rewards that are posted after their rollouts were trained on."""

    max_age: CountOrZero = 0
    """Maximum lag in policy versions of a rollout when its late reward arrives; 0 accepts none."""

    @property
    def on(self) -> bool:
        """Whether the run reads posted rewards."""
        return self.max_age > 0


class EvalConfig(Section):
    """Held-out evaluation."""

    episodes: Annotated[int, Field(ge=1, le=2000)] = 200
    """Number of distinct held-out episodes per evaluation; all of them if the data has fewer."""

    temperature: Temperature = 0.0
    """Sampling temperature of evaluation; 0 is greedy."""

    every: CountOrZero = 0
    """Steps between evaluations; 0 evaluates only before and after training."""
