"""What a chaos run does to a process, done to one of our own: each fault strikes as it is named."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import chaos_inject
import chaos_run
import pytest
from chaos_schedule import Fault, Planned
from echo_actors import EchoActor

from composer_mesh.mesh.call_stream import CallStream
from composer_mesh.mesh.processes import is_alive, kill, wait_gone
from composer_mesh.mesh.spawn import MeshHost
from composer_mesh.mesh.spawned import SpawnedActor
from composer_mesh.mesh.supervision import ActorDied, FaultPolicy, MeshError, Supervisor

DEADLINE_S = 120.0
SILENCE_S = 1.0
LIGHT = ("json",)
"""What the fork server of these tests imports: nothing that takes time."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where the hook listens: a path that is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="cm-") as path:
        yield Path(path)


class Driver:
    """One actor under the injector, which believes that a run goes on around it."""

    def __init__(self, root: Path, folder: Path, actor: SpawnedActor) -> None:
        self.actor = actor
        status = {"actors": [{"name": actor.name, "kind": "echo", "pid": actor.pid}]}
        status["actors"][0]["state"] = "ready"
        (root / "status.json").write_text(json.dumps(status))
        process: Any = None
        run = chaos_run.LiveRun(root, "no marker", process, metrics=[{"step": 1}])
        self._run, self._folder = run, folder

    def arm(self, fault: Fault, endpoint: str | None = None) -> chaos_inject.Injector:
        planned = Planned(5, 0.0, 0.0, "echo", 0, fault, endpoint)
        injector = chaos_inject.Injector(self._run, [planned], 10, self._folder)
        injector.step()
        return injector


async def driver_of(host: MeshHost, root: Path, folder: Path) -> Driver:
    path = os.pathsep.join([str(chaos_run.HOOK), os.environ["PYTHONPATH"]])
    env = {"PYTHONPATH": path, chaos_run.FOLDER_ENV: str(folder)}
    actor = await host.spawn("echo", EchoActor, env=env, policy=FaultPolicy.OWNER)
    return Driver(root, folder, actor)


@pytest.fixture
async def driver(host: MeshHost, tmp_path: Path, folder: Path) -> Driver:
    return await driver_of(host, tmp_path, folder)


@pytest.fixture
async def forked(supervisor: Supervisor, tmp_path: Path, folder: Path) -> AsyncIterator[Driver]:
    """A driver of an actor that a fork server started, as in a run."""
    async with MeshHost(supervisor, stop_deadline_s=5.0, preload=LIGHT) as host:
        yield await driver_of(host, tmp_path, folder)


async def says(driver: Driver) -> str:
    answer: str = await driver.actor.call("say", "hello", deadline_s=DEADLINE_S)
    return answer


async def call_until_it_fails(driver: Driver, endpoint: str, *args: str) -> None:
    """Call again and again: a fault needs a moment to reach the process."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            await driver.actor.call(endpoint, *args, deadline_s=DEADLINE_S)


async def stream_until_it_fails(calls: CallStream) -> None:
    """The same by a stream."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            await calls.call("say", "hello")


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for something that another process does."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"there is still no: {what}"
        await asyncio.sleep(0.01)


async def until_struck(injector: chaos_inject.Injector) -> chaos_inject.Applied:
    """Wait for the line in the ledger that the process writes."""

    def struck() -> bool:
        injector.step()
        return bool(injector.applied)

    await until(struck, "line in the ledger")
    return injector.applied[0]


def is_stopped(pid: int) -> bool:
    """Whether every thread of a process has stopped: they do so one by one."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return bool(stats) and all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def is_limited(pid: int) -> bool:
    return resource.prlimit(pid, resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


async def test_an_exception_strikes_in_an_endpoint_once(driver: Driver) -> None:
    injector = driver.arm(Fault.RAISE)
    with pytest.raises(RuntimeError, match="injected fault 5: in say"):
        await call_until_it_fails(driver, "say", "hello")
    assert (await until_struck(injector)).endpoint == "say"
    assert await says(driver) == "echo hello"


async def test_a_fault_strikes_in_a_forked_process_under_its_name_and_pid(forked: Driver) -> None:
    injector = forked.arm(Fault.RAISE)
    with pytest.raises(RuntimeError, match="injected fault 5: in say"):
        await call_until_it_fails(forked, "say", "hello")
    struck = await until_struck(injector)
    assert (struck.actor, struck.pid) == ("echo", forked.actor.pid)


async def test_an_exception_strikes_in_a_call_that_came_by_a_stream(driver: Driver) -> None:
    calls = CallStream("caller", "echo", driver.actor.ref)
    injector = driver.arm(Fault.RAISE, "say")
    try:
        with pytest.raises(RuntimeError, match="injected fault 5: in say"):
            await stream_until_it_fails(calls)
        assert (await until_struck(injector)).endpoint == "say"
        assert await calls.call("say", "hello") == "echo hello"
    finally:
        await calls.close()


async def test_a_fault_waits_for_the_endpoint_that_it_names(driver: Driver) -> None:
    injector = driver.arm(Fault.RAISE, "pid")
    assert await says(driver) == "echo hello"
    assert injector.left
    with pytest.raises(RuntimeError, match="injected fault 5: in pid"):
        await call_until_it_fails(driver, "pid")


async def test_a_memory_limit_fails_what_asks_for_more_and_is_lifted(driver: Driver) -> None:
    driver.arm(Fault.MEMORY)
    with pytest.raises(MemoryError, match="injected fault 5"):
        await call_until_it_fails(driver, "say", "hello")
    await until(lambda: not is_limited(driver.actor.pid), "end of the limit")
    assert await says(driver) == "echo hello"


@pytest.mark.parametrize("fault", [Fault.KILL, Fault.EXIT])
@pytest.mark.parametrize("endpoint", [None, "say"])
async def test_a_process_ends_at_once_or_in_the_endpoint(
    fault: Fault, endpoint: str | None, driver: Driver
) -> None:
    injector = driver.arm(fault, endpoint)
    if endpoint is not None:
        with pytest.raises(ActorDied):
            await call_until_it_fails(driver, "say", "hello")
    assert await wait_gone(driver.actor.pid, DEADLINE_S)
    assert (await until_struck(injector)).pid == driver.actor.pid


async def test_a_stopped_process_lives_and_does_not_answer(driver: Driver) -> None:
    await until_struck(driver.arm(Fault.STOP))
    await until(lambda: is_stopped(driver.actor.pid), "stop of all threads")
    with pytest.raises(MeshError):
        await driver.actor.call("say", "hello", deadline_s=SILENCE_S)
    assert is_alive(driver.actor.pid)
    kill(driver.actor.pid)


async def test_cut_connections_are_made_again(driver: Driver) -> None:
    injector = driver.arm(Fault.CUT)
    assert (await until_struck(injector)).actor == "echo"
    assert await says(driver) == "echo hello"


def test_processes_are_found_by_the_marker_that_they_inherit() -> None:
    assert chaos_run.marked("nobody has this one") == []


def test_the_package_knows_nothing_of_the_hook() -> None:
    root = Path(chaos_run.HOOK).parents[1]
    folders = (
        "configs",
        "planning",
        "losses",
        "rollouts",
        "mesh",
        "actors",
        "services",
        "plugins",
    )
    sources = [path for folder in folders for path in (root / folder).rglob("*.py")]
    assert sources
    assert not [path for path in sources if "COMPOSER_MESH_CHAOS" in path.read_text()]
