"""Servers that do what they must not: each ends as a named error within its limit, unrewarded."""

import asyncio
import json
import pickle
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from openenv_server import CALL_S, Json, OpenEnvServer, Send, Socket, hook, made, page

from composer_mesh.mesh.failures import FailureClass, classify
from composer_mesh.plugins.openenv.client import errors
from composer_mesh.plugins.openenv.client.errors import (
    ConnectionLost,
    EnvironmentRaised,
    ProtocolViolation,
    ServerFailure,
    ServerFull,
    ServerTimeout,
)
from composer_mesh.plugins.openenv.client.task import OpenEnvTask
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.calls import TaskCalls
from composer_mesh.tasks.running import RunningEpisode

SHORT = {"step_s": 1.0, "reset_s": 1.0}
"""Limits of servers that say nothing."""

FINISH = call_text("finish", {})


def observation(**changes: Any) -> Json:
    return {
        "observation": {"tool_name": "finish", "result": "end"},
        "reward": 1.0,
        "done": True,
    } | (changes)


def nested(depth: int) -> str:
    return '{"type":"observation","data":{"observation":' + "[" * depth + "]" * depth + "}}"


def text(value: str) -> Send:
    return lambda socket: socket.send_text(value)


def observed(**changes: Any) -> Send:
    return lambda socket: socket.observe(observation(**changes))


def binary(socket: Socket) -> None:
    socket.protocol.send_binary(json.dumps({"type": "observation"}).encode())
    socket.flush()


def hundred_megabytes(socket: Socket) -> None:
    """Announces a text frame of 100 MB, and sends the first of it."""
    socket.send_raw(b"\x81\x7f" + (100 * 2**20).to_bytes(8, "big") + b"a" * 2**16)


def endless_fragments(socket: Socket) -> None:
    """Sends a text of 8 MB in fragments, without its end."""
    part = b"\x7f" + (2**20).to_bytes(8, "big") + b"a" * 2**20
    socket.send_raw(b"\x01" + part + (b"\x00" + part) * 7)


def compressed(socket: Socket) -> None:
    """Sends a frame with the bit of permessage-deflate, which was not agreed on."""
    socket.send_raw(b"\xc1\x05\x00\x00\x00\xff\xff")


def twice(socket: Socket) -> None:
    socket.observe(observation())
    socket.observe(observation())


def closes(socket: Socket) -> None:
    socket.protocol.send_close(1011, "going")
    socket.flush()


ANSWERS: dict[str, tuple[Send, type[Exception], str]] = {
    "says nothing": (lambda _: None, ServerTimeout, "did not answer a"),
    "closes": (closes, ConnectionLost, "closed the connection"),
    "aborts": (lambda socket: socket.abort(), ConnectionLost, "closed the connection"),
    "half a frame": (
        lambda socket: socket.send_raw(b"\x81\x7e\x10\x00{"),
        ServerTimeout,
        "did not answer",
    ),
    "no frame": (lambda socket: socket.send_raw(b"\x8f\x00"), ConnectionLost, "1002"),
    "100 MB": (hundred_megabytes, ConnectionLost, "1009"),
    "endless fragments": (endless_fragments, ConnectionLost, "1009"),
    "compressed": (compressed, ConnectionLost, "1002"),
    "no utf-8": (lambda socket: socket.send_raw(b"\x81\x02\xff\xfe"), ConnectionLost, "1007"),
    "binary": (binary, ProtocolViolation, "binary frame"),
    "no JSON": (text("nonsense"), ProtocolViolation, "cannot be read"),
    "empty": (text(""), ProtocolViolation, "cannot be read"),
    "a list": (text("[]"), ProtocolViolation, "cannot be read"),
    "deep": (text(nested(100_000)), ProtocolViolation, "cannot be read"),
    "many digits": (text("1" * 1_000_000), ProtocolViolation, "cannot be read"),
    "unknown type": (text('{"type":"telemetry"}'), ProtocolViolation, "cannot be read"),
    "no type": (text('{"data":{}}'), ProtocolViolation, "cannot be read"),
    "no data": (text('{"type":"observation"}'), ProtocolViolation, "cannot be read"),
    "data of text": (
        text('{"type":"observation","data":"x"}'),
        ProtocolViolation,
        "cannot be read",
    ),
    "another frame": (text('{"type":"mcp","data":{}}'), ProtocolViolation, "with a mcp frame"),
    "observation of a list": (observed(observation=[]), ProtocolViolation, "cannot be read"),
    "done in words": (observed(done="no"), ProtocolViolation, "cannot be read"),
    "done as a number": (observed(done=1), ProtocolViolation, "cannot be read"),
    "reward of text": (observed(reward="1"), ProtocolViolation, "cannot be read"),
    "reward of NaN": (observed(reward=float("nan")), ProtocolViolation, "cannot be read"),
    "infinite reward": (observed(reward=float("inf")), ProtocolViolation, "cannot be read"),
    "unknown code": (
        lambda socket: socket.error("TEAPOT"),
        ProtocolViolation,
        "with the error 'TEAPOT'",
    ),
    "bad JSON said": (
        lambda socket: socket.error("INVALID_JSON"),
        ProtocolViolation,
        "INVALID_JSON",
    ),
    "session error": (
        lambda socket: socket.error("SESSION_ERROR"),
        ProtocolViolation,
        "SESSION_ERROR",
    ),
    "no code": (text('{"type":"error","data":{}}'), ProtocolViolation, "cannot be read"),
}
"""What is sent in place of an answer, the error that it ends as, and what that says."""

STEPS: dict[str, tuple[Send, type[Exception], str]] = {
    **ANSWERS,
    "two answers": (twice, ProtocolViolation, "two answers|was not requested"),
    "huge reward": (observed(reward=1e300), ProtocolViolation, "beyond most_reward"),
    "reward of many digits": (
        text('{"type":"observation","data":{"observation":{},"reward":' + "9" * 5000 + "}}"),
        ProtocolViolation,
        "cannot be read|beyond most_reward",
    ),
    "done without a reward": (observed(reward=None), ProtocolViolation, "without a reward"),
    "another action's answer": (
        observed(metadata={"turn": 7}),
        ProtocolViolation,
        "answered action 1 as if it were action 7",
    ),
    "no result of a call": (
        observed(observation={"error": "x"}, done=False),
        ProtocolViolation,
        "not answered by a result",
    ),
    "unknown error type": (
        observed(observation={"error": {"error_type": "teapot"}}, done=False),
        ProtocolViolation,
        "failed with 'teapot'",
    ),
    "transport error": (
        observed(observation={"error": {"error_type": "transport_error"}}, done=False),
        ProtocolViolation,
        "transport_error",
    ),
    "an exception": (
        lambda socket: socket.error("EXECUTION_ERROR", "x" * 10_000 + "\x1b[2J"),
        EnvironmentRaised,
        "EXECUTION_ERROR",
    ),
    "full": (lambda socket: socket.error("CAPACITY_REACHED"), ServerFull, "no free session"),
}
RESETS = {
    **ANSWERS,
    "done at the reset": (observed(), ProtocolViolation, "the episode is over"),
    "full": (lambda socket: socket.error("CAPACITY_REACHED"), ServerFull, "no free session"),
    "an exception": (
        lambda socket: socket.error("EXECUTION_ERROR"),
        EnvironmentRaised,
        "EXECUTION_ERROR",
    ),
}
STATES = {
    name: one
    for name, one in ANSWERS.items()
    if name not in ("another frame", "unknown code", "bad JSON said", "session error")
} | {
    "an observation": (observed(), ProtocolViolation, "two answers"),
    "unknown code": (
        lambda socket: socket.error("TEAPOT"),
        ProtocolViolation,
        "with a error frame",
    ),
    "another episode": (
        text('{"type":"state","data":{"episode_id":"another","step_count":1}}'),
        ProtocolViolation,
        "has reset the environment",
    ),
    "steps of text": (
        text('{"type":"state","data":{"step_count":"many"}}'),
        ProtocolViolation,
        "cannot be read",
    ),
}


async def played(task: OpenEnvTask, action: str = FINISH) -> float:
    """Play an episode of one action as an environment actor does; return its reward."""
    running = RunningEpisode(task, task.episode("train", 0), TaskCalls(limit_s=CALL_S))
    try:
        await running.begin()
        await running.step(action)
        return (await running.outcome()).reward
    finally:
        await running.close()


async def ends(server: OpenEnvServer, kind: type[Exception], said: str) -> None:
    limits = {ServerTimeout: SHORT, ServerFull: {"reset_s": 27.5}}  # which leaves a second to wait
    task = await asyncio.to_thread(made, server, **limits.get(kind, {}))
    with pytest.raises(kind, match=said) as told:
        await played(task)
    assert len(str(told.value)) < 1000
    assert "\n" not in str(told.value)
    assert "\x1b" not in str(told.value)


@pytest.mark.parametrize("name", STEPS)
async def test_no_answer_to_a_step_hangs_or_becomes_a_reward(name: str):
    send, kind, said = STEPS[name]
    with OpenEnvServer(hooks={"step": hook(send)}) as server:
        await ends(server, kind, said)


@pytest.mark.parametrize("name", RESETS)
async def test_no_answer_to_a_reset_hangs_or_begins_an_episode(name: str):
    send, kind, said = RESETS[name]
    with OpenEnvServer(hooks={"reset": hook(send)}) as server:
        await ends(server, kind, said)


@pytest.mark.parametrize("name", STATES)
async def test_no_reward_is_taken_that_the_server_does_not_confirm(name: str):
    send, kind, said = STATES[name]
    asked = 0

    async def state(socket: Socket, data: Json) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:  # the first follows the reset
            await hook(send)(socket, data)
        else:
            server.regular(socket, "state", data)

    with OpenEnvServer(hooks={"state": state}) as server:
        await ends(server, kind, said)
        assert server.rewarded == 1


async def test_a_second_answer_to_an_earlier_step_never_becomes_a_reward():
    async def step(socket: Socket, data: Json) -> None:
        server.regular(socket, "step", data)
        if data["tool_name"] == "add":
            socket.observe(observation())  # a reward for the next action, whatever it is

    with OpenEnvServer(hooks={"step": step}) as server:
        task = await asyncio.to_thread(made, server)
        running = RunningEpisode(task, task.episode("train", 0), TaskCalls(limit_s=CALL_S))
        await running.begin()
        await running.step(call_text("add", {"number": 1}))
        with pytest.raises(ProtocolViolation, match=r"two answers|was not requested"):
            await running.outcome()
        with pytest.raises(ServerFailure):
            await running.outcome()
        await running.close()


async def test_a_lost_connection_is_never_made_again_within_an_episode():
    with OpenEnvServer(hooks={"step": hook(closes)}) as server:
        task = await asyncio.to_thread(made, server)
        running = RunningEpisode(task, task.episode("train", 0), TaskCalls(limit_s=CALL_S))
        await running.begin()
        opened = server.opened
        for _ in range(3):
            with pytest.raises(ConnectionLost):
                await running.step(FINISH)
        with pytest.raises(ConnectionLost):
            await running.outcome()
        await running.close()
        assert server.opened == opened


HANDSHAKES = {
    "redirect": (
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/ws\r\nContent-Length: 0\r\n\r\n",
        ConnectionLost,
        "status 302.*redirects are not followed",
    ),
    "not found": (page("404 Not Found", {}), ConnectionLost, "status 404"),
    "busy": (page("503 Service Unavailable", {}), ServerFull, "busy"),
    "no HTTP": (b"hello\r\n\r\n", ConnectionLost, "cannot be connected to"),
    "endless header": (b"HTTP/1.1 101 A\r\nX: " + b"a" * 2**18, ConnectionLost, "cannot be"),
    "wrong accept": (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: bm8=\r\n\r\n",
        ConnectionLost,
        "cannot be connected to",
    ),
    "many digits": (
        b"HTTP/1.1 400 Bad\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        ConnectionLost,
        "cannot be connected to",
    ),
}


@pytest.mark.parametrize("name", HANDSHAKES)
async def test_a_broken_handshake_is_named(name: str):
    data, kind, said = HANDSHAKES[name]
    with OpenEnvServer() as server:
        task = await asyncio.to_thread(made, server)
        server.handshake = data
        task.limits = replace(task.limits, connect_s=1.0)
        with pytest.raises(kind, match=said):
            await played(task)


BODIES = {
    "redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "no JSON": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{{",
    "deep": b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + b"[" * 200_000,
    "endless": b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * (5 * 2**20),
    "compressed": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b",
    "no HTTP": b"\x00\x01\r\n\r\n",
    "cut short": b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}",
    "a list": page("200 OK", []),
    "a status": page("500 Internal Server Error", {}),
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
}


@pytest.mark.parametrize("path", ["/health", "/schema"])
@pytest.mark.parametrize("name", BODIES)
def test_no_page_of_a_server_breaks_the_load(name: str, path: str):
    with (
        OpenEnvServer(pages={path: BODIES[name]}) as server,
        pytest.raises(ServerFailure) as told,
    ):
        made(server)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "splits",
    [page("200 OK", {"a": 1}), page("200 OK", ["a"] * 2000), page("500 No", [])],
)
def test_no_list_of_splits_breaks_the_load(splits: bytes):
    with (
        OpenEnvServer(pages={"/counter/splits": splits}) as server,
        pytest.raises(ServerFailure),
    ):
        made(server)


@pytest.mark.parametrize("count", [-1, 10**30, 1.5, True, "9", None])
def test_no_number_of_tasks_breaks_the_load(count: Any):
    with (
        OpenEnvServer(splits={"train": count}) as server,
        pytest.raises(ServerFailure, match="says that split 'train' has"),
    ):
        made(server)


async def test_a_flood_of_frames_is_not_buffered():
    frame = json.dumps({"type": "observation", "data": observation(done=False, reward=0.0)})

    async def step(socket: Socket, _data: Json) -> None:
        with suppress(ConnectionError):
            while not socket.writer.transport.is_closing():
                socket.send_text(frame)
                await socket.writer.drain()  # it is never told to go on

    with OpenEnvServer(hooks={"step": step}) as server:
        await ends(server, ProtocolViolation, "two answers|was not requested|cannot be read")


async def test_a_lost_call_leaves_the_session_unusable():
    entered = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def step(_socket: Socket, _data: Json) -> None:
        loop.call_soon_threadsafe(entered.set)

    with OpenEnvServer(hooks={"step": step}) as server:
        task = await asyncio.to_thread(made, server)
        running = RunningEpisode(task, task.episode("train", 0))
        await running.begin()
        stepping = asyncio.create_task(running.step(FINISH))
        await entered.wait()
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        with pytest.raises(ConnectionLost, match="interrupted"):
            await running.outcome()
        await running.close()


@pytest.mark.parametrize(
    "kind", [ConnectionLost, ServerTimeout, ServerFull, ProtocolViolation, ServerFailure]
)
def test_a_failed_server_is_no_fault_of_an_episode(kind: type[ServerFailure]):
    error = pickle.loads(pickle.dumps(kind("http://x", "why")))
    assert (str(error), type(error)) == ("OpenEnv server http://x: why", kind)
    assert classify(error) is FailureClass.PROVIDER
    assert kind.__name__ in errors.__doc__


def test_an_exception_of_the_environment_is_a_fault_of_the_episode():
    error = pickle.loads(pickle.dumps(EnvironmentRaised("http://x", "EXECUTION_ERROR", "why")))
    assert "why" in str(error)
    assert classify(error) is FailureClass.DATA


@pytest.mark.parametrize("name", ["goes on", "refuses", "counts a turn", "fails"])
async def test_an_episode_that_a_server_does_not_finish_as_it_said_has_no_reward(name: str):
    accepted = {"metadata": {"accepted_actions": ["finish", 7, "more"], "turn": 0}}
    answers = {
        "goes on": ({"type": "observation", "data": observation(done=False)}, "continues after"),
        "refuses": ({"type": "error", "data": {"code": "VALIDATION_ERROR"}}, "VALIDATION_ERROR"),
        "counts a turn": (
            {"type": "observation", "data": observation(metadata={"turn": 1})},
            "as if it were action 1",
        ),
        "fails": ({"type": "error", "data": {"code": "EXECUTION_ERROR"}}, "EXECUTION_ERROR"),
    }
    answer, said = answers[name]

    async def reset(socket: Socket, data: Json) -> None:
        socket.observe({"observation": {"message": "go"}, "reward": None, **accepted})

    async def step(socket: Socket, data: Json) -> None:
        assert data == {"type": "finish"}
        socket.send(answer)

    with OpenEnvServer(hooks={"reset": reset, "step": step}) as server:
        task = await asyncio.to_thread(made, server)
        running = RunningEpisode(task, task.episode("train", 0), TaskCalls(limit_s=CALL_S))
        await running.begin()
        with pytest.raises((ServerFailure, EnvironmentRaised), match=said):
            await running.outcome()
        await running.close()
