"""Outcome of querying the teachers about a step's groups."""

from collections import Counter
from dataclasses import dataclass, field

from composer_mesh.rollouts.consensus import MAJORITY, Outcome
from composer_mesh.rollouts.pairs import PreferencePair


@dataclass
class ReplayOutcome:
    """Pairs and counts from querying teachers about some groups. Cached answers cost 0 dollars.

    `skipped` states were not worth a query, and `saved` of them would otherwise have fit into the
    group's share; `failures` counts failed teacher queries by kind.
    """

    pairs: list[PreferencePair] = field(default_factory=list)
    states: int = 0
    skipped: int = 0
    saved: int = 0
    answers: int = 0
    cached: int = 0
    usd: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def agreement(self) -> float | None:
        """Share of the states with a majority of teachers in which it did what the student did."""
        decided = sum(self.outcomes[outcome] for outcome in MAJORITY)
        return self.outcomes[Outcome.STUDENT_AGREES] / decided if decided else None

    def __iadd__(self, other: "ReplayOutcome") -> "ReplayOutcome":
        self.pairs += other.pairs
        self.states += other.states
        self.skipped += other.skipped
        self.saved += other.saved
        self.answers += other.answers
        self.cached += other.cached
        self.usd += other.usd
        self.outcomes += other.outcomes
        self.failures += other.failures
        self.dropped += other.dropped
        return self
