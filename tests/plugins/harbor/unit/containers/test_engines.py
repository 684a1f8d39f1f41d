"""Containers of a daemon, against one that runs nothing: what it is sent, what its answers mean."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import FakeEngine, serving
from tiny_images import Blobs, layer

from composer_mesh.plugins.harbor.containers.engines import EngineContainer, EngineContainers
from composer_mesh.plugins.harbor.containers.opening import open_containers
from composer_mesh.plugins.harbor.containers.port import (
    ContainerError,
    ContainerSettings,
    ImageSource,
    TooLarge,
)
from composer_mesh.tasks.errors import UnusableTask

SETTINGS = ContainerSettings(ImageSource("tiny:v1"), processes=7)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    with serving(FakeEngine(), tmp_path / "socket") as made:
        yield made


@pytest.fixture
async def containers(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[EngineContainers]:
    made = EngineContainers("podman", socket=tmp_path / "socket")
    yield made
    await made.close()


@pytest.fixture
async def container(containers: EngineContainers) -> AsyncIterator[EngineContainer]:
    made = await containers.start(SETTINGS)
    yield made
    await made.close()


async def test_a_container_has_the_settings_and_no_network(
    engine: FakeEngine, containers: EngineContainers
) -> None:
    settings = replace(SETTINGS, cpus=1.5, memory_bytes=64, user="agent", workdir="/w")
    await (await containers.start(settings)).close()
    body = next(body for _, path, body in engine.calls if path == "/containers/create")
    host = body["HostConfig"]
    assert (body["Image"], body["User"], body["WorkingDir"]) == (
        "docker.io/library/tiny:v1",
        "agent",
        "/w",
    )
    assert (host["NetworkMode"], host["Memory"], host["MemorySwap"]) == ("none", 64, 64)
    assert (host["NanoCpus"], host["PidsLimit"]) == (1_500_000_000, 7)
    assert {one["Name"] for one in host["Ulimits"]} == {"nofile", "nproc"}
    assert engine.paths()[-1] == "DELETE /containers/id"


async def test_a_command_gives_both_streams_up_to_the_bound(
    engine: FakeEngine, container: EngineContainer
) -> None:
    engine.outputs, engine.exit_code = [(1, b"out"), (2, b"err"), (1, b"put" * 100)], 3
    done = await container.run(["sh"], environment={"A": "b"}, user="me", output_bytes=5)
    assert (done.output, done.errors, done.output_cut) == (b"outpu", b"err", True)
    assert (done.exit_code, done.ended) == (3, "exited")
    body = next(body for _, path, body in engine.calls if path.endswith("/exec"))
    assert (body["Cmd"], body["Env"], body["User"]) == (["sh"], ["A=b"], "me")


ENDS = {
    "memory": (137, {"Running": True, "OOMKilled": True}, "memory"),
    "a signal": (137, {"Running": True, "OOMKilled": False}, "signal"),
    "a high code": (130, {"Running": True, "OOMKilled": False}, "exited"),
}


@pytest.mark.parametrize("name", ENDS)
async def test_each_end_of_a_command_is_named(
    engine: FakeEngine, container: EngineContainer, name: str
) -> None:
    engine.exit_code, engine.state, ended = ENDS[name]
    assert (await container.run(["sh"])).ended == ended


async def test_a_container_that_ended_is_an_infrastructure_error(
    engine: FakeEngine, container: EngineContainer
) -> None:
    engine.exit_code, engine.state = 137, {"Running": False}
    with pytest.raises(ContainerError, match="container_died"):
        await container.run(["sh"])
    engine.faults = {"/containers/": (404, "no such container")}
    with pytest.raises(ContainerError, match="container_died"):
        await container.run(["sh"])


async def test_a_late_command_ends_all_processes(
    engine: FakeEngine, container: EngineContainer
) -> None:
    engine.hangs = threading.Event()
    done = await container.run(["sleep", "9"], timeout_s=0.05)
    engine.hangs.set()
    assert (done.ended, done.exit_code) == ("wall_time", None)
    assert engine.paths()[-1] == "POST /containers/id/restart"


async def test_files_go_in_and_out(engine: FakeEngine, container: EngineContainer) -> None:
    await container.put({"a/b": b"x", "c": b"y"}, "/tests", executable=["c"])
    assert engine.files == {"/tests/a/b": b"x", "/tests/c": b"y"}
    assert await container.get("/tests", most_bytes=10) == {"a/b": b"x", "c": b"y"}
    with pytest.raises(TooLarge):
        await container.get("/tests", most_bytes=1)
    with pytest.raises(FileNotFoundError):
        await container.get("/none", most_bytes=10)
    with pytest.raises(ContainerError, match="could not be removed"):
        await container.remove("/tests")
    engine.files.clear()
    await container.remove("/tests")


async def test_images_are_found_loaded_and_built(
    engine: FakeEngine, containers: EngineContainers, tmp_path: Path
) -> None:
    layout = Blobs([layer(("a", b"x"))]).layout(tmp_path / "layout")
    assert await containers.prepare(ImageSource(f"oci:{layout}")) == "id"
    (tmp_path / "Dockerfile").write_text("FROM tiny\n")
    assert await containers.prepare(ImageSource(build=tmp_path)) == "id"
    paths = engine.paths()
    assert [one for one in paths if one.startswith("POST")] == ["POST /images/load", "POST /build"]


FAULTS = {
    "/images/": (404, "no such image", "image_missing"),
    "/build": (500, "a step failed", "build"),
    "/create": (500, "write /x: no space left on device", "disk_full"),
    "/start": (500, "runc: no", "start"),
}


@pytest.mark.parametrize("part", FAULTS)
async def test_each_refusal_has_its_kind(
    engine: FakeEngine, containers: EngineContainers, part: str, tmp_path: Path
) -> None:
    status, message, kind = FAULTS[part]
    engine.faults = {part: (status, message)}
    source = SETTINGS.image if part != "/build" else ImageSource(build=tmp_path)
    with pytest.raises(ContainerError, match=message) as raised:
        await containers.start(replace(SETTINGS, image=source))
    assert raised.value.kind == kind


def test_a_daemon_that_is_away_is_refused_with_its_socket(tmp_path: Path) -> None:
    with pytest.raises(UnusableTask, match=str(tmp_path / "none")):
        open_containers("docker", socket=tmp_path / "none")
    with pytest.raises(UnusableTask, match="use any, bubblewrap, podman, docker"):
        open_containers("lxc")


async def test_what_only_boxes_have_is_refused_with_the_repair(
    containers: EngineContainers, container: EngineContainer, tmp_path: Path
) -> None:
    with pytest.raises(ContainerError, match=r"unsupported: mounts: .*'bubblewrap'"):
        await containers.start(replace(SETTINGS, mounts={"/opt/harness": tmp_path}))
    with pytest.raises(ContainerError, match=r"unsupported: a socket .*'bubblewrap'"):
        await container.listen(1)
    with pytest.raises(ContainerError, match=r"unsupported: a change of the net.*'bubblewrap'"):
        await container.stop_processes("host")
