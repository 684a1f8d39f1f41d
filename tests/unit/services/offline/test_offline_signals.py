"""The replay command as a user runs it: light, interrupted, gone on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from offline_runs import BUILTIN, ENVIRON, paid, replay_section, rows_of, traces_of, write_run
from pytest_httpserver import HTTPServer
from repetition import LONG
from scripted_provider import KEY
from werkzeug import Request, Response

from composer_mesh.rollouts.tool_calls import assistant_message
from composer_mesh.services.cli import main
from composer_mesh.tasks.toolbox import ToolboxTask

DEADLINE_S = 60.0


class Provider:
    """Answers so many questions at once, and the others when its gate is opened."""

    def __init__(self, task: ToolboxTask, at_once: int) -> None:
        self._task, self._at_once = task, at_once
        self.gate, self.held = threading.Event(), threading.Semaphore(0)
        self._lock, self.questions = threading.Lock(), list[bytes]()

    def __call__(self, request: Request) -> Response:
        with self._lock:
            self.questions.append(request.data)
            place = len(self.questions)
        if place > self._at_once:
            self.held.release()
            assert self.gate.wait(DEADLINE_S)
        said = assistant_message(self._task.expert(request.get_json()["messages"]), "call")
        body = {"choices": [{"message": said}], "usage": {"cost": 0.0001}}
        return Response(json.dumps(body), content_type="application/json")

    def wait_until_held(self) -> None:
        assert self.held.acquire(timeout=DEADLINE_S), "no question was held back"


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    with HTTPServer(host="127.0.0.1", threaded=True) as server:
        yield server


@pytest.fixture
def provider(server: HTTPServer, toolbox: ToolboxTask) -> Iterator[Provider]:
    provider = Provider(toolbox, at_once=12)
    server.expect_request("/v1/chat/completions").respond_with_handler(provider)
    yield provider
    provider.gate.set()


@pytest.fixture
def command(
    tmp_path: Path, server: HTTPServer, build_config: Any, toolbox: ToolboxTask
) -> list[str]:
    teachers = [{**of, "base_url": server.url_for("/v1")} for of in paid("a", "b", "c")]
    config = build_config(replay=replay_section(teachers, 1.0))
    run = write_run(tmp_path / "run", config, traces_of(toolbox, 8))
    out = ["--out", str(tmp_path / "pairs.jsonl"), "--concurrency", "2"]
    return [sys.executable, "-m", "composer_mesh", "replay", str(run), *out]


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env={**os.environ, **ENVIRON},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_an_interrupted_replay_waits_for_what_is_paid_and_goes_on_where_it_was(
    command: list[str],
    provider: Provider,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    interrupted = start(command)
    provider.wait_until_held()
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.stdout is not None
    lines = iter(interrupted.stdout.readline, "")
    assert any(line.startswith("stopping: waiting for the answers") for line in lines)
    provider.gate.set()
    rest, _ = interrupted.communicate(timeout=DEADLINE_S)
    assert interrupted.returncode == 130, rest
    assert "continue with the same command" in rest
    asked = len(provider.questions)
    assert asked < 48
    kept = rows_of(tmp_path / "pairs.jsonl")

    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    status = main(command[command.index("replay") :])
    said = "".join(capsys.readouterr())
    assert status == 0, said
    assert len(set(provider.questions)) == len(provider.questions) == 48
    rows = rows_of(tmp_path / "pairs.jsonl")
    assert [row["state_id"] for row in rows][: len(kept)] == [row["state_id"] for row in kept]
    assert len(rows) > len(kept) > 0
    assert KEY not in rest + said


@LONG
def test_a_second_signal_drops_what_is_under_way(command: list[str], provider: Provider) -> None:
    interrupted = start(command)
    provider.wait_until_held()
    interrupted.send_signal(signal.SIGTERM)
    assert interrupted.stdout is not None
    lines = iter(interrupted.stdout.readline, "")
    assert any(line.startswith("stopping: waiting for the answers") for line in lines)
    interrupted.send_signal(signal.SIGINT)
    interrupted.communicate(timeout=DEADLINE_S)
    assert interrupted.returncode == 143


def modules_after(*arguments: str) -> set[str]:
    """The top-level modules of a fresh interpreter that ran one command."""
    code = (
        "import sys, json; from composer_mesh.services.cli import main; "
        f"status = main({list(arguments)!r}); "
        "print(json.dumps([status, sorted({name.split('.')[0] for name in sys.modules})]))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    status, modules = json.loads(done.stdout.splitlines()[-1])
    assert status == 0, done.stderr
    return set(modules)


def test_a_replay_starts_no_mesh_and_loads_no_model(
    tmp_path: Path, build_config: Any, toolbox: ToolboxTask
) -> None:
    config = build_config(replay=replay_section(BUILTIN))
    run = write_run(tmp_path / "run", config, traces_of(toolbox, 1))
    loaded = modules_after("replay", str(run), "--out", str(tmp_path / "pairs.jsonl"))
    assert "httpx" in loaded
    assert not loaded & {"torch", "transformers"}
