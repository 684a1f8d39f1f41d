"""The replay channel: teacher queries and the rules for preference pairs.

Value-of-information gate: selects the student's states to send to teachers.

`rollouts.state_choice` computes the signals.

Quality filters for preference pairs before training, in order.

`rollouts.pair_filters` implements them.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from composer_mesh.configs.base import (
    Concurrent,
    Count,
    CountOrZero,
    FilePath,
    NotNegative,
    Positive,
    Processes,
    Seconds,
    Section,
    Share,
    by_type,
)
from composer_mesh.configs.channels import ChannelSchedule, SeparableChannel
from composer_mesh.configs.preference import WeightedPreferenceConfig
from composer_mesh.configs.teachers import (
    BreakerConfig,
    BudgetConfig,
    TeacherConfig,
    cost_problems,
    name_problems,
)


class GateConfig(Section):
    """Value of a state: the weighted mean of four signals, each from 0 to 1."""

    min_value: Share = 0.0
    """Minimum value of a state to be queried; 0 only orders the states."""

    error: NotNegative = 1.0
    """Weight of the error signal: 1 if the turn's action failed, 0.5 if only its episode did."""

    entropy: NotNegative = 0.5
    """Weight of the student's uncertainty: the mean surprisal of its sampled tokens."""

    disagreement: NotNegative = 0.5
    """Weight of the disagreement between the group's samples, in actions and in reward."""

    novelty: NotNegative = 0.5
    """Weight of novelty: how rarely such a state was queried before in the run."""

    entropy_scale: Positive = 1.0
    """Surprisal in nats at which the entropy signal is about 0.63."""

    def _problems(self) -> Iterator[str]:
        if not any((self.error, self.entropy, self.disagreement, self.novelty)):
            yield (
                "error, entropy, disagreement and novelty are all 0, so every state has the same "
                "value: give at least one of them a weight"
            )


Side = Literal["chosen", "rejected"]
BOTH: tuple[Side, ...] = ("chosen", "rejected")


class _OfSides(Section):
    """A filter on the texts of a pair; the pair is dropped if one text fails."""

    sides: Annotated[tuple[Side, ...], Field(strict=False, min_length=1, max_length=2)] = BOTH
    """Texts to check."""


class _Between(_OfSides):
    """A filter on a count with inclusive bounds."""

    max: Count

    min: CountOrZero

    def _problems(self) -> Iterator[str]:
        if self.min > self.max:
            yield f"min is {self.min} but max is {self.max}, so no text can pass: swap them"


class LengthFilter(_Between):
    """Number of characters of a text."""

    type: Literal["length"] = "length"
    """Type of the filter."""

    min: CountOrZero = 8
    """Minimum number of characters."""

    max: Count = 32_000
    """Maximum number of characters."""


class WordsFilter(_Between):
    """Number of words of a text; characters of scripts without spaces count one each."""

    type: Literal["words"]
    """Type of the filter."""

    min: CountOrZero = 2
    """Minimum number of words."""

    max: Count = 4_096
    """Maximum number of words."""


class SpecialCharactersFilter(_OfSides):
    """Share of characters other than letters, digits and white space; of a call, in its values."""

    type: Literal["special_characters"]
    """Type of the filter."""

    max_ratio: Share = 0.5
    """Maximum share."""


class ExactDuplicatesFilter(Section):
    """Drops pairs whose context and actions equal those of an earlier pair of the run."""

    type: Literal["exact_duplicates"]
    """Type of the filter."""


class NearDuplicatesFilter(Section):
    """Drops pairs whose text is similar to an earlier one, by MinHash over character shingles."""

    type: Literal["near_duplicates"]
    """Type of the filter."""

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Jaccard similarity from which two pairs count as duplicates."""

    shingle: Annotated[int, Field(ge=1, le=1000)] = 5
    """Characters per shingle."""

    permutations: Annotated[int, Field(ge=16, le=1024)] = 128
    """Number of hash functions; more are more accurate and slower."""

    window: Annotated[int, Field(ge=1, le=10_000_000)] = 50_000
    """Number of earlier pairs to compare with."""


FilterConfig = Annotated[
    Annotated[LengthFilter, Tag("length")]
    | Annotated[WordsFilter, Tag("words")]
    | Annotated[SpecialCharactersFilter, Tag("special_characters")]
    | Annotated[ExactDuplicatesFilter, Tag("exact_duplicates")]
    | Annotated[NearDuplicatesFilter, Tag("near_duplicates")],
    Discriminator(by_type("length")),
]

DEFAULT_FILTERS: tuple[FilterConfig, ...] = (
    LengthFilter(),
    WordsFilter(type="words"),
    SpecialCharactersFilter(type="special_characters"),
    ExactDuplicatesFilter(type="exact_duplicates"),
    NearDuplicatesFilter(type="near_duplicates"),
)


MOST_TEACHERS = 100
PairWeight = Literal["none", "margin"]
StateOrder = Literal["first", "value"]


class ReplayConfig(WeightedPreferenceConfig, SeparableChannel):
    """Preference pairs from teachers that agree with each other and disagree with the student."""

    weight_key: ClassVar[str] = "beta"

    beta_schedule: ChannelSchedule = Field(default_factory=ChannelSchedule)
    """How beta changes over the run; beta is its peak."""

    weight_pairs_by: PairWeight = "none"
    """Weight of each pair in the loss. "none": the same for all; "margin": the lead of the chosen
    action over the next one, as a share of the queried teachers."""

    actors: Processes = 2
    """Number of teacher-replay actors that query in parallel."""

    ask: Annotated[int, Field(ge=1, le=MOST_TEACHERS)] = 3
    """Number of teachers to query for each frozen state."""

    agreement_threshold: Annotated[int, Field(ge=2, le=MOST_TEACHERS)] = 2
    """Number of teachers that must give the same action before it becomes the chosen one."""

    states: StateOrder = "first"
    """Which states teachers are queried about. "first": each distinct context in order of turn,
    until the teachers first differ from a rollout; "value": the states with the highest value."""

    states_per_step: Concurrent = 16
    """Maximum number of frozen states (contexts, with "first") per optimizer step about which
    teachers are queried."""

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

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.agreement_threshold > self.ask:
            yield (
                f"agreement_threshold is {self.agreement_threshold} but ask is {self.ask}, so no "
                "answer can ever win: raise ask or lower agreement_threshold"
            )
        if self.beta > 0 and self.ask > len(self.teachers):
            yield (
                f"ask is {self.ask} but there are {len(self.teachers)} teachers, so no state can "
                "be sent to enough of them: add [[replay.teachers]] or lower ask, or set beta to 0"
            )
        yield from name_problems(self.teachers, "teachers")
        if self.on:
            yield from cost_problems(self.teachers, self.budget, "teacher", "replay.budget")

    @property
    def has_builtin_teachers(self) -> bool:
        """Whether the run itself serves builtin teachers."""
        return any(teacher.kind == "builtin" for teacher in self.teachers)
