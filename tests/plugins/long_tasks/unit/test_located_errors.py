"""Mistakes that only the end of an episode shows are error sites of the turn that made them."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from composer_mesh.configs.policy import WarmStartConfig
from composer_mesh.plugins.long_tasks.home_devices import HomeDevices
from composer_mesh.plugins.long_tasks.long_task import UNREPORTED, LongTask
from composer_mesh.plugins.long_tasks.tool_chains import ToolChains
from composer_mesh.rollouts.hints import TEMPLATES, render_hint
from composer_mesh.rollouts.tool_calls import ToolCall, call_text, parse_action
from composer_mesh.rollouts.traces import ErrorSite
from composer_mesh.tasks.errors import ToolError, UnusableTask
from composer_mesh.tasks.mistakes import off_by_one
from composer_mesh.tasks.playing import SyncSession, demonstrate
from composer_mesh.tasks.session import Reply, Session
from composer_mesh.tasks.task import Task, TaskSettings

KINDS = (ToolChains, HomeDevices)
SETTINGS = TaskSettings(max_turns=12)


def long_task(kind: type[LongTask]) -> LongTask:
    return kind.create(SETTINGS, calls=6)


def spoiled(task: LongTask, index: int) -> tuple[int, list[ErrorSite], str]:
    """Play an episode in which one number of a call is wrong; return its turn, sites and step.

    The turn is -1 for a question without a number to mistake.
    """
    with SyncSession(task, task.episode("train", index)) as session:
        turn, done, wrong, sites, said = 0, False, -1, list[ErrorSite](), ""
        while not done:
            text = task.continued(session.messages)
            action = parse_action(text)
            other = off_by_one(action, session.messages) if isinstance(action, ToolCall) else None
            if wrong < 0 and other is not None and turn >= 1:
                wrong, text = turn, other
                said = task.words_of_steps(session.messages[0]["content"])[turn]
            result = session.step(text)
            done, turn = result.done, turn + 1
            sites += [result.error] if result.error else []
        assert session.outcome().success == (wrong < 0)
        return wrong, sites, said


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_a_wrong_end_is_at_the_call_that_spoiled_it(kind: type[LongTask]) -> None:
    task, found = long_task(kind), 0
    templates = TEMPLATES.extended(task.hint_templates)
    for index in range(20):
        wrong, sites, said = spoiled(task, index)
        if wrong < 0:
            continue
        found += 1
        assert [(site.turn, site.error_kind) for site in sites] == [(wrong, "wrong_step")]
        assert render_hint(sites[0], templates=templates) == f"Hint: Not this step. Do now: {said}."
    assert found > 10


@pytest.mark.parametrize("kind", KINDS)
def test_each_call_of_a_plan_has_words_of_the_question(kind: type[LongTask]) -> None:
    task = long_task(kind)
    for index in range(50):
        question = task.episode("train", index).payload["question"]
        words = task.words_of_steps(question)
        assert len(words) == len(task.plan(question)) == 6
        assert all(one in question for one in words)
        assert len(set(words)) == 6


def test_a_wrong_end_after_right_calls_stays_an_error_of_the_end() -> None:
    task = long_task(ToolChains)
    episode = task.episode("train", 0)
    *calls, _ = task.gold(episode.payload)
    with SyncSession(task, episode) as session:
        for text in calls:
            session.step(text)
        error = session.step("Answer: 1").error
    assert error is not None
    assert (error.turn, error.error_kind) == (6, "wrong_answer")


def test_a_step_too_many_is_located() -> None:
    task = long_task(HomeDevices)
    episode = task.episode("train", 0)
    *calls, end = task.gold(episode.payload)
    more = call_text("switch", {"device": sorted(episode.payload["devices"])[0], "on": True})
    again = call_text("set_timer", {"device": sorted(episode.payload["devices"])[0], "minutes": 99})
    with SyncSession(task, episode) as session:
        for text in (*calls, more, again):
            session.step(text)
        error = session.step(end).error
    assert error is not None
    assert (error.turn, error.error_kind) == (6, "extra_step")


@pytest.mark.parametrize("kind", KINDS)
def test_demonstrations_have_the_hints_of_mistakes_that_no_tool_reports(
    kind: type[LongTask],
) -> None:
    task = long_task(kind)
    settings = WarmStartConfig(error_rate=0.5, hinted_share=1.0, demonstrations=60)
    opening = UNREPORTED["wrong_step"].split("{")[0]
    hinted = 0
    for index in range(60):
        pieces = list(demonstrate(task, index, settings, random.Random(index)))
        for (kind_, text), (_, action) in pairwise(pieces):
            if kind_ == "hint" and opening in text:
                hinted += 1
                assert isinstance(parse_action(action), ToolCall)
    assert hinted > 10


class Late(Task):
    """A task that finds a mistake at the end, at the turn that `at` names."""

    def __init__(self, at: Any = 0) -> None:
        self.at = at

    def generate(self, rng: random.Random) -> dict[str, Any]:
        return {"number": rng.randint(0, 10**6)}

    def prompt(self, row: Any) -> str:
        return "Go on until you stop."


class LateSession(Session):
    def reply(self, text: str) -> Any:
        if text != "stop":
            return "go on"
        assert self.conversation[-1]["content"] == "stop"
        assert sum(one["role"] == "assistant" for one in self.conversation) == 3
        assert isinstance(self.task, Late)
        return Reply(error=ToolError("late", "a mistake", turn=self.task.at))


Late.session_class = LateSession


def stopped(at: Any) -> ErrorSite | None:
    task = Late.create(SETTINGS, at=at)
    with SyncSession(task, task.episode("train", 0)) as session:
        session.step("one")
        session.step("two")
        return session.step("stop").error


@pytest.mark.parametrize(("at", "turn"), [(0, 0), (1, 1), (2, 2), (None, 2)])
def test_a_session_reads_the_conversation_and_locates_an_error(at: Any, turn: int) -> None:
    error = stopped(at)
    assert error is not None
    assert error.turn == turn


@pytest.mark.parametrize("at", [-1, 3])
def test_a_turn_that_was_not_played_is_refused(at: int) -> None:
    with pytest.raises(UnusableTask, match=rf"turn {at} but the agent is at turn 2: .*0 to 2"):
        stopped(at)
