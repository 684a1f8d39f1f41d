"""Services of a Compose file in real boxes, and MCP servers that the agent reaches by a URL."""

from __future__ import annotations

import secrets
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_harness
from agent_templates import FAMILIES
from chat_templates import with_template
from fake_outside import FakeOutside
from harbor_folders import SUBMIT, bash, session_of, written
from harness_episodes import harness_trace
from python_image import python_root
from scripted_generation import ScriptedGeneration
from service_tasks import COMPOSE, TESTS, TOML, service_task

from composer_mesh.mesh.private_folder import entered_folder
from composer_mesh.plugins.harbor.harness import PROGRAM
from composer_mesh.plugins.harbor.services import TaskFailure
from composer_mesh.plugins.harbor.task import HarborTask
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import TaskSettings

CALL = call_text("call_mcp_tool", {"server": "words", "tool": "next_word", "arguments": {}})
GOLD = [CALL, CALL, bash("echo lantern harbor > words.txt"), SUBMIT]


@pytest.fixture(scope="module")
def folder() -> Path:
    """A folder that users of containers may enter, with an image."""
    folder = entered_folder()
    python_root(folder / "root")
    return folder


class World:
    """Tasks with services, and their containers."""

    def __init__(self, folder: Path, containers: Any) -> None:
        self.folder, self.containers = folder, containers

    async def task(
        self,
        compose: str,
        transport: str = "http",
        files: dict[str, str] | None = None,
        **options: Any,
    ) -> HarborTask:
        """Return such a task."""
        root = self.folder / "root"
        given = {"environment/docker-compose.yaml": compose, **(files or {})}
        place = self.folder / f"task-{secrets.token_hex(6)}"
        written(place, {**service_task(root, transport), **given})
        task = HarborTask.create(TaskSettings(path=place, max_turns=30), **options)
        task.sandbox = self.containers
        await task.check_sandbox(self.containers)
        return task

    async def begun(
        self, compose: str, transport: str = "http", files: dict[str, str] | None = None
    ) -> tuple[RunningEpisode, str]:
        """Begin an episode of such a task; return it and its first message."""
        task = await self.task(compose, transport, files)
        running = RunningEpisode(task, task.episode("train", 0))
        try:
            return running, str((await running.begin())[0]["content"])
        except BaseException:
            await running.close()
            raise

    async def played(self, actions: list[str], *task: Any) -> tuple[float, list[str]]:
        """Play actions; return the reward, and what was shown."""
        running, first = await self.begun(*task)
        shown = [first]
        try:
            for action in actions:
                step = await running.step(action)
                shown += [str(one["content"]) for one in step.messages]
            return (await running.outcome()).reward, shown
        finally:
            await running.close()


@pytest.fixture
def world(folder: Path, containers: Any) -> World:
    return World(folder, containers)


@pytest.mark.parametrize(
    ("transport", "answers"), [("http", "json"), ("streamable-http", "events"), ("sse", "json")]
)
async def test_the_oracle_succeeds_by_a_server_of_a_service_and_an_empty_answer_does_not(
    world: World, transport: str, answers: str
) -> None:
    reward, shown = await world.played(GOLD, COMPOSE % answers, transport)
    assert (reward, shown[1:3]) == (1.0, ["lantern", "harbor"])
    assert 'server words: {"name": "next_word"' in shown[0]
    assert (await world.played(["done"], COMPOSE % answers, transport))[0] == 0.0


async def test_an_agent_reaches_a_service_by_its_name_and_nothing_else_of_it(world: World) -> None:
    get = "python3 -c \"import urllib.request as u; u.urlopen('http://mcp-server:8000/sse')\""
    commands = [
        f"{get} && echo reached",
        "cat /srv/server.py /srv/port.txt",
        "ls /proc | grep -c '^[0-9]'",
        "kill -9 -1; for pid in $(seq 2 40); do kill -9 $pid; done; echo done",
        f"{get} && echo reached",
    ]
    _, shown = await world.played([bash(one) for one in commands], COMPOSE % "json")
    assert "reached" in shown[1]
    assert "No such file" in shown[2]
    assert int(shown[3].split()[0]) < 8  # its own commands, and no server
    assert "reached" in shown[5]


async def test_a_service_keeps_its_state_and_its_network_when_main_is_restarted(
    world: World,
) -> None:
    steps = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    toml = TOML.format(root=world.folder / "root", transport="http", path="mcp") + steps
    files = {"task.toml": toml, "instruction.md": "", "tests/test.sh": TESTS}
    files |= {f"steps/{one}/instruction.md": f"Step {one}." for one in ("one", "two")}
    write = bash("echo lantern harbor > words.txt")
    actions = [CALL, write, SUBMIT, CALL, SUBMIT]
    reward, shown = await world.played(actions, COMPOSE % "json", "http", files)
    assert shown[1] == "lantern"
    assert shown[3:5] == ["Step two.", "harbor"]  # the second word: it is the same server
    assert reward == 1.0


async def test_a_service_that_ends_or_is_never_healthy_is_no_reward(world: World) -> None:
    ends = (COMPOSE % "json") + '    command: ["sh", "-c", "echo no words >&2; exit 3"]\n'
    with pytest.raises(TaskFailure, match="service: 'mcp-server' ended: exit code 3: no words"):
        await world.begun(ends)
    sick = (COMPOSE % "json").replace("retries: 600", "retries: 2").replace("8000))", "9))")
    with pytest.raises(TaskFailure, match=r"(?s)service: 'mcp-server': .*Connection refused"):
        await world.begun(sick)


async def test_a_service_that_ends_later_is_what_the_agent_finds(world: World) -> None:
    running, _ = await world.begun(COMPOSE % "json")
    try:
        services = session_of(running).machine.services
        await services._containers["mcp-server"].stop_processes()
        step = await running.step(CALL)
        assert "the server gave no answer" in str(step.messages[0]["content"])
        assert (await running.outcome()).reward == 0.0
    finally:
        await running.close()


OWN = """[environment]
workdir = "/app"
[environment.env]
WORDS = "lantern harbor"
[environment.healthcheck]
command = "(python3 /srv/server.py > /dev/null 2>&1 &)"
[[environment.mcp_servers]]
name = "words"
transport = "http"
url = "http://localhost:8000/mcp"
"""


async def test_a_server_that_the_task_starts_in_its_own_container_is_waited_for(
    world: World,
) -> None:
    files = service_task(world.folder / "root")
    files = {
        "task.toml": OWN,
        "environment/Dockerfile": files["environment/mcp-server/Dockerfile"],
        "environment/server.py": files["environment/mcp-server/server.py"],
        "environment/docker-compose.yaml": "",
    }
    reward, shown = await world.played(GOLD, "", "http", files)
    assert (reward, shown[1:3]) == (1.0, ["lantern", "harbor"])


LISTED = """[environment]
workdir = "/app"
docker_image = "rootfs:{root}"
network_mode = "allowlist"
allowed_hosts = ["good.org"]
"""
FETCH = "import urllib.request as u; print(u.urlopen('http://good.org/').read().decode())"


async def test_a_harness_reaches_its_endpoint_its_proxy_and_the_server_of_a_service(
    world: World, tokenizer: Any
) -> None:
    chat = ChatFormat(with_template(tokenizer, FAMILIES["qwen"]), [])
    answers = [
        *(call_text("mcp__words__next_word", {}), call_text("mcp__words__next_word", {})),
        *(bash(f'python3 -c "{FETCH}"'), bash("echo lantern harbor > words.txt"), "done"),
    ]
    generation, outside = ScriptedGeneration(chat, *answers), FakeOutside()
    toml = TOML.format(root=world.folder / "root", transport="http", path="mcp")
    toml = LISTED.format(root=world.folder / "root") + toml[toml.index("[[") :]
    task = await world.task(COMPOSE % "json", files={"task.toml": toml}, network="task")
    task.limits = replace(task.limits, outside=outside.as_outside)
    (world.folder / "program").mkdir(exist_ok=True)
    shutil.copy(small_harness.__file__, world.folder / "program")
    command = ["python3", f"{PROGRAM}/small_harness.py", "1", "9", "0"]
    program = str(world.folder / "program")
    async with outside.serving():
        trace = await harness_trace(task, generation, chat, command=command, program=program)
    results = [str(one["content"]).strip() for one in trace.messages if one["role"] == "tool"]
    assert results[:3] == ["lantern", "harbor", "from outside"]
    assert trace.reward == 1.0
