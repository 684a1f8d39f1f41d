"""Real containers of bubblewrap: what lives between commands, what ends, and what stays inside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from real_boxes import why_no_boxes
from tiny_images import Blobs, folder_layer, tiny_root

from composer_mesh.mesh.private_folder import entered_folder
from composer_mesh.mesh.programs import PACKAGES
from composer_mesh.plugins.harbor.containers.box_container import BoxContainer
from composer_mesh.plugins.harbor.containers.boxes import BoxContainers
from composer_mesh.plugins.harbor.containers.opening import open_boxes
from composer_mesh.plugins.harbor.containers.port import (
    ContainerError,
    ContainerSettings,
    FinishedCommand,
    ImageSource,
    TooLarge,
)

MIB = 1 << 20
Start = Callable[..., Awaitable[BoxContainer]]


@pytest.fixture(scope="module")
def folder() -> Path:
    """A folder that users of containers may enter."""
    if (missing := why_no_boxes()) is not None:
        pytest.skip(missing)
    return entered_folder()


@pytest.fixture(scope="module")
def image(folder: Path) -> ImageSource:
    """A tiny image with a user, a variable and a working folder."""
    tiny = tiny_root(folder / "tiny")
    config = {"Env": ["OF=image", "TOO=image"], "WorkingDir": "/work"}
    return ImageSource(f"oci:{Blobs([folder_layer(tiny)], config).layout(folder / 'layout')}")


@pytest.fixture(scope="module", params=["overlay", "copy"])
def containers(request: pytest.FixtureRequest, folder: Path) -> Iterator[BoxContainers]:
    """Both kinds of containers."""
    cache = folder / f"cache-{request.param}"
    opened = open_boxes(overlays=request.param == "overlay", cache=cache)
    if request.param == "overlay" and not opened.overlays:
        asyncio.run(opened.close())
        pytest.skip("this kernel or this bubblewrap mounts no overlays for this user")
    yield opened
    asyncio.run(opened.close())


@pytest.fixture
async def start(containers: BoxContainers, image: ImageSource) -> AsyncIterator[Start]:
    """Starts containers, which end with the test."""
    made: list[BoxContainer] = []

    async def started(**more: object) -> BoxContainer:
        snapshot = more.pop("snapshot", None)
        settings = replace(ContainerSettings(image, processes=64), **more)
        made.append(await containers.start(settings, snapshot=snapshot))
        return made[-1]

    yield started
    for one in made:
        await one.close()


async def sh(container: BoxContainer, script: str, **more: object) -> FinishedCommand:
    return await container.run(["sh", "-c", script], **{"timeout_s": 120.0, **more})


async def said(container: BoxContainer, script: str, **more: object) -> str:
    done = await sh(container, script, **more)
    assert done.ended == "exited", done
    return done.output.decode().strip()


async def test_a_command_has_the_image_and_what_it_is_given(start: Start) -> None:
    container = await start(environment={"TOO": "settings"})
    script = "echo $OF $TOO $MORE $HOME; pwd; cat; id -u; echo err >&2; exit 3"
    done = await sh(container, script, stdin=b"in\n", environment={"MORE": "command"})
    assert done.output == b"image settings command /root\n/work\nin\n0\n"
    assert (done.exit_code, done.ended, done.errors) == (3, "exited", b"err\n")
    assert await said(container, "cat /etc/hosts") != ""


async def test_files_and_background_processes_live_on_between_commands(start: Start) -> None:
    container = await start()
    await sh(container, "echo kept > file; (while :; do echo x; sleep 0.01; done) &")
    assert await said(container, "cat file") == "kept"
    assert await said(container, "kill -0 -1 && echo alive") == "alive"
    await container.stop_processes()
    assert await said(container, "kill -0 -1 2>/dev/null || echo none") == "none"
    assert await said(container, "cat file") == "kept"


async def test_no_process_survives_its_end(start: Start) -> None:
    container = await start()
    bomb = "b() { b | b & }; b; trap '' TERM INT HUP; (setsid sh -c 'while :; do :; done' &)"
    await sh(container, f"{bomb}; sleep 0.2", timeout_s=2.0)
    await container.stop_processes()
    assert await said(container, "kill -0 -1 2>/dev/null || echo none") == "none"


async def test_a_command_cannot_end_its_container(start: Start) -> None:
    container = await start()
    await sh(container, "kill -9 -1; kill -9 1; kill -11 1")
    assert await said(container, "echo alive") == "alive"


async def test_each_end_of_a_command_is_named(start: Start) -> None:
    container = await start()
    late = await sh(container, "echo before; sleep 100", timeout_s=1.0)
    assert (late.ended, late.exit_code) == ("wall_time", None)
    assert b"before\n".startswith(late.output), "a busy machine may not have come to it"
    assert (await sh(container, "kill -9 $$")).ended == "signal"
    assert (await container.run(["none"])).exit_code == 127
    assert (await container.run(["/etc/passwd"])).exit_code == 126
    cut = await sh(container, "head -c 100000 /dev/zero", output_bytes=1000)
    assert (len(cut.output), cut.output_cut) == (1000, True)
    refused = await container.run(["id"], user="nobody-here")
    assert (refused.exit_code, b"no user" in refused.errors) == (126, True)
    nowhere = await container.run(["id"], workdir="/none")
    assert (nowhere.exit_code, nowhere.errors) == (126, b"/none: No such file or directory\n")


async def test_memory_is_bounded_for_the_container(start: Start, containers: BoxContainers) -> None:
    container = await start(memory_bytes=32 * MIB)
    hungry = "x=$(head -c 200000000 /dev/zero | cat -v); echo $x"
    done = await sh(container, hungry)
    if containers.groups is None:  # bounded for each process, which sees its allocation fail
        assert done.exit_code not in (0, None)
    else:
        assert done.ended == "memory"
    assert await said(container, "echo alive") == "alive"


async def test_users_are_those_of_the_image(start: Start, containers: BoxContainers) -> None:
    if containers.first_id is None:
        with pytest.raises(ContainerError, match="run as root") as raised:
            await start(user="agent")
        assert raised.value.kind == "unsupported"
        return
    container = await start(user="agent")
    assert await said(container, "id -u; id -g; id -G; echo $HOME") == (
        "1000\n1000\n1000 50\n/home/agent"
    )
    assert await said(container, "id -u; id -G", user="agent:50") == "1000\n50"
    assert await said(container, "id -u", user="4321") == "4321"
    assert (await sh(container, "cat /root/x; echo x > /etc/passwd")).exit_code != 0
    await container.put({"x": b"secret"}, "/root", owner="root")
    await sh(container, "chmod 700 /root", user="root")
    assert await said(container, "cat /root/x 2>/dev/null || echo no") == "no"


async def test_files_go_in_and_out_without_following_links(start: Start) -> None:
    container = await start()
    await sh(container, "mkdir /real; echo own > /real/kept; ln -s /real /tests; ln -s / up")
    await container.put({"a/run.sh": b"#!/bin/sh\necho ran\n"}, "/tests", executable=["a/run.sh"])
    assert await said(container, "/tests/a/run.sh; ls /real") == "ran\nkept"
    await sh(container, "ln -s /etc/passwd /tests/link; cat /dev/null > /tests/empty")
    found = await container.get("/tests", most_bytes=1000)
    assert found == {"a/run.sh": b"#!/bin/sh\necho ran\n", "empty": b""}
    with pytest.raises(FileNotFoundError):
        await container.get("/work/up/etc", most_bytes=1000)
    with pytest.raises(TooLarge):
        await container.get("/bin", most_bytes=1000)
    await container.remove("/tests")
    await container.remove("/work/up/real/kept")
    assert await said(container, "ls /tests 2>/dev/null; cat /real/kept") == "own"
    for path in ("relative", "/a/../b", "/"):
        with pytest.raises(ValueError, match="path"):
            await container.remove(path)
    with pytest.raises(ValueError, match="no path below"):
        await container.put({"../x": b""}, "/tests")


async def test_a_tree_deeper_than_any_path_is_removed(start: Start) -> None:
    container = await start()
    deep = "i=0; while [ $i -lt 500 ]; do mkdir dddddddddd; cd -P dddddddddd; i=$((i+1)); done"
    await sh(container, f"mkdir /deep; cd /deep; {deep}", timeout_s=60.0)
    with pytest.raises(TooLarge):
        await container.get("/deep", most_bytes=1000)
    await container.remove("/deep")
    assert "deep" not in (await said(container, "ls /")).split()


async def test_a_snapshot_starts_others_and_is_its_own(
    start: Start, containers: BoxContainers
) -> None:
    container = await start()
    await sh(container, "echo one > /work/file; rm /etc/group; ln /work/file /work/hard")
    snapshot = await container.snapshot()
    await sh(container, "echo two > /work/file")
    for _ in range(2):
        other = await start(snapshot=snapshot)
        assert await said(other, "cat /work/file /work/hard; ls /etc") == "one\none\nhosts\npasswd"
        await sh(other, "echo three > /work/file; rm /etc/passwd")
    again = await (await start(snapshot=snapshot)).snapshot()
    await snapshot.remove()
    assert await said(await start(snapshot=again), "cat /work/file") == "one"


async def test_a_container_has_no_network_but_its_own(start: Start) -> None:
    own, host = await start(), await start(network="host")
    network = os.readlink("/proc/self/ns/net")  # noqa: PTH115
    links = [await said(one, "ls -l /proc/self/ns/net") for one in (own, host)]
    assert [network in one for one in links] == [False, True]


async def test_nothing_of_the_host_or_of_another_container_is_seen(
    start: Start, folder: Path
) -> None:
    one, other = await start(), await start()
    await sh(one, "echo secret > /work/mine; sleep 100 &")
    seen = await said(
        other, f"ls /work {folder} /oldroot 2>&1; ls -d /proc/[0-9]*; ls -l /proc/1/root 2>&1"
    )
    assert "mine" not in seen
    assert str(folder / "tiny") not in seen
    assert len([line for line in seen.splitlines() if line.startswith("/proc/")]) == 2
    denied = "cat /proc/1/mem; ls /proc/1/fd/; mount -t tmpfs x /tmp; chroot / id"
    assert (await sh(other, denied)).exit_code != 0


async def test_a_killed_container_is_an_infrastructure_error(
    start: Start, containers: BoxContainers
) -> None:
    container = await start()
    running = asyncio.ensure_future(sh(container, "sleep 100", timeout_s=60.0))
    os.kill(first_process(container.own), signal.SIGKILL)
    steps: list[Callable[[], Awaitable[object]]] = [
        lambda: running,
        lambda: container.get("/etc", most_bytes=MIB),
        lambda: sh(container, "echo x"),
    ]
    for step in steps:
        with pytest.raises(ContainerError) as raised:
            await step()
        assert raised.value.kind == "container_died"
        assert raised.value.failure_class == "infrastructure"


def first_process(own: Path) -> int:
    """Return the first process of the container whose layer is a folder."""
    for place in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            named = place.name.isdigit() and (place / "cmdline").read_bytes() == b"/dev/.init\0"
            if named and f"{own}/" in (place / "mountinfo").read_text():
                return int(place.name)
    raise AssertionError(f"no process has its root in {own}")


async def test_a_killed_keeper_takes_its_containers_along_and_is_replaced(
    folder: Path, image: ImageSource
) -> None:
    opened = open_boxes(cache=folder / "cache-killed")
    try:
        container = await opened.start(ContainerSettings(image))
        os.kill(opened.keeper, signal.SIGKILL)
        with pytest.raises(ContainerError) as raised:
            await sh(container, "echo x")
        assert raised.value.kind == "container_died"
        other = await opened.start(ContainerSettings(image))
        assert await said(other, "echo alive") == "alive"
        await container.close()
        await other.close()
    finally:
        await opened.close()
    assert not opened.folder.exists()


WORKER = """
import asyncio, sys
from composer_mesh.plugins.harbor.containers.opening import open_boxes
from composer_mesh.plugins.harbor.containers.port import ContainerSettings, ImageSource

async def main():
    containers = open_boxes(cache=sys.argv[1])
    container = await containers.start(ContainerSettings(ImageSource(sys.argv[2])))
    await container.run(["sh", "-c", "sleep 1000 & echo x > /file"])
    print(containers.keeper, container.own, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_nothing_is_left_of_a_killed_worker(folder: Path, image: ImageSource) -> None:
    command = [sys.executable, "-c", WORKER, str(folder / "cache-worker"), image.reference]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as worker:
        assert worker.stdout is not None
        keeper, own = worker.stdout.readline().decode().split()
        ends = [os.pidfd_open(one) for one in (int(keeper), first_process(Path(own)))]
        worker.kill()
    for end in ends:
        assert select.select([end], [], [], 60.0)[0]
        os.close(end)
    assert not Path(own).parent.exists()


async def test_a_cancelled_command_ends(start: Start) -> None:
    container = await start()
    running = asyncio.ensure_future(sh(container, "echo $$ > pid; sleep 1000"))
    while not await said(container, "cat pid 2>/dev/null"):
        pass
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    while await said(container, "kill -0 $(cat pid) 2>/dev/null && echo alive"):
        pass


async def test_containers_wait_for_a_place(folder: Path, image: ImageSource) -> None:
    opened = open_boxes(cache=folder / "cache-places", most=1)
    try:
        first = await opened.start(ContainerSettings(image))
        second = asyncio.ensure_future(opened.start(ContainerSettings(image)))
        assert not (await asyncio.wait({second}, timeout=0.2))[0]
        await first.close()
        await (await second).close()
    finally:
        await opened.close()


DOCKERFILE = """
ARG VERSION=1
FROM {image}
ARG NAME
ARG NAME=tiny
ENV GREETING="hello world" VERSION=2
WORKDIR app
COPY data/*.txt plain ./
COPY data /copied/
RUN echo "$NAME $GREETING" > built && \\
    mkdir deep
USER agent
CMD ["cat", "built"]
"""


async def test_a_dockerfile_is_built_once(
    containers: BoxContainers, image: ImageSource, tmp_path: Path
) -> None:
    context = tmp_path / "environment"
    (context / "data").mkdir(parents=True)
    (context / "data/a.txt").write_text("a")
    (context / "data/b.md").write_text("b")
    (context / "plain").write_text("#!/bin/sh\necho plain $GREETING\n")
    (context / "plain").chmod(0o755)
    user = "agent" if containers.first_id is not None else "root"
    text = DOCKERFILE.format(image=image.reference).replace("USER agent", f"USER {user}")
    (context / "Dockerfile").write_text(text)
    source = ImageSource(build=context)
    identity = await containers.prepare(source)
    container = await containers.start(ContainerSettings(source))
    script = "pwd; ls; cat built; ./plain; ls /copied; id -un"
    assert await said(container, script) == (
        "/work/app\na.txt\nbuilt\ndeep\nplain\ntiny hello world\nplain hello world\na.txt\nb.md\n"
        f"{user}"
    )
    service = await containers.start_sidecar(ContainerSettings(source), container)
    assert (await service.serve(None, None)).output == b"tiny hello world\n"
    assert (await service.serve(["head", "-c", "4"], ["built"])).output == b"tiny"
    await service.close()
    await container.close()
    named = replace(source, arguments={"NAME": "huge"})
    container = await containers.start(ContainerSettings(named))
    assert await said(container, "cat built") == "huge hello world"
    await container.close()
    assert await containers.prepare(source) == identity
    (context / "data/a.txt").write_text("changed")
    assert await containers.prepare(source) != identity
    (context / "Dockerfile").write_text(f"FROM {image.reference}\nRUN echo why >&2; exit 4\n")
    with pytest.raises(ContainerError, match=r"line 2: RUN: .*exit code 4: why") as raised:
        await containers.prepare(source)
    assert raised.value.kind == "build"


async def test_a_full_disk_is_an_infrastructure_error(
    folder: Path, image: ImageSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_boxes(cache=folder / "cache-full")
    container = await opened.start(ContainerSettings(image))
    found = os.statvfs(container.own)
    free = found.f_bavail * found.f_frsize
    monkeypatch.setattr(
        "composer_mesh.plugins.harbor.containers.box_container.FREE_BYTES", free * 2
    )
    with pytest.raises(ContainerError) as raised:
        await sh(container, "echo x")
    assert raised.value.kind == "disk_full"
    await container.close()
    await opened.close()


async def test_files_that_do_not_fit_say_so(start: Start) -> None:
    container = await start()
    with pytest.raises(ContainerError) as raised:
        await container.put({"big": bytes(80 * MIB)}, "/dev/shm")
    assert raised.value.kind == "disk_full"


async def test_an_entry_point_takes_the_command_of_its_image_and_not_that_of_its_base(
    containers: BoxContainers, image: ImageSource, tmp_path: Path
) -> None:
    for text, output in (
        ('ENTRYPOINT ["cat", "/etc/group"]\nCMD ["/etc/passwd"]', b"root:x:0:"),
        ('CMD ["/etc/group"]\nENTRYPOINT ["cat"]', b"root:x:0:"),
        ("ENTRYPOINT exec id -u", b"0\n"),
        ("CMD id -u", b"0\n"),
    ):
        (tmp_path / "Other").write_text(f"FROM {image.reference}\n{text}\n")
        source = ImageSource(build=tmp_path, dockerfile="Other")
        main = await containers.start(ContainerSettings(source))
        service = await containers.start_sidecar(ContainerSettings(source), main)
        assert (await service.serve(None, None)).output.startswith(output)
        with pytest.raises(ContainerError, match="states a command") as raised:
            await service.serve([], None)
        assert raised.value.kind == "start"
        await service.close()
        await main.close()


async def test_containers_share_one_network_and_nothing_else(
    containers: BoxContainers, start: Start, image: ImageSource
) -> None:
    settings = ContainerSettings(image, processes=64, names=("web", "main"))
    main = await start(names=("web", "main"))
    other = await start()
    web = await containers.start_sidecar(settings, main)
    network, mounts = (f"ls -l /proc/self/ns/{one}" for one in ("net", "mnt"))
    try:

        async def network_of(container: BoxContainer) -> str:
            return (await said(container, network)).split()[-1]

        first = await network_of(main)
        assert await network_of(web) == first != await network_of(other)
        assert (await said(web, mounts)).split()[-1] != (await said(main, mounts)).split()[-1]
        assert "127.0.0.1 web" in await said(main, "cat /etc/hosts")
        await web.put({"secret": b"x"}, "/work")
        assert "secret" not in await said(main, "ls /work /proc/1/root 2>&1")
        await sh(main, "kill -9 -1")
        await main.stop_processes()
        assert await network_of(main) == first
        await web.stop_processes()
        assert await network_of(web) == first
        listening = await web.listen(9000)
        connected = await main.connect(9000)
        accepted, _ = await asyncio.to_thread(listening.accept)
        for one in (listening, connected, accepted):
            one.close()
        with pytest.raises(ConnectionRefusedError):
            await other.connect(9000)
        with pytest.raises(ContainerError, match="shares its network keeps it"):
            await main.stop_processes("host")
        await main.close()
        assert await network_of(web) == first
        with pytest.raises(ContainerError, match="has ended, or has no network") as raised:
            await containers.start_sidecar(settings, main)
        assert raised.value.kind == "start"
    finally:
        await web.close()


async def test_a_network_of_the_host_is_not_shared(
    containers: BoxContainers, start: Start, image: ImageSource
) -> None:
    main = await start(network="host")
    with pytest.raises(ContainerError, match="has no network of its own"):
        await containers.start_sidecar(ContainerSettings(image), main)
    with pytest.raises(ContainerError) as raised:
        await containers.start_sidecar(ContainerSettings(image, network="host"), main)
    assert raised.value.kind == "unsupported"
