"""The toolbox task: solvable, disjoint, the same again from its seed, exact about its states.

Mistakes: each is a wrong version of its right action, of the kind that it stands for.
"""

import json
import random
from collections import Counter
from typing import Any

import pytest

from composer_mesh.rollouts.hints import render_hint
from composer_mesh.rollouts.tasks import Episode, StepResult
from composer_mesh.rollouts.tool_calls import ToolCall, call_text, parse_action
from composer_mesh.rollouts.traces import Message, Split
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.mistakes import (
    GIVE_UP,
    HABIT_SHARE,
    as_number,
    calls_and_results,
    corrupt,
    recover_or_give_up,
)
from composer_mesh.tasks.numbers import format_number
from composer_mesh.tasks.planned import PlannedCall, ResultReference
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.task import TaskSettings, split_of
from composer_mesh.tasks.toolbox import ToolboxTask, plan

SPLITS: tuple[Split, Split] = ("train", "heldout")


def play(task: ToolboxTask, session: SyncSession) -> list[StepResult]:
    """The expert's own episode from where the session is."""
    results = [session.step(task.expert(session.messages))]
    while not results[-1].done:
        results.append(session.step(task.expert(session.messages)))
    return results


def err_at_random(
    task: ToolboxTask, session: SyncSession, rng: random.Random
) -> list[list[Message]]:
    """An episode of an agent that errs half of the time; returns what it saw at each turn."""
    seen = []
    for _ in range(6):
        seen.append(session.messages)
        right = task.expert(session.messages)
        text = task.corrupted(session.messages, rng) if rng.random() < 0.5 else right
        if session.step(text).done:
            break
    return seen


@pytest.mark.parametrize("split", SPLITS)
def test_the_expert_solves_every_episode_with_one_to_three_calls(
    toolbox: ToolboxTask, split: Split
) -> None:
    calls = set()
    for index in range(300):
        session = SyncSession(toolbox, toolbox.episode(split, index))
        results = play(toolbox, session)
        outcome = session.outcome()
        assert (outcome.success, outcome.reward, outcome.rewards) == (True, 1.0, {"solved": 1.0})
        assert all(result.error is None for result in results)
        calls.add(len(results) - 1)
    assert calls == {1, 2, 3}


def test_gold_actions_solve_every_episode(toolbox: ToolboxTask) -> None:
    for index in range(60):
        episode = toolbox.episode("heldout", index)
        with SyncSession(toolbox, episode) as session:
            results = [session.step(text) for text in toolbox.gold(episode.payload)]
            assert (session.outcome().success, results[-1].done) == (True, True)


def test_training_and_heldout_questions_are_disjoint(toolbox: ToolboxTask) -> None:
    train, heldout = (
        {toolbox.episode(split, index).payload["question"] for index in range(2000)}
        for split in SPLITS
    )
    assert not train & heldout
    assert {split_of(question) for question in heldout} == {"heldout"}
    assert len(heldout) > 400


def test_the_same_seed_gives_the_same_episodes_and_another_one_others() -> None:
    one, same, other = (
        ToolboxTask.create(TaskSettings(seed=3)),
        ToolboxTask.create(TaskSettings(seed=3)),
        ToolboxTask.create(TaskSettings(seed=4)),
    )
    for split in SPLITS:
        assert [one.episode(split, i) for i in range(50)] == [
            same.episode(split, i) for i in reversed(range(50))
        ][::-1]
        assert [one.episode(split, i) for i in range(5)] != [
            other.episode(split, i) for i in range(5)
        ]


def test_an_episode_is_plain_data_that_gives_the_same_session(toolbox: ToolboxTask) -> None:
    episode = toolbox.episode("train", 8)
    assert json.loads(json.dumps(episode.payload)) == episode.payload
    one, other = (
        SyncSession(toolbox, episode),
        SyncSession(ToolboxTask.create(TaskSettings(seed=9, tool_error_penalty=0.1)), episode),
    )
    assert play(toolbox, one) == play(toolbox, other)
    assert one.messages == other.messages


@pytest.mark.parametrize("index", range(12))
def test_a_state_is_exactly_what_was_seen_also_after_the_end(
    toolbox: ToolboxTask, index: int
) -> None:
    session = SyncSession(toolbox, toolbox.episode("train", index))
    seen = err_at_random(toolbox, session, random.Random(index))
    assert [session.state(turn) for turn in range(len(seen))] == seen
    for turn, messages in enumerate(seen):
        assert sum(message["role"] == "assistant" for message in messages) == turn
    with pytest.raises(IndexError, match=f"ask for 0 to {len(seen) - 1}"):
        session.state(len(seen))
    with pytest.raises(IndexError, match="turn -1"):
        session.state(-1)


def test_no_one_can_change_a_session_through_what_it_returned(toolbox: ToolboxTask) -> None:
    session = SyncSession(toolbox, toolbox.episode("train", 0))
    first = session.step(toolbox.expert(session.messages))
    kept = session.messages
    for messages in (session.messages, session.state(0), session.state(1), first.messages):
        _spoil(messages)
    assert session.messages == kept
    assert session.state(1) == kept


def _spoil(messages: list[Message]) -> None:
    for message in messages:
        message["content"] = "spoilt"
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = "spoilt"
    messages.clear()


def test_the_expert_reads_nothing_but_the_messages(toolbox: ToolboxTask) -> None:
    stranger = ToolboxTask.create(TaskSettings(seed=99, max_turns=2))
    for index in range(50):
        session = SyncSession(toolbox, toolbox.episode("heldout", index))
        err_at_random(toolbox, session, random.Random(index))
        for turn in range(sum(m["role"] == "assistant" for m in session.messages)):
            state = json.loads(json.dumps(session.state(turn)))
            assert stranger.expert(state) == toolbox.expert(session.state(turn))


def test_the_expert_goes_on_after_mistakes_of_others(toolbox: ToolboxTask) -> None:
    for index in range(60):
        session = SyncSession(toolbox, toolbox.episode("train", index))
        session.step(call_text("abacus", {}))
        session.step(call_text("calculator", {"op": "add", "a": 1, "b": 1}))
        play(toolbox, session)
        assert session.outcome().success


def test_a_right_call_that_failed_is_made_again(toolbox: ToolboxTask) -> None:
    right = call_text("lookup", {"key": "lamp"})
    function = {"name": "lookup", "arguments": '{"key": "lamp"}'}
    call = {"id": "c", "type": "function", "function": function}
    messages: list[Message] = [
        {"role": "user", "content": "What is the value of lamp?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "error: no key lamp"},
    ]
    assert toolbox.expert(messages) == right
    messages[-1]["content"] = "31"
    assert toolbox.expert(messages) == "Answer: 31"


def test_a_corrupted_action_is_never_right(toolbox: ToolboxTask) -> None:
    for index in range(300):
        session, rng = SyncSession(toolbox, toolbox.episode("train", index)), random.Random(index)
        while True:
            messages, right = session.messages, toolbox.expert(session.messages)
            wrong = toolbox.corrupted(messages, rng)
            assert wrong != right
            copy = SyncSession(toolbox, toolbox.episode("train", index))
            for message in messages:
                if message["role"] == "assistant":
                    function = message["tool_calls"][0]["function"]
                    copy.step(call_text(function["name"], json.loads(function["arguments"])))
            copy.step(wrong)
            assert not copy.outcome().success
            if session.step(right).done:
                break


def test_the_hints_of_real_mistakes_never_hold_the_answer(toolbox: ToolboxTask) -> None:
    kinds = set()
    for index in range(300):
        episode = toolbox.episode("train", index)
        session, rng = SyncSession(toolbox, episode), random.Random(index)
        result = session.step(toolbox.corrupted(session.messages, rng))
        if result.error is not None:
            render_hint(result.error, format_number(episode.payload["answer"]))
            kinds.add(result.error.error_kind)
    assert len(kinds) >= 6


def test_a_plan_uses_earlier_results_in_later_calls() -> None:
    steps = plan("Convert the value of lamp plus 5 from km to m.")
    assert steps == [
        PlannedCall("lookup", {"key": "lamp"}),
        PlannedCall("calculator", {"op": "add", "a": ResultReference(0), "b": 5}),
        PlannedCall("convert", {"value": ResultReference(1), "source": "km", "target": "m"}),
    ]
    wanted: dict[str, Any] = {"op": "add", "a": 7, "b": 5}
    assert steps[1].call([7]) == ToolCall("calculator", wanted)


@pytest.mark.parametrize("question", ["What is love?", "", "What is 3 plus 4? "])
def test_a_question_of_another_kind_is_refused(toolbox: ToolboxTask, question: str) -> None:
    with pytest.raises(ValueError, match="not a toolbox question"):
        toolbox.expert([{"role": "user", "content": question}])


def test_messages_without_a_question_are_refused(toolbox: ToolboxTask) -> None:
    with pytest.raises(ValueError, match="no user message"):
        toolbox.expert([{"role": "system", "content": "Tools:"}])


def test_a_config_makes_the_task_with_its_own_seed_and_limits(build_config: Any) -> None:
    task = make_task(build_config(environment={"max_turns": 2, "tool_error_penalty": 0.0}))
    assert task.episode("train", 1) == ToolboxTask.create(TaskSettings(seed=3)).episode("train", 1)
    session = SyncSession(task, task.episode("train", 1))
    session.step(call_text("abacus", {}))
    assert session.step(call_text("abacus", {})).done
    assert isinstance(parse_action(task.expert(session.state(0))), ToolCall)


QUESTION: list[Message] = [{"role": "user", "content": "What is it?"}]


def session() -> SyncSession:
    row = {"question": QUESTION[0]["content"], "table": {"lamp": 12}, "answer": 777}
    return SyncSession(ToolboxTask.create(), Episode("toolbox", "train", 0, row))


def kind_of(text: str) -> str:
    error = session().step(text).error
    return error.error_kind if error else "none"


def drawn(right: str, messages: list[Message], draws: int = 400) -> Counter[str]:
    rng = random.Random(1)
    return Counter(corrupt(right, messages, rng) for _ in range(draws))


CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("lookup", {"key": "lamp"}, "missing_key"),
    ("calculator", {"op": "add", "a": 2, "b": 3}, "wrong_type"),
    ("calculator", {"op": "divide", "a": 0, "b": 3}, "division_by_zero"),
    ("convert", {"value": 3, "source": "m", "target": "cm"}, "unknown_tool"),
]


@pytest.mark.parametrize(("name", "arguments", "habit"), CALLS)
def test_each_tool_has_a_habitual_mistake_and_others(
    name: str, arguments: dict[str, Any], habit: str
) -> None:
    right = call_text(name, arguments)
    texts = drawn(right, QUESTION)
    assert right not in texts
    kinds = Counter(dict.fromkeys(("unknown_tool", "malformed_call", "wrong_answer"), 0))
    for text, count in texts.items():
        kinds[kind_of(text)] += count
    assert min(kinds.values()) > 0
    assert kinds[habit] / kinds.total() == pytest.approx(HABIT_SHARE, abs=0.15)
    assert kinds["none"] == 0


def test_a_division_of_equal_numbers_is_never_corrupted_into_itself() -> None:
    right = call_text("calculator", {"op": "divide", "a": 6, "b": 6})
    assert right not in drawn(right, QUESTION)


def test_an_early_answer_is_a_number_at_hand_but_never_zero() -> None:
    right = call_text("calculator", {"op": "divide", "a": 0, "b": 3})
    answers = {text for text in drawn(right, QUESTION) if text.startswith("Answer")}
    assert answers == {"Answer: 3"}


def test_a_wrong_answer_is_an_earlier_number_or_none() -> None:
    running = session()
    running.step(call_text("calculator", {"op": "add", "a": 2.5, "b": 3}))
    assert set(drawn("Answer: 5.5", running.messages)) == {GIVE_UP, "Answer: 2.5"}
    assert set(drawn("Answer: 2.5", running.messages)) == {GIVE_UP}
    assert set(drawn("Answer: 5.5", QUESTION)) == {GIVE_UP}


def test_a_wrong_answer_survives_any_number_that_a_model_wrote() -> None:
    running = session()
    running.step(call_text("calculator", {"op": "add", "a": True, "b": 1e308}))
    assert set(drawn("Answer: 5", running.messages)) == {GIVE_UP, f"Answer: {int(1e308)}"}


def test_the_same_draw_gives_the_same_mistake() -> None:
    right = call_text("lookup", {"key": "lamp"})
    for seed in range(20):
        one = corrupt(right, QUESTION, random.Random(seed))
        assert one == corrupt(right, QUESTION, random.Random(seed))


def test_recovery_has_its_probability() -> None:
    rng = random.Random(0)
    texts = [recover_or_give_up("right", rng, 0.3) for _ in range(2000)]
    assert set(texts) == {"right", GIVE_UP}
    assert texts.count("right") / 2000 == pytest.approx(0.3, abs=0.04)
    assert recover_or_give_up("right", rng, 0.0) == GIVE_UP
    assert recover_or_give_up("right", rng, 1.0) == "right"


def test_only_calls_that_a_tool_answered_are_read_back() -> None:
    running = session()
    running.step("<tool_call>\n{broken\n</tool_call>")
    running.step(call_text("lookup", {"key": "kite"}))
    running.step(call_text("lookup", {"key": "lamp"}))
    assert list(calls_and_results(running.messages)) == [
        (ToolCall("lookup", {"key": "kite"}), "error: no key kite"),
        (ToolCall("lookup", {"key": "lamp"}), "12"),
    ]


@pytest.mark.parametrize(
    ("content", "number"),
    [("12", 12), ("12.0", 12), ("0.5", 0.5), ("-3", -3), ("error: no key", None), ("", None)],
)
def test_a_tool_result_is_a_number_or_an_error(content: str, number: float | None) -> None:
    assert as_number(content) == number
    assert not isinstance(as_number(content), float) or content == "0.5"
