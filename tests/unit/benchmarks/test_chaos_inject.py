"""Striking by a schedule: when a fault is due, whom it finds, and when it counts."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

inject: Any = importlib.import_module("chaos_inject")
schedule: Any = importlib.import_module("chaos_schedule")
runs: Any = importlib.import_module("chaos_run")

Fault = schedule.Fault
STEPS = 10


@dataclass
class FakeRun:
    """A run of which somebody else says how far it is and who serves."""

    serving: list[Any] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def actors(self) -> list[Any]:
        return self.serving

    def advance(self, steps: int) -> None:
        self.metrics = [{"step": step} for step in range(1, steps + 1)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where processes listen: a path that is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="cm-") as path:
        yield Path(path)


@pytest.fixture
def sleeper() -> Iterator[Any]:
    """A process that may be ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


@pytest.fixture
def listening(folder: Path) -> Iterator[socket.socket]:
    """The socket of a process that would hear of faults: our own."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.bind(str(folder / f"{os.getpid()}.sock"))
        own.settimeout(5)
        yield own


def planned(fault: Any, at: float = 0.5, kind: str = "generator", **more: Any) -> Any:
    return schedule.Planned(0, at, 0.0, kind, 0, fault, **more)


def actor(pid: int, name: str = "generator-0", kind: str = "generator") -> Any:
    return runs.Actor(name, kind, pid)


def test_a_fault_is_not_due_before_its_share_of_the_steps(folder: Path, sleeper: Any) -> None:
    run = FakeRun([actor(sleeper.pid)])
    injector = inject.Injector(run, [planned(Fault.KILL)], STEPS, folder)
    for steps in (0, 4):
        run.advance(steps)
        injector.step()
        assert injector.applied == []
    run.advance(5)
    injector.step()
    assert [one.pid for one in injector.applied] == [sleeper.pid]
    assert sleeper.wait(60) == -9


def test_a_fault_without_a_target_waits(folder: Path, sleeper: Any) -> None:
    run = FakeRun([actor(sleeper.pid, "environment-0", "environment")])
    run.advance(6)
    injector = inject.Injector(run, [planned(Fault.KILL)], STEPS, folder)
    injector.step()
    assert (injector.applied, len(injector.left)) == ([], 1)
    run.serving.append(actor(sleeper.pid))
    injector.step()
    assert (len(injector.applied), injector.left) == (1, [])


def test_a_process_that_was_ended_is_not_struck_again(folder: Path, sleeper: Any) -> None:
    run = FakeRun([actor(sleeper.pid)])
    run.advance(6)
    plan = [planned(Fault.KILL), planned(Fault.EXIT)]
    injector = inject.Injector(run, plan, STEPS, folder)
    injector.step()
    assert len(injector.applied) == len(injector.left) == 1


def test_an_exception_goes_to_the_process_and_counts_when_it_struck(
    folder: Path, listening: socket.socket
) -> None:
    run = FakeRun([actor(os.getpid())])
    run.advance(6)
    injector = inject.Injector(run, [planned(Fault.RAISE, endpoint="pull")], STEPS, folder)
    injector.step()
    order = json.loads(listening.recv(4096))
    assert (order["fault"], order["endpoint"]) == ("exception", "pull")
    assert injector.applied == []
    line = {"number": 0, "time": 123.0, "pid": os.getpid(), "endpoint": "pull"}
    (folder / "applied.jsonl").write_text(json.dumps(line) + "\n")
    injector.step()
    (struck,) = injector.applied
    assert (struck.time, struck.actor, struck.endpoint) == (123.0, "generator-0", "pull")


@pytest.fixture
def armed(folder: Path, sleeper: Any, listening: socket.socket) -> Any:
    """An injector whose fault waits in the sleeper; after its end our own process would serve."""
    (folder / f"{sleeper.pid}.sock").symlink_to(folder / f"{os.getpid()}.sock")
    run = FakeRun([actor(sleeper.pid)])
    run.advance(6)
    injector = inject.Injector(run, [planned(Fault.EXIT, endpoint="pull")], STEPS, folder)
    injector.step()
    assert json.loads(listening.recv(4096))["endpoint"] == "pull"
    run.serving = [actor(os.getpid(), "generator-0.2")]
    sleeper.kill()
    sleeper.wait()
    return injector


def test_a_fault_whose_process_ended_first_goes_to_its_successor_at_once(
    armed: Any, listening: socket.socket
) -> None:
    armed.step()
    assert json.loads(listening.recv(4096))["number"] == 0
    assert (armed.applied, len(armed.left)) == ([], 1)


def test_a_fault_that_ended_its_process_counts_once(
    armed: Any, folder: Path, sleeper: Any, listening: socket.socket
) -> None:
    line = {"number": 0, "time": 123.0, "pid": sleeper.pid, "endpoint": "pull"}
    (folder / "applied.jsonl").write_text(json.dumps(line) + "\n")
    for _ in range(2):
        armed.step()
    assert ([one.pid for one in armed.applied], armed.left) == ([sleeper.pid], [])
    listening.setblocking(False)
    with pytest.raises(BlockingIOError):
        listening.recv(4096)


def test_an_exception_strikes_the_expert_server_where_it_has_an_endpoint(
    folder: Path, listening: socket.socket
) -> None:
    run = FakeRun([actor(os.getpid(), "expert_server", "expert_server")])
    run.advance(6)
    plan = [planned(Fault.RAISE, kind="expert_server")]
    inject.Injector(run, plan, STEPS, folder).step()
    assert json.loads(listening.recv(4096))["endpoint"] == "describe"


def test_a_process_that_does_not_listen_yet_is_asked_again(folder: Path) -> None:
    run = FakeRun([actor(os.getpid())])
    run.advance(6)
    injector = inject.Injector(run, [planned(Fault.EXIT)], STEPS, folder)
    injector.step()
    assert (injector.applied, len(injector.left)) == ([], 1)


def test_the_end_of_a_run_is_left_in_peace(folder: Path, sleeper: Any) -> None:
    run = FakeRun([actor(sleeper.pid)])
    run.advance(STEPS)
    injector = inject.Injector(run, [planned(Fault.KILL)], STEPS, folder)
    injector.step()
    assert len(injector.left) == 1


def test_a_file_gives_its_complete_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    tail = runs.Tail(path)
    assert tail.read() == []
    path.write_text('{"a": 1}\n{"a"')
    assert tail.read() == [{"a": 1}]
    with path.open("a") as file:
        file.write(": 2}\n")
    assert tail.read() == [{"a": 2}]
    assert tail.read() == []
    assert tail.intact


@pytest.mark.parametrize("left", ['{"a": 1}\n', '{"a": 1}\n{"b": 3}\n{"a": 4}\n', None])
def test_a_file_that_lost_what_it_held_is_not_intact(left: str | None, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    tail = runs.Tail(path)
    tail.read()
    path.unlink()
    if left is not None:
        path.write_text(left)
    assert not tail.intact


def test_actors_that_do_not_serve_are_no_targets(tmp_path: Path) -> None:
    states = {"a-0": "ready", "b-0": "busy", "c-0": "restarting", "d-0": "dead"}
    told = [
        {"name": name, "kind": name[0], "pid": os.getpid(), "state": state}
        for name, state in states.items()
    ]
    (tmp_path / "status.json").write_text(json.dumps({"actors": told}))
    process: Any = None
    run = runs.LiveRun(tmp_path, "marker", process)
    assert [one.name for one in run.actors()] == ["a-0", "b-0"]
