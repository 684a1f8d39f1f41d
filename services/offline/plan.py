"""Price of an offline replay in advance: states, queries, an upper bound and an estimate.

Each query counts once, with the longest answer (bound) or one as long as the student's own action
(estimate). Retries of failed queries are not priced; the ledger's limit covers them too. No query
is sent.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_mesh.actors.panel.panel import chosen_teachers
from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.actors.provider.money import bound
from composer_mesh.configs.replay import ReplayConfig
from composer_mesh.rollouts.money import Prices, dollars, nano
from composer_mesh.rollouts.pairs import StudentState
from composer_mesh.rollouts.state_choice import Selection

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
        plan.states += len(selection.states)
        plan.skipped += selection.skipped
        plan.saved += selection.saved
        for state in selection.states:
            size = tools_bytes + len(json.dumps(state.state.messages).encode()) + FRAME_BYTES
            for teacher in chosen_teachers(teachers, state.state.seed, replay.ask):
                plan.teachers[teacher.name].add(*_price(teacher, state, size, assumed))
    return plan


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
