"""The protocol of `/ws`: an answer for each frame, errors by code, bounds of sessions and time."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from served_tasks import ScriptedSocket, call, pool_of

from composer_mesh.plugins.openenv.server.app import json_text, serve_socket
from composer_mesh.plugins.openenv.server.session import SessionCounts

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
