"""Counters of an offline replay: outcomes, and each teacher's answers, votes and dollars."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.rollouts.consensus import MAJORITY, Outcome, decide
from composer_mesh.rollouts.pairs import (
    StudentState,
    TeacherAnswer,
    TeacherFailure,
    TeacherReply,
    TeacherVote,
)
from composer_mesh.services.offline.teacher_client import is_short

ABSTAINED = ("failed", "malformed", "undecided")


@dataclass
class Agreement:
    """Number of agreements out of a total."""

    agreed: int = 0
    of: int = 0

    def add(self, agreed: bool) -> None:
        self.agreed, self.of = self.agreed + agreed, self.of + 1

    @property
    def share(self) -> float | None:
        return self.agreed / self.of if self.of else None


@dataclass
class TeacherFigures:
    """Figures of one teacher. `malformed` answers cannot vote; `usd` is the cost of this pass."""

    asked: int = 0
    answered: int = 0
    cached: int = 0
    malformed: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    majority: Agreement = field(default_factory=Agreement)
    student: Agreement = field(default_factory=Agreement)
    usd: float = 0.0
    latencies: list[float] = field(default_factory=list)
    example: str = ""

    def add_voice(self, voice: TeacherVote, majority: bool) -> None:
        """Count an actual vote's side; `majority` says whether there was a majority."""
        self.asked += 1
        self.malformed += voice.kind == "malformed"
        if voice.kind in ABSTAINED:
            return
        self.student.add(voice.with_student)
        if majority:
            self.majority.add(voice.with_majority)

    def add_reply(self, reply: TeacherReply) -> None:
        """Count the outcome of a query."""
        self.usd += reply.usd
        if isinstance(reply, TeacherFailure):
            self.failures[reply.kind.value] += 1
            self.example = self.example or reply.text
            return
        self.answered += 1
        self.cached += reply.cached
        if not reply.cached:
            self.latencies.append(reply.latency_s)

    def as_dict(self) -> dict[str, Any]:
        """Return the report's object. Latencies exclude cached answers."""
        return {
            "asked": self.asked,
            "answered": self.answered,
            "cached": self.cached,
            "malformed": self.malformed,
            "failures": dict(sorted(self.failures.items())),
            "agrees_with_majority": self.majority.share,
            "agrees_with_student": self.student.share,
            "usd": self.usd,
            "latency_p50_s": percentile(self.latencies, 0.5),
            "latency_p95_s": percentile(self.latencies, 0.95),
            "failure_example": self.example,
        }


class ReplayFigures:
    """Running totals of a replay."""

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self.teachers: dict[str, TeacherFigures] = {}
        self.outcomes: Counter[str] = Counter({outcome.value: 0 for outcome in Outcome})
        self.dropped: Counter[str] = Counter()
        self.short_of_budget: list[str] = []
        self.groups = self.states = self.answered = self.skipped = self.kept = 0

    @property
    def usd(self) -> float:
        return sum(teacher.usd for teacher in self.teachers.values())

    def add(self, state: StudentState, replies: Sequence[TeacherReply]) -> None:
        """Count one state's replies.

        `short_of_budget` lists the states with a query that the budget prevented.
        """
        decision = decide(state, replies, self._threshold)
        self.states += 1
        self.outcomes[decision.outcome.value] += 1
        self.answered += any(isinstance(reply, TeacherAnswer) for reply in replies)
        if is_short(replies):
            self.short_of_budget.append(state.state.state_id)
        for voice in decision.provenance.voices:
            self._of(voice.teacher).add_voice(voice, decision.outcome in MAJORITY)
        for reply in replies:
            self._of(reply.teacher).add_reply(reply)

    def add_group(self, skipped: int, dropped: Mapping[str, int], kept: int) -> None:
        """Count the results of selection and filtering for one group."""
        self.groups += 1
        self.skipped += skipped
        self.kept += kept
        self.dropped.update(dropped)

    def _of(self, teacher: str) -> TeacherFigures:
        return self.teachers.setdefault(teacher, TeacherFigures())


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank percentile; None without values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
