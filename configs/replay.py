"""The replay channel: teacher queries and the rules for preference pairs."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from composer_mesh.configs.base import (
    Concurrent,
    Count,
    FilePath,
    Processes,
    Seconds,
)
from composer_mesh.configs.breaker import BreakerConfig
from composer_mesh.configs.budget import BudgetConfig
from composer_mesh.configs.channel_schedule import ChannelSchedule
from composer_mesh.configs.channels import ChannelSection
from composer_mesh.configs.filters import DEFAULT_FILTERS, FilterConfig
from composer_mesh.configs.gate import GateConfig
from composer_mesh.configs.preference import WeightedPreferenceConfig
from composer_mesh.configs.teachers import TeacherConfig, check_costs, check_names

MOST_TEACHERS = 100
PairWeight = Literal["none", "margin"]


class ReplayConfig(WeightedPreferenceConfig, ChannelSection):
    """Preference pairs from teachers that agree with each other and disagree with the student."""

    weight_key: ClassVar[str] = "beta"

    beta_schedule: ChannelSchedule = Field(default_factory=ChannelSchedule)
    """How beta changes over the run; beta is its peak."""

    weight_pairs_by: PairWeight = "none"
    """Weight of each pair in the loss. "none": the same for all; "margin": by how many of the
    queried teachers the chosen action leads the next one, as a share."""

    actors: Processes = 2
    """Number of teacher-replay actors that query in parallel."""

    ask: Annotated[int, Field(ge=1, le=MOST_TEACHERS)] = 3
    """Number of teachers to query for each frozen state."""

    agreement_threshold: Annotated[int, Field(ge=2, le=MOST_TEACHERS)] = 2
    """Number of teachers that must give the same action for it to be the chosen one."""

    states_per_step: Concurrent = 16
    """Number of frozen states sent to the teachers per optimizer step."""

    timeout_s: Seconds = 30.0
    """Seconds until a teacher's answer no longer counts, including all retries."""

    connect_timeout_s: Seconds = 5.0
    """Seconds to establish a connection."""

    read_timeout_s: Seconds | None = None
    """Seconds without a received byte until a request fails; timeout_s when not set."""

    attempts: Annotated[int, Field(ge=1, le=100)] = 4
    """Maximum number of times to send one query, while failures are transient."""

    delivery: Literal["same_step", "late"] | None = None
    """"same_step": a step waits for its pairs; "late": pairs train when they arrive.

    Not set: late if rollouts run ahead of the trainer, same_step in synchronous runs."""

    max_age: Count = 8
    """Steps after which a pair expires, counted from its rollout's policy version."""

    cache: FilePath | None = None
    """SQLite file of paid answers, shared by runs; in policy.cache_dir when not set."""

    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    """Cost limits of the teachers."""

    breaker: BreakerConfig = Field(default_factory=BreakerConfig)
    """Circuit breaker of the teachers."""

    gate: GateConfig = Field(default_factory=GateConfig)
    """Selection of the states to query."""

    filters: Annotated[tuple[FilterConfig, ...], Field(strict=False, max_length=100)] = (
        DEFAULT_FILTERS
    )
    """Quality filters for pairs, in order."""

    teachers: Annotated[
        tuple[TeacherConfig, ...], Field(strict=False, max_length=MOST_TEACHERS)
    ] = ()
    """The teachers, in the order in which they are queried."""

    @model_validator(mode="after")
    def _a_pair_is_possible(self) -> Self:
        if self.agreement_threshold > self.ask:
            raise ValueError(
                f"agreement_threshold is {self.agreement_threshold} but ask is {self.ask}, so no "
                "answer can ever win: raise ask or lower agreement_threshold"
            )
        if self.beta > 0 and self.ask > len(self.teachers):
            raise ValueError(
                f"ask is {self.ask} but there are {len(self.teachers)} teachers, so no state can "
                "be sent to enough of them: add [[replay.teachers]] or lower ask, or set beta to 0"
            )
        check_names(self.teachers, "teachers")
        return self

    @model_validator(mode="after")
    def _costs_are_bounded(self) -> Self:
        if self.on:
            check_costs(self.teachers, self.budget, "teacher", "replay.budget")
        return self

    @property
    def has_builtin_teachers(self) -> bool:
        """Whether the run itself serves builtin teachers."""
        return any(teacher.kind == "builtin" for teacher in self.teachers)
