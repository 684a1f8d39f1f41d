"""What a run shows of itself is true while it lives, and stays when it ends."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from slow_file import SlowFile

from composer_mesh.configs.schema import RunConfig
from composer_mesh.mesh.supervision import ActorDied
from composer_mesh.services.directory.control import CONTROL_FILE, ControlRefused
from composer_mesh.services.directory.status import (
    STATUS_FILE,
    ActorStatus,
    RunProgress,
    commands_for,
    earlier_progress,
    read_status,
)
from composer_mesh.services.inspection.view import RunView
from composer_mesh.services.run import mesh as run_mesh
from composer_mesh.services.run import watch
from composer_mesh.services.run.watch import RunWatch
from composer_mesh.services.scale_command import scale

ACTORS = [ActorStatus("trainer", "trainer", 11), ActorStatus("generator-0", "generator", 12)]


class FakePool:
    """A dead replica whose next process is on its way."""

    def __init__(self) -> None:
        self.size = 1

    def status(self) -> list[dict[str, Any]]:
        about = {"pid": None, "outstanding": 0, "reason": "", "state": "starting"}
        grown = [{"name": f"generator-{n}", "generation": 1, **about} for n in range(1, self.size)]
        return [{"name": "generator-0.2", "generation": 2, **about}, *grown]

    def __len__(self) -> int:
        return self.size

    async def resize(self, n: int) -> None:
        self.size = n


class FakeMesh:
    """`asked` is set each time that somebody asked; they wait for `slow` and get `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.pool, self.error, self.asked = FakePool(), error, asyncio.Event()
        self.slow: asyncio.Event | None = None

    @property
    def pools(self) -> dict[str, Any]:
        return {"generator": self.pool}

    async def describe(self) -> list[ActorStatus]:
        self.asked.set()
        if self.slow is not None:
            await self.slow.wait()
        if self.error is not None:
            raise self.error
        return ACTORS


class World:
    """A run that is watched, and what was recorded of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[tuple[str, str, str]] = []
        config = RunConfig(name="run", steps=20)
        self.view = RunView("run", 20, console=Console(file=StringIO()))
        self.watch = RunWatch(
            root,
            config,
            self.view,
            lambda *event: self.events.append(event),
            lambda: RunProgress(3, 2, sessions=4, wall_s=50.5),
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.watch.opened("tcp", "http://127.0.0.1:1", None)
    return world


async def shown(mesh: FakeMesh, root: Path) -> None:
    """Wait until what the mesh said was written."""
    await mesh.asked.wait()
    await until(lambda: read_status(root) is not None)


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110  another thread makes it true
        await asyncio.sleep(0.001)


async def test_the_status_has_every_actor_and_how_far_the_run_is(world: World) -> None:
    mesh = FakeMesh()
    async with world.watch.over(mesh):
        await shown(mesh, world.root)
        status = read_status(world.root)
    assert status is not None
    assert [actor.name for actor in status.actors] == ["trainer", "generator-0", "generator-0.2"]
    assert (status.state, status.step, status.steps, status.restarts) == ("running", 3, 20, 2)
    assert earlier_progress(world.root) == RunProgress(3, 2, 4, 50.5)
    assert (status.pid, status.admin_url, status.live) == (os.getpid(), "http://127.0.0.1:1", True)
    assert (status.here, status.hostname) == (True, socket.gethostname())


async def test_a_run_is_scaled_while_it_is_watched_and_not_after(world: World) -> None:
    mesh = FakeMesh()
    async with world.watch.over(mesh):
        await scale(world.root, generator=3)
        with pytest.raises(ControlRefused):
            await scale(world.root, trainer=3)
    assert mesh.pool.size == 3
    assert world.events == [("pool_resized", "generator", "1 to 3")]
    assert not (world.root / CONTROL_FILE).exists()


async def test_whoever_scaled_a_run_finds_the_new_replicas_in_its_status(world: World) -> None:
    mesh = FakeMesh()
    async with world.watch.over(mesh):
        await shown(mesh, world.root)
        await scale(world.root, generator=3)
        status = read_status(world.root)
    assert status is not None
    assert {"generator-1", "generator-2"} <= {actor.name for actor in status.actors}


async def test_a_look_that_began_before_a_run_was_scaled_does_not_replace_the_later_one(
    world: World,
) -> None:
    mesh = FakeMesh()
    answer = mesh.slow = asyncio.Event()
    async with world.watch.over(mesh):
        await mesh.asked.wait()  # the watch's own look is on its way
        mesh.slow = None
        scaling = asyncio.create_task(scale(world.root, generator=3))
        await until(lambda: mesh.pool.size == 3)
        await asyncio.wait({scaling}, timeout=0.2)
        assert not scaling.done()  # its own look waits for the first
        answer.set()
        await scaling


async def test_a_run_whose_status_cannot_be_written_is_scaled_nevertheless(world: World) -> None:
    mesh = FakeMesh()
    async with world.watch.over(mesh):
        await shown(mesh, world.root)
        mesh.error = OSError("no space")
        changes = await scale(world.root, generator=3)
    assert changes == {"generator": {"before": 1, "after": 3}}
    assert ("status_stopped", "", "OSError: no space") in world.events


async def test_a_dead_actor_does_not_end_the_watch_and_an_error_of_it_does_not_end_the_run(
    world: World,
) -> None:
    mesh = FakeMesh(ActorDied("generator-0", "gone"))
    async with world.watch.over(mesh):
        await mesh.asked.wait()
        assert world.events == []
    mesh = FakeMesh(OSError("no space"))
    async with world.watch.over(mesh):
        await until(lambda: bool(world.events))
        assert world.events == [("status_stopped", "", "OSError: no space")]


async def test_the_status_is_written_again_once_the_disk_takes_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "STATUS_EVERY_S", 0.001)
    mesh = FakeMesh(OSError("no space"))
    async with world.watch.over(mesh):
        await until(lambda: bool(world.events))
        for _ in range(3):  # looks that fail too are not recorded
            mesh.asked.clear()
            await mesh.asked.wait()
        assert read_status(world.root) is None
        mesh.error = None
        await until(lambda: len(world.events) == 2)
        assert read_status(world.root) is not None
    assert [event for event, *_ in world.events] == ["status_stopped", "status_resumed"]


async def test_an_actor_whose_describe_fails_does_not_hide_the_others() -> None:
    class Failing:
        name, kind, pid, host = "expert_server", "expert_server", 11, SimpleNamespace(name="a")

        async def call(self, endpoint: str, *, deadline_s: float) -> Any:
            raise MemoryError(f"no memory for {endpoint}")

    status, seconds = await run_mesh._describe(Failing())
    assert (status.name, status.state, status.pid, seconds) == ("expert_server", "busy", 11, None)
    assert status.activity == "describe failed: MemoryError: no memory for describe"


async def test_a_display_that_fails_is_recorded_once_and_ends_nothing(world: World) -> None:
    world.view.failure = "No space left on device"
    async with world.watch.over(FakeMesh()):
        await until(lambda: bool(world.events))
    await world.watch.ended("finished")
    assert world.events == [("display_lost", "", "No space left on device")]


async def test_a_run_without_a_control_socket_goes_on_and_says_so(world: World) -> None:
    (world.root / CONTROL_FILE).mkdir()
    async with world.watch.over(FakeMesh()):
        (event,) = world.events
    assert event[0] == "no_commands"


async def test_the_last_state_has_the_last_actors_as_stopped_ones(world: World) -> None:
    mesh = FakeMesh()
    async with world.watch.over(mesh):
        await shown(mesh, world.root)
        before = read_status(world.root)
    await world.watch.ended("failed")
    status = read_status(world.root)
    assert before is not None
    assert status is not None
    assert (status.state, status.live) == ("failed", False)
    assert [one.name for one in status.actors] == [one.name for one in before.actors]
    kept = {(one.state, one.pid, one.activity) for one in status.actors if one.state != "dead"}
    assert kept == {("stopped", None, "")}
    versions = [one.policy_version for one in status.actors]
    assert versions == [one.policy_version for one in before.actors]
    assert not any(one.pid for one in status.actors)


def test_a_run_without_a_status_has_no_earlier_sessions(tmp_path: Path) -> None:
    assert earlier_progress(tmp_path) == RunProgress(0, 0, 0, 0.0)


async def test_the_loop_goes_on_while_a_disk_takes_the_status_and_the_last_state_comes_last(
    world: World,
) -> None:
    """The file opens once the loop has turned; by then the mesh was asked for its state."""
    slow = SlowFile(Path(f".{STATUS_FILE}.{os.getpid()}"))
    mesh = FakeMesh()
    async with world.watch.over(mesh):
        await mesh.asked.wait()
        assert read_status(world.root) is None
        slow.turned()
        await until(lambda: read_status(world.root) is not None)
        running = read_status(world.root)
    await world.watch.ended("finished")
    last = read_status(world.root)
    assert not slow.late
    assert [one and one.state for one in (running, last)] == ["running", "finished"]


async def test_a_disk_that_does_not_take_the_last_state_is_told_and_ends_nothing(
    world: World,
) -> None:
    (world.root / f".{STATUS_FILE}.{os.getpid()}").mkdir()
    await world.watch.ended("failed")
    (event,) = world.events
    assert event[0] == "status_stopped"
    assert "IsADirectoryError" in event[2]


def test_a_run_that_never_opened_leaves_no_status(tmp_path: Path) -> None:
    asyncio.run(World(tmp_path).watch.ended("failed"))
    assert list(tmp_path.iterdir()) == []


def test_the_commands_can_be_typed_as_they_are_shown() -> None:
    plain = commands_for(Path("runs/a b"), telemetry=False)
    assert plain[0] == "composer-mesh tree 'runs/a b' --watch"
    named = [line.split()[1] for line in plain]
    assert named == ["tree", "events", "scale", "stop", "stacks", "tui"]
    assert commands_for(Path("r"), telemetry=True)[-1].startswith("composer-mesh query r ")
