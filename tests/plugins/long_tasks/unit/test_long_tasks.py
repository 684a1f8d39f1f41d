"""Long tasks: solvable by their experts, refused where they cannot be, spoilt by each mistake."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError

from composer_mesh.configs.policy import WarmStartConfig
from composer_mesh.plugins.long_tasks.home_devices import HomeDevices
from composer_mesh.plugins.long_tasks.home_devices import plan as plan_of_request
from composer_mesh.plugins.long_tasks.long_task import (
    LongTask,
    accepted_results,
    skipped_call,
    value_or_text,
)
from composer_mesh.plugins.long_tasks.tool_chains import ToolChains
from composer_mesh.plugins.long_tasks.tool_chains import plan as plan_of_chain
from composer_mesh.rollouts.hints import TEMPLATES, render_hint
from composer_mesh.rollouts.tool_calls import ToolCall, call_text, parse_action
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.loading import TaskMixture, make_task
from composer_mesh.tasks.mistakes import off_by_one, stale_value, wrong_operation
from composer_mesh.tasks.planned import PlannedCall, ResultReference
from composer_mesh.tasks.playing import SyncSession, demonstrate
from composer_mesh.tasks.task import Task, TaskSettings

KINDS = (ToolChains, HomeDevices)
SETTINGS = TaskSettings(max_turns=12)
CHAIN = "Take the value of lamp, add 7, convert from yards to feet, subtract the value of rope."
REQUEST = "Turn fan on. Set fan to 40. Set lamp to the level of oven. Put oven in eco mode."


def long_task(kind: type[LongTask], calls: int = 6) -> LongTask:
    return kind.create(SETTINGS, calls=calls)


def act(task: Task, session: SyncSession, how: str) -> int:
    """Play to the end by a method of the task; returns the number of actions."""
    turns, done = 0, False
    while not done:
        done, turns = session.step(getattr(task, how)(session.messages)).done, turns + 1
    return turns


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("calls", [2, 5, 9])
def test_the_expert_and_the_gold_actions_solve_episodes_with_the_calls_asked_for(
    kind: type[LongTask], calls: int
) -> None:
    task = long_task(kind, calls)
    for index in range(25):
        for split in ("train", "heldout"):
            episode = task.episode(split, index)
            for how in ("expert", "continued"):
                with SyncSession(task, episode) as session:
                    assert act(task, session, how) == calls + 1
                    outcome = session.outcome()
                assert (outcome.success, outcome.reward) == (True, 1.0)
            with SyncSession(task, episode) as session:
                results = [session.step(text) for text in task.gold(episode.payload)]
                assert session.outcome().success
            assert not any(result.error for result in results)


def test_no_part_of_a_request_is_rewarded() -> None:
    task = long_task(HomeDevices)
    episode = task.episode("train", 0)
    *calls, end = task.gold(episode.payload)
    for done in range(len(calls)):
        with SyncSession(task, episode) as session:
            for text in (*calls[:done], end):
                session.step(text)
            assert session.outcome().reward == 0.0


def test_no_part_of_a_chain_is_rewarded() -> None:
    task = long_task(ToolChains)
    episode = task.episode("train", 0)
    with SyncSession(task, episode) as session:
        for text in task.gold(episode.payload)[:-1]:
            session.step(text)
        session.step("Answer: 1")
        assert session.outcome().reward == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_one_mistake_that_no_tool_reports_spoils_the_episode(kind: type[LongTask]) -> None:
    task, kinds = long_task(kind), Counter[str]()
    for index in range(60):
        episode = task.episode("train", index)
        gold = task.gold(episode.payload)
        for turn, right in enumerate(gold):
            with SyncSession(task, episode) as session:
                for text in gold[:turn]:
                    session.step(text)
                rng = random.Random(f"{index}:{turn}")
                wrong = task.corrupted(session.messages, rng)
                assert wrong != right
                result = session.step(wrong)
                kinds[result.error.error_kind if result.error else "silent"] += 1
                if result.error is None or result.done:
                    while not result.done:
                        result = session.step(task.continued(session.messages))
                    assert not session.outcome().success, (wrong, session.messages)
    assert kinds["silent"] / kinds.total() == pytest.approx(0.2, abs=0.08)
    assert len(kinds) >= 6


@pytest.mark.parametrize("kind", KINDS)
def test_the_hints_of_mistakes_are_templates_and_tell_no_answer(kind: type[LongTask]) -> None:
    task, templates = long_task(kind), TEMPLATES.extended(kind.hint_templates)
    seen = set[str]()
    for index in range(60):
        episode = task.episode("train", index)
        with SyncSession(task, episode) as session:
            for turn, right in enumerate(task.gold(episode.payload)):
                rng = random.Random(f"{index}:{turn}")
                with SyncSession(task, episode) as copy:
                    for text in task.gold(episode.payload)[:turn]:
                        copy.step(text)
                    site = copy.step(task.corrupted(copy.messages, rng)).error
                if site is not None:
                    assert site.hint_template_key in templates
                    render_hint(site, task.verified_answer(episode), templates)
                    seen.add(site.error_kind)
                session.step(right)
    assert len(seen) >= 5


@pytest.mark.parametrize("calls", [1, 10, 6.0, "6", True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_of_calls_out_of_bounds_is_refused(kind: type[LongTask], calls: Any) -> None:
    with pytest.raises(UnusableTask, match=r"data\.options\.calls is .* from 2 to 9"):
        kind(calls=calls)


@pytest.mark.parametrize("kind", KINDS)
def test_too_few_turns_for_the_calls_are_refused(kind: type[LongTask]) -> None:
    with pytest.raises(UnusableTask, match=r"raise environment\.max_turns to 7"):
        kind.create(TaskSettings(max_turns=6), calls=6)
    assert kind.create(TaskSettings(max_turns=7), calls=6).calls == 6


@pytest.mark.parametrize("name", ["tool_chains", "home_devices"])
def test_a_config_makes_the_task_and_refuses_a_file(name: str, build_config: Any) -> None:
    data = {"task": name, "options": {"calls": 3}}
    task = make_task(build_config(data=data, environment={"max_turns": 4}))
    assert (task.name, task.episode("train", 0).task) == (name, name)
    with pytest.raises(ValidationError, match="makes its own episodes"):
        build_config(data={**data, "path": "rows.jsonl"})


def test_a_chain_has_a_plan_in_which_each_call_uses_the_result_before() -> None:
    assert plan_of_chain(CHAIN) == [
        PlannedCall("lookup", {"key": "lamp"}),
        PlannedCall("calculator", {"op": "add", "a": ResultReference(0), "b": 7}),
        PlannedCall("convert", {"value": ResultReference(1), "source": "yards", "target": "feet"}),
        PlannedCall("lookup", {"key": "rope"}),
        PlannedCall(
            "calculator", {"op": "subtract", "a": ResultReference(2), "b": ResultReference(3)}
        ),
    ]


def test_a_request_has_a_plan_of_typed_calls() -> None:
    assert plan_of_request(REQUEST) == [
        PlannedCall("switch", {"device": "fan", "on": True}),
        PlannedCall("set_level", {"device": "fan", "level": 40}),
        PlannedCall("read_level", {"device": "oven"}),
        PlannedCall("set_level", {"device": "lamp", "level": ResultReference(2)}),
        PlannedCall("set_mode", {"device": "oven", "mode": "eco"}),
    ]


@pytest.mark.parametrize(
    "text", ["", "Take 3.", "Take 3, add x.", "Take 3, add 4", "Set fan to 4."]
)
def test_a_text_that_is_no_chain_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a chain"):
        plan_of_chain(text)


@pytest.mark.parametrize("text", ["", "Set fan to high.", "Set fan to 4", "Turn fan on. Sing."])
def test_a_text_that_is_no_request_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no request"):
        plan_of_request(text)


def test_numbers_of_a_chain_stay_small_enough_to_be_copied() -> None:
    task = long_task(ToolChains, 9)
    for index in range(40):
        with SyncSession(task, task.episode("train", index)) as session:
            act(task, session, "expert")
            shown = [one["content"] for one in session.messages if one["role"] == "tool"]
        assert all(2 <= float(value) <= 999 for value in shown)


def test_heldout_requests_need_functions_in_an_order_that_is_never_trained() -> None:
    task = long_task(HomeDevices, 4)
    train, heldout = (
        {task.identity(task.episode(split, index).payload) for index in range(300)}
        for split in ("train", "heldout")
    )
    assert not train & heldout
    assert len(heldout) > 20


def test_a_device_that_is_off_is_not_set_and_the_hint_says_so() -> None:
    task = long_task(HomeDevices)
    row = {
        "question": "Turn fan on. Set fan to 40.",
        "devices": {"fan": {"level": 3, "on": False, "mode": "eco", "timer": 0}},
        "wanted": {"fan": {"level": 40, "on": True, "mode": "eco", "timer": 0}},
    }
    episode = task.episode("train", 0)
    with SyncSession(task, type(episode)("home_devices", "train", 0, row)) as session:
        site = session.step(call_text("set_level", {"device": "fan", "level": 40})).error
        assert site is not None
        assert site.error_kind == "device_off"
        assert "Switch it on" in render_hint(
            site, templates=TEMPLATES.extended(task.hint_templates)
        )
        for text in task.gold(row):
            session.step(text)
        assert session.outcome().success


def test_typed_arguments_are_checked() -> None:
    task = long_task(HomeDevices)
    wrong = {
        "wrong_type": call_text("switch", {"device": "fan", "on": "true"}),
        "bad_value": call_text("set_mode", {"device": "fan", "mode": "economy"}),
        "unknown_device": call_text("read_level", {"device": "sofa"}),
        "no_answer": "I can not answer.",
    }
    for kind, text in wrong.items():
        with SyncSession(task, task.episode("train", 0)) as session:
            error = session.step(text).error
        assert error is not None
        assert error.error_kind == kind


# An agent that takes what was accepted for right.

STEPS = [
    PlannedCall("lookup", {"key": "lamp"}),
    PlannedCall("calculator", {"op": "add", "a": ResultReference(0), "b": 7}),
    PlannedCall("calculator", {"op": "subtract", "a": ResultReference(1), "b": 2}),
]


def said(*exchanges: tuple[ToolCall, str]) -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": "?"}]
    for call, content in exchanges:
        messages.append({"role": "assistant", "content": call_text(call.name, call.arguments)})
        messages.append({"role": "tool", "content": content})
    return messages


LOOKUP = (ToolCall("lookup", {"key": "lamp"}), "12")


@pytest.mark.parametrize(
    ("exchanges", "results"),
    [
        ([LOOKUP], [12]),
        ([(ToolCall("lookup", {"key": "lamp value"}), "error: no key"), LOOKUP], [12]),
        ([LOOKUP, (ToolCall("calculator", {"op": "add", "a": 12, "b": 8}), "20")], [12, 20]),
        (
            [LOOKUP, (ToolCall("calculator", {"op": "subtract", "a": 12, "b": 2}), "10")],
            [12, 12, 10],
        ),
        ([(ToolCall("switch", {}), "ok")], ["ok"]),
    ],
    ids=["right", "error", "wrong number", "forgotten step", "text"],
)
def test_accepted_calls_stand_for_steps(
    exchanges: list[tuple[ToolCall, str]], results: list[Any]
) -> None:
    assert accepted_results(STEPS, said(*exchanges), value_or_text) == results


def test_calls_beyond_the_plan_are_no_steps() -> None:
    every = [LOOKUP, (STEPS[1].call([12]), "19"), (STEPS[2].call([12, 19]), "17"), LOOKUP]
    assert accepted_results(STEPS, said(*every), value_or_text) == [12, 19, 17]


def test_who_forgets_a_step_makes_the_next_call_with_the_latest_result() -> None:
    text = skipped_call(STEPS, [12])
    assert text is not None
    assert parse_action(text) == ToolCall("calculator", {"op": "subtract", "a": 12, "b": 2})
    assert skipped_call(STEPS, []) is None
    assert skipped_call(STEPS, [12, 19]) is None


def test_silent_mistakes_are_of_their_kind_or_none() -> None:
    call = ToolCall("calculator", {"op": "add", "a": 19, "b": 7})
    messages = said(LOOKUP, (STEPS[1].call([12]), "19"))

    def arguments(text: str | None) -> Any:
        action = parse_action(text or "")
        assert isinstance(action, ToolCall)
        return action.arguments

    assert arguments(off_by_one(call, messages)) == {**call.arguments, "b": 6}
    assert arguments(stale_value(call, messages)) == {**call.arguments, "a": 12}
    assert arguments(wrong_operation(call, messages))["op"] == "subtract"
    words = ToolCall("lookup", {"key": "lamp"})
    assert off_by_one(words, messages) is None
    assert wrong_operation(words, messages) is None
    assert stale_value(call, said(LOOKUP)) is None


@pytest.mark.parametrize("kind", KINDS)
def test_demonstrations_go_on_from_what_was_accepted(kind: type[LongTask]) -> None:
    task, rng = long_task(kind), random.Random(0)
    settings = WarmStartConfig(error_rate=0.3, hinted_share=0.0)
    went_on = 0
    for index in range(60):
        with SyncSession(task, task.episode("train", index)) as session:
            unnoticed = False
            for piece, text in demonstrate(task, index, settings, rng):
                if piece != "action":
                    continue
                expert, continued = (f(session.messages) for f in (task.expert, task.continued))
                went_on += unnoticed and text == continued != expert
                result = session.step(text)
                unnoticed |= result.error is None and text not in (expert, continued)
    assert went_on > 20


def test_a_mixture_goes_on_as_the_conversations_own_task() -> None:
    tasks: list[Task] = [long_task(ToolChains), long_task(HomeDevices)]
    mixture = TaskMixture(tasks, [1.0, 1.0])
    for task in tasks:
        messages: list[Message] = [
            {"role": "user", "content": task.episode("train", 0).payload["question"]}
        ]
        assert mixture.continued(messages) == task.continued(messages)
