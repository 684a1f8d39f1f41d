"""Figures of an offline replay: its price in advance, and its outcomes, votes and dollars.

The price has states, queries, an upper bound and an estimate. Each query counts once, with the
longest answer (bound) or one as long as the student's own action (estimate). Retries of failed
queries are not priced; the ledger's limit covers them too. No query is sent.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.actors.panel.panel import TeacherTally, chosen_teachers
from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.actors.provider.money import bound
from composer_mesh.configs.replay import ReplayConfig
from composer_mesh.rollouts.budget import Prices, dollars, nano
from composer_mesh.rollouts.consensus import MAJORITY, VoteOutcome, decide
from composer_mesh.rollouts.pairs import (
    StudentState,
    TeacherAnswer,
    TeacherFailure,
    TeacherReply,
    TeacherVote,
)
from composer_mesh.rollouts.state_choice import Selection
from composer_mesh.services.offline.session import is_short

BYTES_PER_TOKEN = 4
"""Bytes per token of English and JSON with current tokenizers; used for the estimate only."""

FRAME_BYTES = 256
"""Size of a request besides messages and tools: model, seed, limits."""


@dataclass
class TeacherPlan:
    """Planned queries of one teacher; amounts in nano-dollars, None if the price is unknown."""

    prices: Prices | None
    questions: int = 0
    bound: int | None = 0
    estimate: int | None = 0

    def add(self, bound: int | None, estimate: int | None) -> None:
        """Count one query; a sum with an unknown part is unknown."""
        self.questions += 1
        self.bound = None if self.bound is None or bound is None else self.bound + bound
        self.estimate = (
            None if self.estimate is None or estimate is None else self.estimate + estimate
        )


@dataclass
class ReplayPlan:
    """Planned queries of one pass. `saved` of the `skipped` states would have been queried."""

    teachers: dict[str, TeacherPlan]
    groups: int = 0
    states: int = 0
    skipped: int = 0
    saved: int = 0

    @property
    def questions(self) -> int:
        return sum(teacher.questions for teacher in self.teachers.values())

    @property
    def bound(self) -> int:
        """Upper bound in nano-dollars, over the teachers with known prices."""
        return sum(teacher.bound or 0 for teacher in self.teachers.values())

    @property
    def estimate(self) -> int:
        return sum(teacher.estimate or 0 for teacher in self.teachers.values())

    @property
    def unknown(self) -> list[str]:
        """Teachers with unknown prices."""
        return [name for name, teacher in self.teachers.items() if teacher.prices is None]

    def as_dict(self) -> dict[str, Any]:
        """Return the report's object."""
        return {
            "groups": self.groups,
            "states": self.states,
            "skipped": self.skipped,
            "saved": self.saved,
            "questions": self.questions,
            "usd_bound": dollars(self.bound),
            "usd_estimate": dollars(self.estimate),
            "unknown_prices": self.unknown,
            "teachers": {name: _teacher(plan) for name, plan in self.teachers.items()},
        }


def plan_replay(
    selections: Iterable[Selection],
    teachers: Sequence[TeacherEndpoint],
    tools: Sequence[Mapping[str, Any]],
    replay: ReplayConfig,
) -> ReplayPlan:
    """Price every query of these selections; reads all of them.

    A query of unknown price costs `assumed_usd`, if the config allows such queries.
    """
    budget = replay.budget
    assumed = nano(budget.assumed_usd) if budget.unknown_prices == "allow" else None
    plan = ReplayPlan({teacher.name: TeacherPlan(teacher.prices) for teacher in teachers})
    tools_bytes = len(json.dumps(list(tools)).encode())
    for selection in selections:
        plan.groups += 1
        plan.states += selection.most
        plan.skipped += selection.skipped
        plan.saved += selection.saved
        prices: defaultdict[str, list[tuple[int | None, int | None]]] = defaultdict(list)
        for state, *_ in selection.questions:
            size = tools_bytes + len(json.dumps(state.state.messages).encode()) + FRAME_BYTES
            for teacher in chosen_teachers(teachers, state.state.seed, replay.ask):
                prices[teacher.name].append(_price(teacher, state, size, assumed))
        for name, of_teacher in prices.items():
            for price in sorted(of_teacher, key=_dearest_first)[: selection.most]:
                plan.teachers[name].add(*price)
    return plan


def _dearest_first(price: tuple[int | None, int | None]) -> int:
    return -(price[0] or 0)


def _price(
    teacher: TeacherEndpoint, state: StudentState, size: int, assumed: int | None
) -> tuple[int | None, int | None]:
    """Return the bound and the estimate of one query."""
    if teacher.prices is None:
        return assumed, assumed
    answer = min(len(state.action_ids), teacher.max_tokens)
    return bound(teacher, size), teacher.prices.cost(size // BYTES_PER_TOKEN, answer)


def _teacher(plan: TeacherPlan) -> dict[str, Any]:
    return {
        "questions": plan.questions,
        "usd_bound": None if plan.bound is None else dollars(plan.bound),
        "usd_estimate": None if plan.estimate is None else dollars(plan.estimate),
    }


ABSTAINED = ("failed", "malformed", "undecided")


@dataclass
class TeacherFigures(TeacherTally):
    """Figures of one teacher: what became of its queries, and how it voted.

    `malformed` answers cannot vote. `majority` and `student` say of each vote whether it agreed
    with the majority, where there was one, and with the student.
    """

    queried: int = 0
    malformed: int = 0
    majority: list[bool] = field(default_factory=list)
    student: list[bool] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    example: str = ""

    def add_voice(self, voice: TeacherVote, majority: bool) -> None:
        """Count an actual vote's side; `majority` says whether there was a majority."""
        self.queried += 1
        self.malformed += voice.kind == "malformed"
        if voice.kind not in ABSTAINED:
            self.student.append(voice.with_student)
            self.majority += [voice.with_majority] if majority else []

    def count(self, reply: TeacherReply) -> None:
        """Count the outcome of a query."""
        super().count(reply)
        if isinstance(reply, TeacherFailure):
            self.example = self.example or reply.text
        elif not reply.cached:
            self.latencies.append(reply.latency_s)

    def as_dict(self) -> dict[str, Any]:
        """Return the report's object. Latencies exclude cached answers."""
        return {
            "asked": self.queried,
            "answered": self.answered + self.cached,
            "cached": self.cached,
            "malformed": self.malformed,
            "failures": dict(sorted(self.failed.items())),
            "agrees_with_majority": share_of(self.majority),
            "agrees_with_student": share_of(self.student),
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
        self.outcomes: Counter[str] = Counter({outcome.value: 0 for outcome in VoteOutcome})
        self.dropped: Counter[str] = Counter()
        self.short_of_budget: list[str] = []
        self.groups = self.states = self.answered = self.skipped = self.kept = 0

    @property
    def usd(self) -> float:
        return sum(teacher.usd for teacher in self.teachers.values())

    def add(self, states: Sequence[StudentState], replies: Sequence[TeacherReply]) -> None:
        """Count the replies to one question, and the outcome of each state that it decides.

        `short_of_budget` lists the states with a query that the budget prevented.
        """
        state, *others = states
        decision = decide(state, replies, self._threshold)
        self.states += 1
        self.outcomes[decision.outcome.value] += 1
        for other in others:
            self.outcomes[decide(other, replies, self._threshold).outcome.value] += 1
        self.answered += any(isinstance(reply, TeacherAnswer) for reply in replies)
        if is_short(replies):
            self.short_of_budget.append(state.state.state_id)
        for voice in decision.provenance.voices:
            self._of(voice.teacher).add_voice(voice, decision.outcome in MAJORITY)
        for reply in replies:
            self._of(reply.teacher).count(reply)

    def add_group(self, skipped: int, dropped: Mapping[str, int], kept: int) -> None:
        """Count the results of selection and filtering for one group."""
        self.groups += 1
        self.skipped += skipped
        self.kept += kept
        self.dropped.update(dropped)

    def _of(self, teacher: str) -> TeacherFigures:
        return self.teachers.setdefault(teacher, TeacherFigures())


def share_of(votes: Sequence[bool]) -> float | None:
    """Return the share of votes that agreed; None without votes."""
    return sum(votes) / len(votes) if votes else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank percentile; None without values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
