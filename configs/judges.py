"""Judges: language models that reward functions ask, within one dollar ceiling for all of them."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from composer_mesh.configs.base import FilePath, Processes, Seconds, Section
from composer_mesh.configs.teachers import (
    BreakerConfig,
    BudgetConfig,
    TeacherConfig,
    check_costs,
    check_names,
)

MOST_JUDGES = 100


class JudgeConfig(TeacherConfig):
    """One judge: a model that speaks the OpenAI chat protocol."""

    kind: Literal["openai", "openrouter"] = "openai"
    """"openai": any compatible URL; "openrouter"."""


class JudgesConfig(Section):
    """Models that reward functions ask with `self.judge(NAME)`."""

    actors: Processes = 1
    """Number of judge actors that ask in parallel."""

    timeout_s: Seconds = 60.0
    """Seconds until a question has failed, with all its retries and waits."""

    connect_timeout_s: Seconds = 5.0
    """Seconds to establish a connection."""

    read_timeout_s: Seconds | None = None
    """Seconds without a received byte until a request fails; timeout_s when not set."""

    attempts: Annotated[int, Field(ge=1, le=100)] = 4
    """Maximum number of times to send one question, while failures are transient."""

    answers: Annotated[int, Field(ge=1, le=10)] = 3
    """Maximum number of answers to one question until one has the wanted form."""

    when_spent: Literal["stop", "leave_out"] = "stop"
    """What happens once budget.usd allows no further question.

    "stop": the run ends with a checkpoint, and can be resumed with more; "leave_out": rewards that
    ask judges are left out, for whole groups."""

    cache: FilePath | None = None
    """SQLite file of paid answers, shared by runs; that of the teachers when not set."""

    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    """Cost limits of all judges together."""

    breaker: BreakerConfig = Field(default_factory=BreakerConfig)
    """Circuit breaker of the judges."""

    models: Annotated[tuple[JudgeConfig, ...], Field(strict=False, max_length=MOST_JUDGES)] = ()
    """The judges by name."""

    @property
    def on(self) -> bool:
        """Whether the run has judges."""
        return bool(self.models)

    @property
    def patience_s(self) -> float:
        """Seconds that a reward may wait for one well-formed answer; 0 without judges."""
        return self.timeout_s * self.answers if self.on else 0.0

    @model_validator(mode="after")
    def _names_are_unique_and_costs_bounded(self) -> Self:
        check_names(self.models, "models")
        check_costs(self.models, self.budget, "judge", "judges.budget")
        return self
