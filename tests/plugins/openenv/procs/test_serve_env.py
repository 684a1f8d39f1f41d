"""`serve-env` as a user starts it: two processes on a port, one killed, then Ctrl-C."""

import json
import os
import re
import signal
from pathlib import Path

import httpx
import psutil
import pytest
from commands import started
from live_run import RUN_DEADLINE_S, wait_until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

INITIALIZE = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}}
PING = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
ANSWER_S = 60.0
"""How long a busy machine may take to accept a connection or to answer."""


def test_a_killed_process_loses_its_sessions_alone_and_is_replaced(tmp_path: Path) -> None:
    words = ("serve-env", "toolbox", "--port", "0", "--processes", "2")
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        command = started(words, out, err, tmp_path)
    try:
        wait_until(lambda: address(tmp_path) != "", "a server", RUN_DEADLINE_S)
        url = address(tmp_path)
        plays_an_episode(url)
        sessions = mcp_sessions_of_both(url)
        for session in sessions.values():  # by new connections, which either process may accept
            for _ in range(4):
                assert ping(url, session) == 200
        victim = workers(command.pid)[0]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: "is replaced" in text(tmp_path), "a replacement", RUN_DEADLINE_S)
        wait_until(lambda: len(workers(command.pid)) == 2, "two processes", RUN_DEADLINE_S)
        wait_until(
            lambda: sorted(ping(url, one) for one in sessions.values()) == [200, 404],
            "the sessions of the other process alone",
            RUN_DEADLINE_S,
        )
        address_of = url.removeprefix("http")
        with connect(f"ws{address_of}/ws", open_timeout=ANSWER_S) as socket:
            socket.send(json.dumps({"type": "reset"}))
            assert json.loads(socket.recv(ANSWER_S))["type"] == "observation"
            command.send_signal(signal.SIGINT)
            assert command.wait(RUN_DEADLINE_S) == 0
            with pytest.raises(ConnectionClosed):
                socket.recv(ANSWER_S)
    finally:
        left = [] if command.poll() is not None else workers(command.pid)
        command.kill()
        command.wait(RUN_DEADLINE_S)
    assert left == []
    assert "Traceback" not in (tmp_path / "err").read_text()


def test_no_process_of_a_server_searches_its_folder_or_inherits_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inspect.py").write_text("open('executed', 'w').close()\n")
    monkeypatch.setenv("SERVED", "a token of the tests")
    monkeypatch.setenv("JUDGE_KEY", "a key of the tests")
    judge = 'judges={budget={usd=1}, models=[{name="a", base_url="http://127.0.0.1:1", model="m", '
    judge += 'api_key_env="JUDGE_KEY", prompt_usd_per_million=1, completion_usd_per_million=1}]}'
    words = ("serve-env", "toolbox", "--port", "0", "--token-env", "SERVED", "--set", judge)
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        command = started(words, out, err, tmp_path)
    try:
        wait_until(lambda: address(tmp_path) != "", "a server", RUN_DEADLINE_S)
        (worker,) = workers(command.pid)
        inherited = psutil.Process(worker).environ()
        assert {"SERVED", "JUDGE_KEY"} - inherited.keys() == {"SERVED", "JUDGE_KEY"}
        assert not (tmp_path / "executed").exists()
    finally:
        command.kill()
        command.wait(RUN_DEADLINE_S)


def plays_an_episode(url: str) -> None:
    with connect(f"ws{url.removeprefix('http')}/ws", open_timeout=ANSWER_S) as socket:
        frames = [
            {"type": "reset", "data": {"index": 1}},
            {"type": "step", "data": {"message": "x"}},
        ]
        for frame in frames:
            socket.send(json.dumps(frame))
            seen = json.loads(socket.recv(ANSWER_S))["data"]
    assert seen["done"] is True


def mcp_sessions_of_both(url: str) -> dict[str, str]:
    """Open sessions until each process holds one; return one of each."""
    found: dict[str, str] = {}
    while len(found) < 2:
        begun = httpx.post(f"{url}/mcp?index=1", json=INITIALIZE, timeout=ANSWER_S)
        session = begun.headers["mcp-session-id"]
        found[session.partition("-")[0]] = session
    return found


def ping(url: str, session: str) -> int:
    try:
        headers = {"mcp-session-id": session}
        answer = httpx.post(f"{url}/mcp", json=PING, headers=headers, timeout=ANSWER_S)
        return answer.status_code
    except httpx.TransportError:
        return 0


def workers(pid: int) -> list[int]:
    return [one.pid for one in psutil.Process(pid).children() if is_worker(one)]


def is_worker(process: psutil.Process) -> bool:
    try:
        return "composer_mesh.plugins.openenv.server.worker" in process.cmdline()
    except psutil.Error:
        return False


def text(folder: Path) -> str:
    return (folder / "out").read_text()


def address(folder: Path) -> str:
    found = re.search(r"serving (http://\S+)\s", text(folder))
    return found[1] if found else ""
