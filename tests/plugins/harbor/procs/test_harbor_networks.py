"""Networks of phases in real boxes: a proxy while a phase lasts, and nothing before or after it.

The outside is one of the tests, so no test reaches the Internet.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_outside import PUBLIC, FakeOutside
from harbor_folders import bash, written
from python_image import python_root

from composer_mesh.mesh.private_folder import entered_folder
from composer_mesh.plugins.harbor.task import HarborTask
from composer_mesh.rollouts.tasks import Outcome
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import TaskSettings

GET = """#!/usr/bin/python3
import socket, sys, urllib.request
try:
    if "//" in sys.argv[1]:
        print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())
    else:
        socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20).close()
        print("connected")
except OSError as error:
    print(error)
"""
TOML = """[agent]
{agent}
[verifier]
{verifier}
[environment]
workdir = "/app"
docker_image = "rootfs:{root}"
{environment}
"""
LISTED = 'network_mode = "allowlist"\nallowed_hosts = ["good.org"]'
NONE = 'network_mode = "no-network"'
PROXY = "3128"
TESTS = "#!/bin/sh\n{}\necho ${{reward:-0}} > /logs/verifier/reward.txt\n"
GOT = '[ "$(get http://good.org/)" = "from outside" ] && reward=1'
LOST = '[ "$(get http://good.org/)" = "from outside" ] || reward=1'


@pytest.fixture(scope="module")
def folder() -> Path:
    """A folder that users of containers may enter, with an image."""
    folder = entered_folder()
    root = python_root(folder / "root")
    (root / "usr/bin/get").write_text(GET)
    (root / "usr/bin/get").chmod(0o755)
    return folder


class World:
    """One task with networks, its containers and what is outside of them."""

    def __init__(self, folder: Path, containers: Any) -> None:
        self.folder, self.containers = folder, containers
        self.outside = FakeOutside()

    async def played(
        self, tests: str, *commands: str, files: dict[str, str] | None = None, **networks: str
    ) -> tuple[Outcome, list[str]]:
        """Play commands on a task with such tests; return the outcome and what was shown."""
        tables = {"agent": "", "verifier": "", "environment": NONE, **networks}
        toml = TOML.format(root=self.folder / "root", **tables)
        place = self.folder / f"task-{secrets.token_hex(6)}"
        script = TESTS.format(tests)
        written(place, {"task.toml": toml, "tests/test.sh": script, **(files or {})})
        task = HarborTask.create(TaskSettings(path=place, max_turns=30), network="task")
        task.sandbox = self.containers
        await task.check_sandbox(self.containers)
        task.limits = replace(task.limits, outside=self.outside.as_outside)
        running = RunningEpisode(task, task.episode("train", 0))
        shown: list[str] = []
        try:
            async with self.outside.serving():
                await running.begin()
                for command in commands:
                    step = await running.step(bash(command) if command else "done")
                    shown += [str(one["content"]) for one in step.messages]
                return await running.outcome(), shown
        finally:
            await running.close()


@pytest.fixture
def world(folder: Path, containers: Any) -> World:
    return World(folder, containers)


async def test_an_agent_with_a_list_reaches_its_hosts_and_nothing_else(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        outcome, shown = await world.played(
            LOST,
            *("get http://good.org/", "get http://evil.org/", f"get {port}", "env", ""),
            agent=LISTED,
        )
    assert shown[0].startswith("from outside\n")
    assert "403" in shown[1]
    assert "refused" in shown[2]
    assert "HTTPS_PROXY=http://127.0.0.1:3128" in shown[3]
    assert world.outside.reached == [(PUBLIC, 80)]
    assert outcome.reward == 1.0  # the tests have no network


async def test_tests_have_the_network_that_the_agent_has_not(world: World) -> None:
    outcome, shown = await world.played(
        GOT, "get http://good.org/", f"get {PROXY}", "env", "", verifier=LISTED
    )
    assert "from outside" not in shown[0]
    assert "refused" in shown[1]
    assert "PROXY" not in shown[2]
    assert outcome.reward == 1.0
    assert world.outside.reached == [(PUBLIC, 80)]


async def test_what_outlives_its_phase_reaches_nothing(world: World) -> None:
    poll = "while :; do get http://good.org/ >> /app/found; done"
    hold = (
        "import socket, time; s = socket.create_connection(('127.0.0.1', 3128)); "
        "s.sendall(b'CONNECT good.org:443 HTTP/1.1\\r\\nHost: good.org\\r\\n\\r\\n'); s.recv(99)\n"
        "open('/app/held', 'w').close()\n"
        "while 1: s.sendall(b'x'); time.sleep(0.01)"
    )
    outcome, _ = await world.played(
        f"{LOST}; rm -f /app/found; sleep 1; [ -e /app/found ] && reward=0",
        f"(setsid sh -c '{poll}') > /dev/null 2>&1 & (setsid python3 -c \"{hold}\" &); "
        "until grep -qs outside /app/found && [ -e /app/held ]; do sleep 0.1; done",
        "",
        agent=LISTED,
        verifier=NONE,
    )
    assert outcome.reward == 1.0
    assert world.outside.ended.is_set()


async def test_public_tests_have_this_machines_network_and_the_agent_has_none(
    world: World,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        there = f'[ "$(get {port})" = connected ] && [ -s /etc/resolv.conf ] && reward=1'
        plant = "echo nameserver 192.0.2.1 > /etc/resolv.conf"
        outcome, shown = await world.played(
            f"{there}; grep -q 192.0.2.1 /etc/resolv.conf && reward=0",
            *(f"get {port}", plant, ""),
            agent=NONE,
            environment='network_mode = "public"',
        )
    assert "refused" in shown[0]
    assert outcome.reward == 1.0


STEPS = f"""
[[steps]]
name = "closed"
[steps.agent]
{NONE}
[[steps]]
name = "open"
[steps.agent]
{LISTED}
[steps.verifier]
{NONE}
[[steps]]
name = "public"
[steps.agent]
network_mode = "public"
"""


async def test_each_step_has_its_own_network(world: World) -> None:
    texts = {f"steps/{name}/instruction.md": name for name in ("closed", "open", "public")}
    with socket.create_server(("127.0.0.1", 0)) as other:
        here = f"get {other.getsockname()[1]}"
        outcome, shown = await world.played(
            "reward=1",
            *("get http://good.org/", "", "get http://good.org/", here, "", here, ""),
            files=texts,
            verifier=LISTED,
            environment=f"{NONE}\n{STEPS}",
        )
    found = [("from outside" in one, "connected" in one) for one in shown]
    assert found[0] == found[3] == (False, False)
    assert (found[2], found[5]) == ((True, False), (False, True))
    assert outcome.reward == 1.0
    assert world.outside.reached == [(PUBLIC, 80)]


async def test_a_separate_verifier_has_its_own_list(world: World) -> None:
    separate = f'environment_mode = "separate"\n{LISTED}'
    outcome, shown = await world.played(GOT, "get http://good.org/", "", verifier=separate)
    assert "from outside" not in shown[0]
    assert outcome.reward == 1.0
