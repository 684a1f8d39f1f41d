"""Teacher replay from Python: replies by state, rows by agreement, and one call for both."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from offline_runs import BUILTIN, ENVIRON, knowing, paid, replay_section, traces_of, write_run
from preferences import ADD, ANSWER, LOOK, answer, answers, failure, student
from scripted_provider import ScriptedProvider

from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.teachers import TeacherConfig
from composer_mesh.rollouts.agent_messages import UnusableMessages
from composer_mesh.rollouts.budget import dollars
from composer_mesh.rollouts.pairs import FailureKind, TeacherAnswer, TeacherFailure
from composer_mesh.services.offline import api as offline
from composer_mesh.services.offline.api import (
    ReplayRefused,
    chat_state,
    extract_dpo_pairs,
    replay_and_normalize_trace,
    replay_and_normalize_trace_sync,
    replay_trace,
)
from composer_mesh.services.offline.teacher_pool import TeacherPool
from composer_mesh.tasks.toolbox import ToolboxTask

ASKED = {"role": "user", "content": "What is 2 plus 3?"}
STATES = [chat_state(f"s{number}", [ASKED], f"Answer: {number}") for number in range(6)]
WANTED = {"state_id", "state_messages", "chosen", "rejected", "n_teachers_agreeing"}


def said(text: str) -> ScriptedProvider:
    return ScriptedProvider(0.0001, lambda _: _reply(text))


def _reply(text: str) -> httpx.Response:
    message = {"role": "assistant", "content": text}
    return httpx.Response(200, json={"choices": [{"message": message}], "usage": {"cost": 0.0001}})


async def replay(provider: ScriptedProvider, *args: Any, **options: Any) -> Any:
    states, teachers, usd = (*args, *(STATES, paid("a", "b", "c"), 1.0)[len(args) :])
    return await replay_trace(
        states, teachers, usd, environ=ENVIRON, transport=provider.transport, **options
    )


async def test_every_state_has_a_reply_of_every_teacher() -> None:
    replies = await replay(said("Answer: 5"))
    assert list(replies) == [state.state.state_id for state in STATES]
    for each in replies.values():
        assert [reply.teacher for reply in each] == ["a", "b", "c"]
        assert all(isinstance(reply, TeacherAnswer) for reply in each)


async def test_replies_become_rows_where_the_teachers_agree_against_the_student() -> None:
    states = [*STATES, chat_state("agrees", [ASKED], "Answer: 5")]
    rows = extract_dpo_pairs(states, await replay(said("Answer: 5"), states))
    assert [row["state_id"] for row in rows] == ["s0", "s1", "s2", "s3", "s4"]
    row = rows[0]
    assert row.keys() >= WANTED
    assert row["state_messages"] == [ASKED]
    assert row["chosen"] == [{"role": "assistant", "content": "Answer: 5"}]
    assert row["rejected"] == [{"role": "assistant", "content": "Answer: 0"}]
    assert (row["n_teachers_agreeing"], row["teachers"]) == (3, ["a", "b", "c"])


async def test_the_ceiling_ends_questions_as_typed_failures() -> None:
    provider = said("Answer: 5")
    states = [chat_state(f"q{n}", [{**ASKED, "content": f"{n}?"}], "x") for n in range(40)]
    replies = await replay(provider, states, paid("a", "b", "c"), 0.0095)
    flat = [reply for each in replies.values() for reply in each]
    failed = [reply for reply in flat if isinstance(reply, TeacherFailure)]
    assert 0 < len(failed) < len(flat) == 120
    assert {reply.kind for reply in failed} == {FailureKind.BUDGET}
    assert 0 < dollars(provider.charged) <= 0.0095


async def test_equal_questions_are_paid_once_in_a_call_and_in_a_folder(tmp_path: Path) -> None:
    first, second = said("Answer: 5"), said("Answer: 5")
    await replay(first, folder=tmp_path)
    assert len(first.requests) == 3
    replies = await replay(second, folder=tmp_path)
    assert second.requests == []
    assert all(reply.cached for each in replies.values() for reply in each)


async def test_one_teacher_may_be_asked_and_fewer_than_there_are() -> None:
    (alone,) = (await replay(said("x"), STATES[:1], paid("a"))).values()
    assert [reply.teacher for reply in alone] == ["a"]
    (two,) = (await replay(said("x"), STATES[:1], n=2)).values()
    assert len(two) == 2


async def test_teachers_are_tables_configs_or_model_ids() -> None:
    (table,) = paid("a")
    provider = said("Answer: 5")
    provider.listing = {
        "data": [{"id": "b/two", "pricing": {"prompt": "0.000001", "completion": "0.000001"}}]
    }
    environ = {**ENVIRON, "OPENROUTER_API_KEY": "sk-or-0123456789"}
    teachers = [TeacherConfig.model_validate(table), "b/two"]
    replies = await replay_trace(
        STATES[:1], teachers, 1.0, environ=environ, transport=provider.transport
    )
    assert [reply.teacher for reply in replies["s0"]] == ["a", "b/two"]


@pytest.mark.parametrize(
    ("teachers", "usd", "options", "says"),
    [
        ([], 1.0, {}, "names no teacher"),
        (["gpt-5"], 1.0, {}, "neither a TOML file nor an OpenRouter model id"),
        (paid("a", "b"), 0.0, {}, "ceiling is 0 dollars but teacher 'a' costs money"),
        (paid("a", "b"), 1.0, {"n": 3}, "n is 3, but there are 2 teachers"),
        (BUILTIN, 0.0, {}, "'careful' is builtin"),
        ([{"name": "a", "kind": "openai"}], 1.0, {}, "base_url is not set"),
    ],
)
async def test_what_can_never_be_asked_is_refused(
    teachers: Any, usd: float, options: Any, says: str
) -> None:
    provider = said("x")
    with pytest.raises((ReplayRefused, ConfigError), match=says):
        await replay(provider, STATES, teachers, usd, **options)
    assert provider.requests == []


@pytest.mark.parametrize(
    ("messages", "action", "says"),
    [
        ("What?", "x", r"messages must be messages of a chat, such as \[\{.*valid list"),
        (None, "x", "messages must be messages of a chat"),
        (["What?"], "x", "0: Input should be a valid dictionary"),
        ([{"content": "What?"}], "x", "0: Value error, a message has no role"),
        ([], "x", "messages is empty: pass one message or more"),
        ([ASKED], None, "action must be messages of a chat"),
        ([ASKED], {"role": "assistant", "tool_calls": [1]}, "are not calls of functions"),
        (
            [ASKED],
            {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "x"}}]},
            "action: Expecting value",
        ),
    ],
)
def test_a_state_of_something_else_than_a_chat_says_what_is_wrong(
    messages: Any, action: Any, says: str
) -> None:
    with pytest.raises(UnusableMessages, match=says):
        chat_state("s", messages, action)


def test_a_state_without_a_text_as_its_id_is_refused() -> None:
    with pytest.raises(UnusableMessages, match="state_id is 5 but must be a text"):
        chat_state(5, [ASKED], "x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("teachers", "options", "says"),
    [
        ([], {}, "names no teacher"),
        (BUILTIN, {}, "'careful' is builtin"),
        (paid("a"), {"n": 0}, "n is 0, but a pool has one process or more"),
    ],
)
def test_a_pool_that_can_never_answer_is_refused(teachers: Any, options: Any, says: str) -> None:
    with pytest.raises(ReplayRefused, match=says):
        TeacherPool(teachers, **options)


@pytest.mark.parametrize(
    ("usd", "environ", "asked", "says"),
    [
        (0.0, ENVIRON, [ASKED], "ceiling is 0 dollars but teacher 'a' costs money"),
        (1.0, {}, [ASKED], "TEST_KEY"),
        (1.0, ENVIRON, "What?", "messages must be messages of a chat"),
    ],
)
def test_a_query_that_no_teacher_can_answer_starts_no_process(
    usd: float, environ: Any, asked: Any, says: str
) -> None:
    with (
        TeacherPool(paid("a"), usd, environ=environ) as pool,
        pytest.raises((ReplayRefused, UnusableMessages), match=says),
    ):
        pool.query_sync(asked)


async def test_states_of_one_id_are_refused() -> None:
    with pytest.raises(ReplayRefused, match="'s0' is there more than once"):
        await replay(said("x"), [STATES[0], STATES[0]])


@pytest.mark.parametrize(
    ("texts", "threshold", "agreeing"),
    [
        ((ADD, ADD, ADD), 2, 3),
        ((ADD, ADD, LOOK), 2, 2),
        ((ADD, ADD, LOOK), 3, None),
        ((ADD, LOOK, None), 2, None),
        ((ANSWER, ANSWER, ADD), 2, None),
        ((ADD, ADD, None), 2, 2),
        ((None, None, None), 2, None),
    ],
)
def test_the_rules_of_disagreement_are_those_of_a_run(
    texts: tuple[str | None, ...], threshold: int, agreeing: int | None
) -> None:
    state = student(ANSWER)
    rows = extract_dpo_pairs([state], {"g0-s0/1": answers(*texts)}, threshold)
    assert [row["n_teachers_agreeing"] for row in rows] == ([] if agreeing is None else [agreeing])


def test_a_state_without_replies_is_named() -> None:
    with pytest.raises(ValueError, match="nothing for state 's0'"):
        extract_dpo_pairs(STATES[:1], {})


def test_rows_can_be_written_as_json() -> None:
    replies = {"g0-s0/1": [answer("a", ADD), answer("b", ADD), failure("c")]}
    (row,) = extract_dpo_pairs([student(ANSWER)], replies)
    assert json.loads(json.dumps(row)) == row


@pytest.fixture
def run(tmp_path: Path, build_config: Any, toolbox: ToolboxTask) -> Path:
    config = build_config(replay=replay_section(BUILTIN))
    return write_run(tmp_path / "run", config, traces_of(toolbox, 4))


async def test_a_run_is_replayed_with_its_own_teachers_in_one_call(run: Path) -> None:
    rows = await replay_and_normalize_trace(run)
    assert len(rows) > 2
    assert all(row.keys() >= WANTED | {"tools"} for row in rows)
    assert rows == await replay_and_normalize_trace(str(run / "traces"))


async def test_traces_in_memory_are_replayed_with_given_teachers(toolbox: ToolboxTask) -> None:
    traces, provider = traces_of(toolbox, 3), knowing(toolbox)
    rows = await replay_and_normalize_trace(
        traces, paid("a", "b"), 1.0, environ=ENVIRON, transport=provider.transport
    )
    assert {row["trace_id"] for row in rows} <= {trace.trace_id for trace in traces}
    assert rows
    one = await replay_and_normalize_trace(
        traces[0], paid("a", "b"), 1.0, environ=ENVIRON, transport=provider.transport
    )
    assert {row["trace_id"] for row in one} <= {traces[0].trace_id}


async def test_tools_of_another_framework_are_sent_as_they_are(toolbox: ToolboxTask) -> None:
    tools = [{"type": "function", "function": {"name": "move", "parameters": {}}}]
    provider = knowing(toolbox)
    await replay_and_normalize_trace(
        traces_of(toolbox, 1), paid("a", "b"), 1.0, tools=tools, environ=ENVIRON,
        transport=provider.transport,
    )  # fmt: skip
    assert all(request["tools"] == tools for request in provider.requests)


def test_the_synchronous_sibling_gives_the_same(run: Path) -> None:
    rows = replay_and_normalize_trace_sync(run, limit=3)
    assert rows == asyncio.run(replay_and_normalize_trace(run, limit=3))


async def test_the_synchronous_sibling_says_what_to_do_inside_a_loop(run: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"write `await replay_and_normalize_trace\(…\)` instead"
    ):
        replay_and_normalize_trace_sync(run)


def test_what_the_module_offers_is_there() -> None:
    assert all(hasattr(offline, name) for name in offline.__all__)
