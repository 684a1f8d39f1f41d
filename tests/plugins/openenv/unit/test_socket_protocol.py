"""The protocol of `/ws`: an answer for each frame, errors by code, bounds of sessions and time.

Also what an open session holds of its connection.
"""

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest
from served_tasks import ScriptedSocket, call, pool_of, served, served_beside
from websockets.asyncio.client import connect as async_connect
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from wsproto.handshake import H11Handshake

from composer_mesh.mesh.json_server import ByteBudget
from composer_mesh.plugins.openenv.server.app import json_text, make_app, serve_socket
from composer_mesh.plugins.openenv.server.session import SessionCounts
from composer_mesh.services.web.connections import ServerLimits
from composer_mesh.services.web.http_server import http_config, listening, listening_socket
from composer_mesh.services.web.open_sockets import TRY_AGAIN_LATER, OpenSocket

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
                async with async_connect(f"ws://127.0.0.1:{port}/ws", proxy=None) as socket:
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
