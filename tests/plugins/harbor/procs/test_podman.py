"""A real Podman, where one is installed and this kernel lets it run containers."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tiny_images import Blobs, folder_layer, tiny_root

from composer_mesh.plugins.harbor.containers.engines import EngineContainer, EngineContainers
from composer_mesh.plugins.harbor.containers.port import (
    ContainerError,
    ContainerSettings,
    ImageSource,
)

POLICY = '{"default": [{"type": "insecureAcceptAnything"}]}'
CONF = """
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[engine.runtimes]
runc = ["{runc}"]
"""
WAIT_S = 20.0


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    """The socket of a service of its own, whose images and containers are in a new folder."""
    podman, runc = shutil.which("podman"), shutil.which("runc")
    if podman is None or runc is None:
        pytest.skip("podman and runc are not installed: apt-get install podman runc")
    folder = Path(tempfile.mkdtemp(prefix="podman-"))  # its paths may have 50 characters
    (folder / ".config/containers").mkdir(parents=True)
    (folder / ".config/containers/policy.json").write_text(POLICY)
    (folder / "containers.conf").write_text(CONF.format(runc=runc))
    environment = {
        **os.environ,
        "HOME": str(folder),
        "CONTAINERS_CONF": str(folder / "containers.conf"),
    }
    places = ["--root", f"{folder}/storage", "--runroot", f"{folder}/run", "--storage-driver=vfs"]
    service = ["system", "service", "--time", "0", f"unix://{folder}/socket"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [podman, *places, *service], env=environment, stdout=log, stderr=log
        )
    try:
        found = asyncio.run(_answers(folder / "socket", process))
        if found is not None:
            said = (folder / "log").read_text(errors="replace")[-500:]
            pytest.skip(f"podman's service does not run here: {found}: {said}")
        yield folder / "socket"
    finally:
        process.kill()
        process.wait()
        subprocess.run([podman, *places, "rm", "-fa"], env=environment, check=False)
        shutil.rmtree(folder)


async def _answers(socket: Path, process: subprocess.Popen[bytes]) -> str | None:
    """Wait until a service answers; return why it never does, or None."""
    until = asyncio.get_running_loop().time() + WAIT_S
    why = "it did not start"
    while process.poll() is None and asyncio.get_running_loop().time() < until:
        if await asyncio.to_thread(socket.is_socket):
            containers = EngineContainers("podman", socket=socket)
            try:
                await containers.check()
            except ContainerError as error:
                why = str(error)
            else:
                return None
            finally:
                await containers.close()
    return why


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> ImageSource:
    folder = tmp_path_factory.mktemp("image")
    blobs = Blobs([folder_layer(tiny_root(folder / "root"))], {"Env": ["OF=image"]})
    return ImageSource(f"oci:{blobs.layout(folder / 'layout', 'localhost/tiny:v1')}")


@pytest.fixture
async def container(socket: Path, image: ImageSource) -> AsyncIterator[EngineContainer]:
    containers = EngineContainers("podman", socket=socket)
    try:
        made = await containers.start(ContainerSettings(image, processes=64))
    except ContainerError as error:
        await containers.close()
        if error.kind == "start":
            pytest.skip(f"podman runs no container here: {error}")
        raise
    yield made
    await made.close()
    await containers.close()


async def test_a_real_podman_behaves_as_the_port_says(container: EngineContainer) -> None:
    done = await container.run(["sh", "-c", "echo $OF; cat; exit 3"], stdin=b"in\n")
    assert (done.output, done.exit_code, done.ended) == (b"image\nin\n", 3, "exited")
    await container.put({"a/run.sh": b"#!/bin/sh\necho ran\n"}, "/tests", executable=["a/run.sh"])
    await container.run(["sh", "-c", "(sleep 1000 &); ln -s /etc/passwd /tests/link"])
    assert (await container.run(["/tests/a/run.sh"])).output == b"ran\n"
    assert list(await container.get("/tests", most_bytes=1000)) == ["a/run.sh"]
    late = await container.run(["sleep", "100"], timeout_s=1.0)
    assert late.ended == "wall_time"
    processes = await container.run(["sh", "-c", "echo /proc/[0-9]*"])
    assert len(processes.output.split()) <= 3, "what ran in the background has ended"
    snapshot = await container.snapshot()
    await container.remove("/tests")
    with pytest.raises(FileNotFoundError):
        await container.get("/tests", most_bytes=1000)
    await snapshot.remove()


async def test_a_real_podman_lists_the_files_that_were_changed(container: EngineContainer) -> None:
    before = await container.changes()
    done = await container.run(
        [
            "sh",
            "-c",
            "mkdir -p /new/empty /w; echo x > /w/added; echo x >> /etc/passwd; rm /bin/cat",
        ]
    )
    assert done.exit_code == 0, done.output
    found = {path: how for path, how in (await container.changes()).items() if path not in before}
    assert found == {"/w/added": "added", "/etc/passwd": "changed", "/bin/cat": "removed"}
