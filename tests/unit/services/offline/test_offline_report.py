"""The report of an offline replay: sums of the replies, and others' words as words."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from preferences import ADD, ANSWER, BROKEN, LOOK, answer, answers, failure, student
from rich.console import Console

from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.configs.replay import ReplayConfig
from composer_mesh.rollouts.budget import Account, BudgetReport
from composer_mesh.rollouts.money import NANO, Prices
from composer_mesh.rollouts.pairs import FailureKind
from composer_mesh.rollouts.state_choice import Selection
from composer_mesh.services.offline.command import ReplayView
from composer_mesh.services.offline.job import (
    ReplayFigures,
    ReplayPlan,
    percentile,
    plan_replay,
    share_of,
)
from composer_mesh.services.offline.output import (
    FINISHED,
    plan_lines,
    plan_page,
    replay_report,
    report_page,
)

PRICES = Prices.per_million(1, 10)


def teacher(name: str, prices: Prices | None = PRICES) -> TeacherEndpoint:
    return TeacherEndpoint(name, "https://t.test/v1", name, max_tokens=100, prices=prices)


def plan(*teachers: TeacherEndpoint, skipped: int = 3, saved: int = 2, **replay: Any) -> ReplayPlan:
    states = [student(ANSWER) for _ in range(4)]
    chosen = Selection(states, [0.5] * 4, skipped, 4 + skipped, saved)
    config = ReplayConfig(**{"ask": 2, **replay})
    return plan_replay([chosen], teachers or (teacher("a"), teacher("b")), [], config)


def money(spent: float = 0.0, requests: int = 0) -> BudgetReport:
    account = Account(spent=round(spent * NANO), requests=requests)
    return BudgetReport(account, {"a": account})


def counted(*states: Any) -> ReplayFigures:
    figures = ReplayFigures(2)
    for replies in states:
        figures.add([student(ANSWER)], replies)
    return figures


def printed(page: Any) -> str:
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    console.print(page)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_each_teacher_is_counted_by_what_became_of_its_question() -> None:
    cached = answer("a", ADD, 0.0, cached=True)
    figures = counted(
        answers(ADD, ADD, ADD),
        [cached, answer("b", LOOK), failure("c", usd=0.25)],
        [answer("a", ANSWER), answer("b", ANSWER), answer("c", BROKEN)],
    )
    shown = {name: of.as_dict() for name, of in figures.teachers.items()}
    assert [(of["asked"], of["answered"], of["cached"]) for of in shown.values()] == [
        (3, 3, 1), (3, 3, 0), (3, 2, 0),
    ]  # fmt: skip
    assert shown["c"]["failures"] == {"rate": 1}
    assert shown["c"]["malformed"] == 1
    assert shown["c"]["usd"] == 0.5 + 0.25 + 0.5
    assert figures.outcomes["pair"] == figures.outcomes["student_agrees"] == 1


def test_agreement_counts_votes_where_there_was_a_majority() -> None:
    figures = counted(answers(ADD, ADD, LOOK), answers(ADD, ADD, ADD), answers(ADD, LOOK, None))
    assert figures.teachers["a"].majority == [True, True]
    assert share_of(figures.teachers["c"].majority) == 0.5


def test_a_state_that_lacks_a_teacher_for_the_budget_is_named() -> None:
    figures = counted(answers(ADD, ADD), [answer("a", ADD), failure("b", FailureKind.BUDGET)])
    assert figures.short_of_budget == ["g0-s0/1"]


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([3.0], 0.95, 3.0), ([1.0, 2.0, 3.0, 4.0], 0.5, 2.0)],
)
def test_a_percentile_is_a_value_that_was_measured(
    values: list[float], share: float, expected: float | None
) -> None:
    assert percentile(values, share) == expected


def test_ninety_five_of_a_hundred_are_not_above_the_95th() -> None:
    assert percentile([float(n) for n in range(100, 0, -1)], 0.95) == 95.0


def test_the_plan_counts_each_question_and_bounds_it_by_the_longest_answer() -> None:
    priced = plan()
    assert (priced.states, priced.skipped, priced.questions) == (4, 3, 8)
    longest = 8 * 100 * 10 * NANO // 10**6
    assert longest < priced.bound < 2 * longest
    assert 0 < priced.estimate < longest


def test_teachers_take_turns_where_fewer_are_asked_than_there_are() -> None:
    three = plan(teacher("a"), teacher("b"), teacher("c"))
    assert three.questions == 8


def test_an_unknown_price_is_named_and_counts_as_what_the_config_assumes() -> None:
    refused = plan(teacher("a"), teacher("b", None))
    assert (refused.unknown, refused.teachers["b"].bound) == (["b"], None)
    assert any("nobody says the prices of b" in line for line in plan_lines(refused, 1.0))
    allowed = plan(
        teacher("a"),
        teacher("b", None),
        budget={"unknown_prices": "allow", "assumed_usd": 0.5},
    )
    assert allowed.teachers["b"].bound == 4 * 0.5 * NANO


def test_a_ceiling_below_the_bound_is_said_before_anything_is_asked() -> None:
    assert any("it may end before all is queried" in line for line in plan_lines(plan(), 0.0001))
    assert len(plan_lines(plan(), 1.0)) == 1


def test_what_was_saved_is_what_such_questions_have_cost() -> None:
    figures = counted([answer("a", ADD, 0.0, cached=True), failure("b")])
    report = replay_report(figures, plan(), money(spent=0.8, requests=8), 1.0, FINISHED, 1.0)
    assert report["usd"]["saved_by_cache"] == pytest.approx(0.1)
    # Four questions to teacher a for four states: a skipped state would have cost one.
    assert report["usd"]["saved_by_gate"] == pytest.approx(2 * 0.1)
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_names_and_failures_reach_the_terminal_as_words() -> None:
    name, text = "[red]evil\x1b[2J", "no\x1b]0;title\x07 [bold]way[/bold]"
    figures = counted([replace(failure(name), text=text), failure("b")])
    report = replay_report(figures, plan(), money(), 1.0, FINISHED, 1.0)
    shown = printed(report_page(report)) + printed(plan_page(plan(teacher(name)), 1.0))
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown
    assert "[red]evil" in shown
    assert "[bold]way[/bold]" in shown


def test_without_a_terminal_progress_is_a_few_plain_lines() -> None:
    out = io.StringIO()
    figures = ReplayFigures(2)
    with ReplayView(plan(), 1.0, Console(file=out, width=60)) as view:
        for _ in range(4):
            figures.add([student(ANSWER)], answers(ADD, ADD))
            view.tell(figures)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("4 states of 1 groups")
    assert [line.split()[1] for line in lines[1:]] == [f"states={n}/4" for n in (1, 2, 3, 4)]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_progress_is_a_bar_that_lines_go_above() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, legacy_windows=False)
    with ReplayView(plan(), 1.0, console) as view:
        figures = counted(answers(ADD, ADD))
        view.tell(figures)
        view.say("a line")
    assert "1/4" in out.getvalue()
    assert "a line" in out.getvalue()
