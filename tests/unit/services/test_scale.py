"""Replicas come and go on demand of another process, and only as many as make sense."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from composer_mesh.services.cli import main
from composer_mesh.services.directory.control import CONTROL_FILE, Control, ControlRefused, ask
from composer_mesh.services.directory.status import RunUnavailable
from composer_mesh.services.run.watch import Scaling
from composer_mesh.services.scale_command import read_sizes, scale


class FakePool:
    def __init__(self, size: int, error: Exception | None = None) -> None:
        self.size, self.error = size, error

    def __len__(self) -> int:
        return self.size

    async def resize(self, n: int) -> None:
        if self.error is not None:
            raise self.error
        self.size = n


class World:
    """A run with pools; `events` is what was recorded."""

    def __init__(self, error: Exception | None = None) -> None:
        self.pools = {
            "generator": FakePool(2),
            "environment": FakePool(1, error),
            "reference": FakePool(1),
        }
        self.events: list[tuple[str, str, str]] = []
        scaling = Scaling(self.pools, lambda *event: self.events.append(event), largest=16)
        self.scale = scaling.scale

    @property
    def sizes(self) -> dict[str, int]:
        return {kind: pool.size for kind, pool in self.pools.items()}


@pytest.fixture
def world() -> World:
    return World()


async def test_a_run_is_scaled_from_outside(world: World, tmp_path: Path) -> None:
    async with Control(tmp_path, {"scale": world.scale}):
        changed = await scale(tmp_path, generator=3, environment=2)
    assert changed == {
        "generator": {"before": 2, "after": 3},
        "environment": {"before": 1, "after": 2},
    }
    assert world.sizes == {"generator": 3, "environment": 2, "reference": 1}
    assert world.events == [
        ("pool_resized", "generator", "2 to 3"),
        ("pool_resized", "environment", "1 to 2"),
    ]


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({}, "no pool was named"),
        ({"generators": 2}, "name one of generator, environment$"),
        ({"teacher_replay": 2}, "is not a pool of this run"),
        ({"trainer": 2}, "set trainer.ranks"),
        ({"sdpo_teacher": 2}, "set sdpo.replicas"),
        ({"reference": 2}, "a run has one of it"),
        ({"generator": 0}, "generator is 0 but must be a whole number from 1 to 16"),
        ({"generator": -1}, "from 1 to 16"),
        ({"generator": 17}, "from 1 to 16"),
        ({"generator": True}, "generator is True"),
        ({"generator": 2.5}, "from 1 to 16"),
        ({"generator": "3"}, "from 1 to 16"),
    ],
)
async def test_what_cannot_be_is_refused_with_its_reason_and_changes_nothing(
    world: World, tmp_path: Path, wanted: dict[str, Any], why: str
) -> None:
    before = world.sizes
    async with Control(tmp_path, {"scale": world.scale}):
        with pytest.raises(ControlRefused, match=why):
            await scale(tmp_path, **({"environment": 5} if wanted else {}), **wanted)
    assert (world.sizes, world.events) == (before, [])


async def test_a_pool_that_cannot_grow_is_told_and_keeps_nobody_from_growing(
    tmp_path: Path,
) -> None:
    world = World(error=RuntimeError("no memory"))
    async with Control(tmp_path, {"scale": world.scale}):
        with pytest.raises(RunUnavailable, match="RuntimeError: no memory"):
            await scale(tmp_path, generator=3, environment=2)
    assert world.sizes == {"generator": 3, "environment": 1, "reference": 1}
    assert ("pool_not_resized", "environment", "1 to 2: no memory") in world.events


@pytest.mark.parametrize("depth", [1, 12], ids=["short path", "longer than a socket's address"])
async def test_only_the_owner_may_use_the_socket_which_is_gone_afterwards(
    tmp_path: Path, depth: int
) -> None:
    run = tmp_path.joinpath(*["a-folder-with-a-name"] * depth)
    run.mkdir(parents=True)

    async def echo(**words: str) -> dict[str, str]:
        return words

    (run / CONTROL_FILE).touch()  # left behind by a controller that was killed
    async with Control(run, {"echo": echo}):
        mode = (run / CONTROL_FILE).stat().st_mode
        assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)
        assert await ask(run, "echo", word="hello") == {"word": "hello"}
        with pytest.raises(
            ControlRefused, match="'shout' is not a command of this run, which knows"
        ):
            await ask(run, "shout")
    assert list(run.iterdir()) == []
    with pytest.raises(RunUnavailable, match="takes no commands"):
        await ask(run, "echo")


@pytest.mark.parametrize(
    "line", [b"\n", b"{\n", b"[]\n", b'{"command": "echo"}\n', b'{"command": [], "arguments": 7}\n']
)
async def test_a_line_that_is_no_request_is_answered_and_hurts_nobody(
    tmp_path: Path, line: bytes
) -> None:
    async with Control(tmp_path, {}):
        reader, writer = await asyncio.open_unix_connection(tmp_path / CONTROL_FILE)
        writer.write(line)
        assert "one JSON object" in json.loads(await reader.readline())["refused"]
        writer.close()
        with pytest.raises(ControlRefused, match="is not a command"):
            await ask(tmp_path, "echo")


def held() -> tuple[Callable[[], Awaitable[None]], asyncio.Event, asyncio.Event]:
    """A command that has begun when the first event is set, and ends when the second is."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def command() -> None:
        begun.set()
        await go.wait()

    return command, begun, go


async def test_a_run_that_ends_tells_whoever_waits(tmp_path: Path) -> None:
    command, begun, _ = held()
    async with Control(tmp_path, {"wait": command}):
        asking = asyncio.ensure_future(ask(tmp_path, "wait"))
        await begun.wait()
    with pytest.raises(RunUnavailable, match="ended before wait was done"):
        await asking


async def test_a_client_that_leaves_does_not_stop_what_it_began(tmp_path: Path) -> None:
    command, begun, go = held()
    done = asyncio.Event()

    async def whole() -> None:
        await command()
        done.set()

    async with Control(tmp_path, {"wait": whole}):
        asking = asyncio.ensure_future(ask(tmp_path, "wait"))
        await begun.wait()
        asking.cancel()
        await asyncio.wait([asking])
        go.set()
        await done.wait()


@pytest.mark.parametrize("size", ["generator", "=3", "generator=", "generator=x", "generator=-1"])
def test_a_size_that_is_none_is_refused_before_anybody_is_asked(
    size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", str(tmp_path), size]) == 2
    assert "write for example generator=3" in capsys.readouterr().err


def test_each_kind_is_said_once() -> None:
    assert read_sizes(["generator=3", "environment=1"]) == {"generator": 3, "environment": 1}
    with pytest.raises(ControlRefused, match="with a new kind"):
        read_sizes(["generator=3", "generator=1"])


def test_a_run_that_is_not_live_is_one_sentence_and_status_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", str(tmp_path), "generator=3"]) == 1
    assert "takes no commands (No such file or directory)" in capsys.readouterr().err
