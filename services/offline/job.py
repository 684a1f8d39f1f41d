"""Job of an offline replay: groups in order, their states to the teachers, pairs out in order.

The rules are those of a training run: `Replay` selects and votes, `PairFilters` drop. This module
only keeps enough groups in flight, in group order, so that the same traces and answers make the
same pairs.

Its figures are the price in advance, and the outcomes, votes and dollars. The price has states,
queries, an upper bound and an estimate. Each query counts once, with the longest answer (bound) or
one as long as the student's own action (estimate). Retries of failed queries are not priced; the
ledger's limit covers them too.
"""

import asyncio
import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.actors.panel.panel import TeacherTally, chosen_teachers
from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.actors.provider.money import bound
from composer_mesh.configs.replay import ReplayConfig
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.waiting import cancel_and_wait
from composer_mesh.rollouts.budget import Prices, dollars, nano
from composer_mesh.rollouts.consensus import MAJORITY, VoteOutcome, decide
from composer_mesh.rollouts.pair_filters import PairFilters
from composer_mesh.rollouts.pairs import (
    FrozenState,
    PreferencePair,
    StudentState,
    TeacherAnswer,
    TeacherFailure,
    TeacherReply,
    TeacherVote,
)
from composer_mesh.rollouts.state_choice import Selection
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.offline.session import Stopped, TeacherClient, is_short
from composer_mesh.services.offline.traces import TraceFileError
from composer_mesh.services.replay.teacher_queries import Replay, replay_of
from composer_mesh.services.steps.step_manifest import ReplayOutcome

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


AHEAD = 2
"""States of groups in flight, as a multiple of the query concurrency."""


class _Remembering:
    """`Teachers` port over the teacher client that stores replies until they are taken."""

    def __init__(self, teacher_client: TeacherClient) -> None:
        self._teacher_client = teacher_client
        self._replies: dict[str, list[TeacherReply]] = {}

    async def query(self, state: FrozenState, n: int) -> list[TeacherReply]:
        replies = await self._teacher_client.query(state, n)
        self._replies[state.state_id] = replies
        return replies

    def take(self, state_id: str) -> list[TeacherReply] | None:
        """Return the replies about a state; None if it was not queried."""
        return self._replies.pop(state_id, None)


def _nothing(_: ReplayFigures) -> None:
    return None


@dataclass
class OfflineJob:
    """One pass over some groups. `tell` is called after each finished group."""

    config: Config
    teacher_client: TeacherClient
    concurrency: int
    tell: Callable[[ReplayFigures], None] = _nothing
    pairs: list[PreferencePair] = field(default_factory=list)
    figures: ReplayFigures = field(init=False)

    def __post_init__(self) -> None:
        self._answers = _Remembering(self.teacher_client)
        self._replay = replay_of(self.config, self._answers)
        self._filters = PairFilters(self.config.replay.filters)
        self.figures = ReplayFigures(self.config.replay.agreement_threshold)

    async def run(self, groups: Iterable[Sequence[Trace]], limit: int | None = None) -> bool:
        """Query all groups, or the first `limit` states; return whether the pass was completed.

        Once the client is stopped, waits for queries in flight and returns with the completed
        groups. On cancellation, queries in flight are dropped.
        """
        window: deque[tuple[Selection, asyncio.Task[ReplayOutcome]]] = deque()
        try:
            for selection in selections(self._replay, groups, limit):
                window.append((selection, asyncio.create_task(self._replay.ask_about(selection))))
                while sum(chosen.most for chosen, _ in window) > AHEAD * self.concurrency:
                    await self._finish(*window.popleft())
            while window:
                await self._finish(*window.popleft())
        except Stopped:
            await self.teacher_client.idle()
            return False
        finally:
            await cancel_and_wait([task for _, task in window])
        return True

    async def _finish(self, selection: Selection, asking: "asyncio.Task[ReplayOutcome]") -> None:
        replayed = await asking
        filtered = await asyncio.to_thread(self._filters.keep, replayed.pairs)
        for states in selection.questions:
            if (replies := self._answers.take(states[0].state.state_id)) is not None:
                self.figures.add(states, replies)
        self.figures.add_group(selection.skipped, filtered.dropped, len(filtered.kept))
        self.pairs += filtered.kept
        self.tell(self.figures)


def plan_job(
    config: Config,
    groups: Iterable[Sequence[Trace]],
    teachers: Sequence[TeacherEndpoint],
    tools: Sequence[Mapping[str, Any]],
    limit: int | None = None,
) -> ReplayPlan:
    """Plan the queries of a job and their price; reads all groups and sends no query."""
    chosen = selections(replay_of(config, _Nobody()), groups, limit)
    return plan_replay(chosen, teachers, tools, config.replay)


class _Nobody:
    """A `Teachers` port for state selection only; any query raises."""

    async def query(self, state: FrozenState, n: int) -> list[TeacherReply]:
        raise RuntimeError(f"{n} teachers were queried about {state.state_id}: only choose states")


def selections(
    replay: Replay, groups: Iterable[Sequence[Trace]], limit: int | None = None
) -> Iterator[Selection]:
    """Yield the selected states group by group; raise `TraceFileError` for inconsistent traces."""
    left = limit
    for group in groups:
        if left is not None and left <= 0:
            return
        try:
            chosen = replay.choose(group)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise TraceFileError(
                f"group {group[0].group_id} cannot be replayed ({error}): repair its traces or "
                "remove them"
            ) from error
        if left is not None:
            chosen = chosen.cut(left)
            left -= chosen.most
        yield chosen
