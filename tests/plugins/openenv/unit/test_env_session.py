"""Sessions of a served task: episodes one after another, error sites, states, task faults.

The protocol of `/ws`: an answer for each frame, errors by code, bounds of sessions and time, and
what an open session holds of its connection.
"""

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest
from served_tasks import (
    SECRET,
    SYSTEM,
    Count,
    Counting,
    ScriptedSocket,
    call,
    pool_of,
    served,
    served_beside,
)
from websockets.asyncio.client import connect as async_connect
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from wsproto.handshake import H11Handshake

from composer_mesh.mesh.json_server import ByteBudget
from composer_mesh.plugins.openenv.client.wire import ErrorCode, ObservationData, StateData
from composer_mesh.plugins.openenv.server.app import json_text, make_app, serve_socket
from composer_mesh.plugins.openenv.server.session import EnvSession, SessionCounts
from composer_mesh.plugins.openenv.server.validation import SessionRequestRefused
from composer_mesh.services.web.connections import TRY_AGAIN_LATER, OpenSocket, ServerLimits
from composer_mesh.services.web.http_server import http_config, listening, listening_socket
from composer_mesh.tasks.task import TaskSettings
from composer_mesh.tasks.task_loop import TaskRunner


def session_of(limit_s: float = 30.0, **settings: int) -> EnvSession:
    return EnvSession(TaskRunner(Count.create(TaskSettings(**settings)), limit_s))


async def test_the_same_reset_begins_the_same_episode() -> None:
    first, second = session_of(), session_of()
    asked = {"split": "heldout", "index": 5, "episode_id": "mine", "unknown": [1]}
    one, two = await first.reset(asked), await second.reset(asked)
    assert one == two
    assert ObservationData.model_validate(one).done is False
    assert one["metadata"]["episode_id"] == "mine"
    assert one["observation"]["text"].startswith("Count.\nCount to ")


async def test_the_last_step_alone_has_a_reward() -> None:
    session = session_of()
    await session.reset({"seed": 1})
    step = await session.step(call("add", by=3))
    assert (step["reward"], step["done"]) == (None, False)
    assert step["observation"]["result"]["data"] == "count 3"
    last = await session.step({"message": "done"})
    assert (last["reward"], last["done"]) == (3.0, True)
    assert last["metadata"]["rewards"] == {"counted": 3.0}


async def test_a_client_that_knows_tools_alone_can_answer() -> None:
    session = session_of()
    assert session.tools[-1]["name"] == "answer"
    await session.reset({"seed": 1})
    for wrong in ({}, {"text": 3}, {"text": "a", "more": 1}):
        with pytest.raises(SessionRequestRefused, match="one text"):
            await session.step(call("answer", **wrong))
    last = await session.step(call("answer", text="done"))
    assert (last["reward"], last["done"]) == (0.0, True)


async def test_a_tool_and_a_finish_end_an_episode_with_its_reward() -> None:
    session = session_of()
    for action in (call("stop"), {"type": "finish"}):
        await session.reset({"seed": 1})
        await session.step(call("add", by=2))
        last = await session.step(action)
        assert (last["reward"], last["done"]) == (2.0, True)


async def test_a_step_after_the_end_is_refused_and_a_reset_begins_anew() -> None:
    session = session_of()
    await session.reset({"seed": 1})
    await session.step({"message": "done"})
    for action in ({"message": "again"}, call("add", by=1), {"type": "finish"}):
        with pytest.raises(SessionRequestRefused, match="has ended") as refused:
            await session.step(action)
        assert refused.value.code is ErrorCode.VALIDATION_ERROR
    await session.reset({"seed": 1})
    assert (await session.step(call("add", by=1)))["done"] is False


async def test_an_error_site_has_its_kind_its_hint_and_its_facts() -> None:
    session = session_of()
    await session.reset({"seed": 1})
    wrong = await session.step(call("add", by=-2))
    site = {name: wrong["metadata"][name] for name in ("error_kind", "hint_template_key")}
    assert site == {"error_kind": "negative", "hint_template_key": "negative"}
    assert wrong["metadata"]["error_facts"] == {"by": "-2"}
    assert wrong["observation"]["result"]["is_error"] is True
    assert wrong["observation"]["error"] is None, "a tool's own error is in its result"
    right = await session.step(call("add", by=2))
    assert right["metadata"]["error_kind"] == "none"


@pytest.mark.parametrize(
    ("action", "kind"),
    [(call("add", by="x"), "invalid_args"), (call("nothing"), "tool_not_found")],
)
async def test_a_call_that_reaches_no_tool_has_an_error_of_openenv(
    action: dict[str, object], kind: str
) -> None:
    session = session_of()
    await session.reset({"seed": 1})
    assert (await session.step(action))["observation"]["error"]["error_type"] == kind


async def test_a_state_is_what_the_agent_had_read_when_it_acted_at_that_turn() -> None:
    session = session_of()
    opening = await session.reset({"seed": 1})
    await session.step(call("add", by=3))
    await session.step({"message": "done"})
    first = session.state(0)["messages"]
    assert first[0] == SYSTEM
    assert opening["observation"]["text"] == "\n".join(one["content"] for one in first)
    second = session.state(1)
    assert [one["role"] for one in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert second["turn"] == 1
    assert StateData.model_validate(session.state()).step_count == 2
    with pytest.raises(SessionRequestRefused, match="turn 2"):
        session.state(2)


async def test_a_fault_of_the_task_is_never_a_reward_and_ends_the_episode_alone() -> None:
    session = session_of()
    await session.reset({"seed": 1})
    with pytest.raises(SessionRequestRefused, match="KeyError") as refused:
        await session.step(call("fail"))
    assert refused.value.code is ErrorCode.EXECUTION_ERROR
    for action in (call("add", by=1), {"type": "finish"}):
        with pytest.raises(SessionRequestRefused, match="has failed: reset") as refused:
            await session.step(action)
        assert refused.value.code is ErrorCode.EXECUTION_ERROR
    await session.reset({"seed": 1})
    assert (await session.step(call("add", by=1)))["observation"]["text"] == "count 1"


async def test_the_log_keeps_an_id_of_a_client_on_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    session = session_of()
    await session.reset({"seed": 1, "episode_id": "mine\nERROR forged"})
    with pytest.raises(SessionRequestRefused):
        await session.step(call("fail"))
    (told,) = [record.getMessage() for record in caplog.records if "episode" in record.getMessage()]
    assert "'mine\\nERROR forged'" in told


async def test_a_tool_that_never_returns_is_an_error_site() -> None:
    session = session_of(limit_s=0.2)
    await session.reset({"seed": 1})
    try:
        late = await session.step(call("hang"))
    finally:
        Counting.never.set()
    assert late["metadata"]["error_kind"] == "tool_timeout"
    assert late["observation"]["error"]["error_type"] == "timeout"


async def test_neither_a_row_nor_its_answer_nor_the_text_of_a_fault_is_told() -> None:
    session = session_of()
    said = [await session.reset({"seed": 1}), await session.step(call("add", by=-1))]
    said += [session.state(), session.state(1), await session.step({"message": "done"})]
    await session.reset({"seed": 1})
    with pytest.raises(SessionRequestRefused) as refused:
        await session.step(call("fail"))
    said += [refused.value.data]
    assert SECRET not in json.dumps(said)


@pytest.mark.parametrize(
    "action",
    [
        *({}, {"type": "jump"}, {"type": 3}, {"message": 3}, {"message": "a", "more": 1}),
        *({"type": "call_tool"}, {"type": "call_tool", "tool_name": "add", "arguments": []}),
    ],
)
async def test_what_is_no_action_is_refused_and_no_turn(action: dict[str, object]) -> None:
    session = session_of()
    await session.reset({"seed": 1})
    with pytest.raises(SessionRequestRefused) as refused:
        await session.step(action)
    assert refused.value.code is ErrorCode.VALIDATION_ERROR
    assert session.state()["step_count"] == 0


async def test_a_reset_closes_the_episode_before() -> None:
    session = session_of()
    await session.reset({"index": 501})
    await session.reset({"index": 502})
    assert 501 in Counting.closed
    assert 502 not in Counting.closed
    await session.close()
    assert 502 in Counting.closed


class FailingClose(Counting):
    """Its episodes cannot be closed."""

    def close(self) -> None:
        raise RuntimeError("the database is gone")


class CountFailingClose(Count):
    """Count with sessions that fail at their end."""

    session_class = FailingClose


async def test_a_session_whose_close_fails_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, CountFailingClose.create(), most=1)
    for _ in range(2):
        async with pool.session() as session:
            await session.reset({"seed": 1})


RESET = {"type": "reset", "data": {"seed": 1}}


def codes(socket: ScriptedSocket) -> list[str]:
    return [one["data"].get("code", one["type"]) for one in socket.answers]


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("{", "INVALID_JSON"),
        ("[1]", "INVALID_JSON"),
        ("[" * 100_000, "INVALID_JSON"),
        ({"type": "jump"}, "UNKNOWN_TYPE"),
        ({}, "UNKNOWN_TYPE"),
        ({"type": ["step"]}, "UNKNOWN_TYPE"),
        ({"type": "step"}, "VALIDATION_ERROR"),
        ({"type": "step", "data": []}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"message": "too early"}}, "VALIDATION_ERROR"),
        ({"type": "state", "data": {"turn": -1}}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"split": "secret"}}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"index": 10**30}}, "VALIDATION_ERROR"),
    ],
)
async def test_a_bad_frame_has_the_code_that_fits_and_the_session_goes_on(
    tmp_path: Path, frame: Any, code: str
) -> None:
    socket = ScriptedSocket(frame, RESET)
    await serve_socket(socket, pool_of(tmp_path))
    assert codes(socket) == [code, "observation"]
    assert socket.closed


async def test_a_fault_of_the_task_is_an_execution_error_and_the_session_goes_on(
    tmp_path: Path,
) -> None:
    socket = ScriptedSocket(RESET, {"type": "step", "data": call("fail")}, RESET)
    await serve_socket(socket, pool_of(tmp_path))
    assert codes(socket) == ["observation", "EXECUTION_ERROR", "observation"]


async def test_tools_are_listed_before_a_reset_and_in_the_frames_of_mcp(tmp_path: Path) -> None:
    rpc = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    listing = {"type": "step", "data": {"type": "list_tools"}}
    socket = ScriptedSocket(listing, {"type": "mcp", "data": rpc})
    await serve_socket(socket, pool_of(tmp_path))
    tools = socket.answers[0]["data"]["observation"]["tools"]
    assert [one["name"] for one in tools] == ["add", "stop", "fail", "hang", "answer"]
    assert tools[0]["input_schema"]["properties"]["by"]["type"] == "integer"
    assert socket.answers[1]["data"]["result"]["tools"][-1]["name"] == "answer"


async def test_a_close_ends_the_session_without_an_answer(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, most=1)
    socket = ScriptedSocket({"type": "close"}, RESET)
    await serve_socket(socket, pool)
    assert (socket.answers, socket.closed) == ([], True)
    await serve_socket(again := ScriptedSocket(RESET), pool)
    assert codes(again) == ["observation"]


async def test_a_client_beyond_the_bound_is_told_how_many_there_are(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, most=1)
    async with pool.session():
        await serve_socket(socket := ScriptedSocket(RESET), pool)
    error = socket.answers[0]["data"]
    assert error["code"] == "CAPACITY_REACHED"
    assert (error["active_sessions"], error["max_sessions"]) == (1, 1)
    assert socket.closed


async def test_an_idle_session_ends_and_its_place_is_free(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, most=1, idle_s=0.05)
    await serve_socket(socket := ScriptedSocket(stays=True), pool)
    assert codes(socket) == ["SESSION_ERROR"]
    assert socket.closed
    pool.open()


async def test_a_client_that_takes_no_answer_loses_its_session(tmp_path: Path) -> None:
    pool = pool_of(tmp_path, most=1, idle_s=0.3)
    socket = ScriptedSocket({"type": "state"}, stays=True)
    socket.sending = asyncio.Event().wait
    await serve_socket(socket, pool)
    assert socket.closed
    pool.open()


async def test_a_client_that_leaves_in_the_middle_of_an_episode_frees_its_place(
    tmp_path: Path,
) -> None:
    pool = pool_of(tmp_path, most=1)
    serving = asyncio.create_task(serve_socket(socket := ScriptedSocket(RESET, stays=True), pool))
    await socket.waiting.wait()
    serving.cancel()
    await asyncio.wait([serving])
    pool.open()


def test_processes_count_their_sessions_together(tmp_path: Path) -> None:
    path = tmp_path / "sessions"
    first, second = SessionCounts(path, 2, 0, 2), SessionCounts(path, 2, 1, 2)
    assert first.take()
    assert second.take()
    assert not first.take()
    assert (first.active, second.active) == (2, 2)
    SessionCounts(path, 2, 1, 2)  # the second process was replaced
    assert first.take()


def test_what_json_cannot_carry_is_an_error_and_no_broken_answer() -> None:
    for value in (float("nan"), {1, 2}):
        assert "EXECUTION_ERROR" in json_text({"data": value})


def test_an_open_session_holds_no_parser_of_its_handshake_and_answers_on(
    tmp_path: Path, build_config: Any
) -> None:
    config = build_config(data={"task": "served_tasks:Count"})
    with served_beside(tmp_path, config) as url:
        address = f"ws{url.removeprefix('http')}/ws"
        with connect(address, proxy=None) as first, connect(address, proxy=None) as second:
            for socket in (first, second, first):
                socket.send(json.dumps({"type": "reset", "data": {"seed": 1}}))
                assert json.loads(socket.recv())["type"] == "observation"
            assert not [one for one in gc.get_objects() if type(one) is H11Handshake]


async def test_a_session_that_ends_frees_its_connection(tmp_path: Path) -> None:
    app = make_app(served(tmp_path, pool_of(tmp_path)))
    config = http_config(app, 0, ServerLimits(most=8), ByteBudget(2**20, 2**20), ws=OpenSocket)
    with listening_socket("127.0.0.1", 0) as listener:
        async with listening(config, listener) as port:
            for _ in range(4 * 8):
                async with async_connect(
                    f"ws://127.0.0.1:{port}/ws", proxy=None, open_timeout=60
                ) as socket:
                    await socket.send(json.dumps({"type": "reset", "data": {"seed": 1}}))
                    assert json.loads(await socket.recv())["type"] == "observation"


async def test_messages_of_all_sessions_have_a_bound_of_bytes_and_leave_nothing_held(
    tmp_path: Path,
) -> None:
    budget = ByteBudget(of_one=1000, of_all=1000)
    app = make_app(served(tmp_path, pool_of(tmp_path)))
    config = http_config(app, 0, ServerLimits(), budget, ws=OpenSocket)
    with listening_socket("127.0.0.1", 0) as listener:
        async with listening(config, listener) as port:
            url = f"ws://127.0.0.1:{port}/ws"
            async with async_connect(url, proxy=None) as first:
                reset = json.dumps({"type": "reset", "data": {"seed": 1}}) + " " * 500
                for _ in range(4):
                    await first.send(reset)
                    assert json.loads(await first.recv())["type"] == "observation"
                async with async_connect(url, proxy=None) as second:
                    await second.send(["{", "a" * 2000])
                    with pytest.raises(ConnectionClosed, match="may hold 1,000 bytes") as closed:
                        await second.recv()
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == TRY_AGAIN_LATER
                await first.send(reset)
                assert json.loads(await first.recv())["type"] == "observation"
    assert budget.total == 0
