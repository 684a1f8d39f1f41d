"""Services of a task: their order, their ends, and which tasks with some cannot be played."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_containers import FakeContainer, FakeContainers, finished
from harbor_folders import SUBMIT, TOML, bash, made, played, written

from composer_mesh.mesh.failures import FailureClass, classify
from composer_mesh.plugins.harbor.containers.port import ContainerError, FinishedCommand
from composer_mesh.plugins.harbor.services import TaskFailure
from composer_mesh.tasks.errors import UnusableTask

COMPOSE = """services:
  main:
    environment: {OF: compose, TOO: compose}
    depends_on: {web: {condition: service_healthy}}
  web:
    image: web:1
    command: serve
    depends_on: {store: {condition: service_healthy}}
    healthcheck: {test: print web, interval: 1ms}
  store:
    image: store:1
    environment: {OF: store}
    healthcheck: {test: print store, interval: 1ms}
"""
FILES = {
    "environment/docker-compose.yaml": COMPOSE,
    "task.toml": TOML + "[environment.env]\nTOO = 'toml'\n",
}
RIGHT = [bash("write word.txt hello"), SUBMIT]
URL = '[[environment.mcp_servers]]\nname = "s"\ntransport = "{}"\nurl = "{}"\n'
STEPS = "".join(f'[[steps]]\nname = "{one}"\n' for one in ("one", "two"))


async def test_services_start_in_order_and_end_with_the_episode(tmp_path: Path) -> None:
    order: list[str] = []

    def note(container: FakeContainer, point: str) -> None:
        order.append(f"{container.settings.image} {point}")

    containers = FakeContainers(note)
    outcome, _ = await played(made(written(tmp_path / "task", FILES), containers), RIGHT)
    await containers.close()
    assert outcome.reward == 1.0
    assert order[:7] == [
        "python:3.11-slim start",
        "store:1 start service",
        *("store:1 serve", "store:1 run"),
        "web:1 start service",
        *("web:1 serve", "web:1 run"),
    ]
    main, (store, web) = containers.made[0], containers.sidecars
    assert main.settings.environment == {"OF": "compose", "TOO": "toml"}
    assert store.settings.environment == {"OF": "store"}
    assert web.words == (None, ("serve",))
    assert {one.settings.names for one in (main, store, web)} == {("store", "web", "main")}
    limits = {(one.settings.memory_bytes, one.settings.processes) for one in (main, store, web)}
    assert len(limits) == 1


@pytest.mark.parametrize(
    ("at", "ended", "said"),
    [
        ("web:1 serve", finished(3, "no port"), "'web' ended: exit code 3: no port"),
        ("store:1 serve", finished(None, ended="memory"), "'store' ended: memory"),
        ("store:1 run", finished(1, "not yet"), "'store': 'print store' failed: exit code 1"),
        ("web:1 run", finished(1, "not yet"), "'web': 'print web' failed: exit code 1: not yet"),
    ],
)
async def test_a_service_that_fails_before_the_agent_acts_is_no_reward(
    tmp_path: Path, at: str, ended: FinishedCommand, said: str
) -> None:
    def fault(container: FakeContainer, point: str) -> FinishedCommand | None:
        return ended if f"{container.settings.image} {point}" == at else None

    containers = FakeContainers(fault)
    task = made(written(tmp_path / "task", FILES), containers)
    with pytest.raises(TaskFailure) as failed:
        await played(task, RIGHT)
    assert (failed.value.kind, said in failed.value.detail) == ("service", True)
    assert classify(failed.value) is FailureClass.INFRASTRUCTURE
    await containers.close()


async def test_a_service_that_cannot_be_started_leaves_no_container(tmp_path: Path) -> None:
    def fault(container: FakeContainer, point: str) -> None:
        if point == "start service" and str(container.settings.image) == "web:1":
            raise ContainerError("image_missing", "no such image")

    containers = FakeContainers(fault)
    with pytest.raises(ContainerError, match="no such image"):
        await played(made(written(tmp_path / "task", FILES), containers), RIGHT)
    assert len(containers.sidecars) == 1
    await containers.close()


async def test_tests_on_a_fresh_machine_have_services_of_their_own(tmp_path: Path) -> None:
    files = {**FILES, "tests/test.sh": "#!/bin/sh\nprint nothing\n"}
    containers = FakeContainers()
    task = made(written(tmp_path / "task", files), containers)
    with pytest.raises(Exception, match="give no reward on any machine"):
        await played(task, RIGHT)
    assert (len(containers.made), len(containers.sidecars)) == (2, 4)
    await containers.close()


async def test_a_step_after_one_whose_tests_broke_has_services_again(tmp_path: Path) -> None:
    def fault(container: FakeContainer, point: str) -> FinishedCommand | None:
        return finished() if point == "test" and container is containers.made[0] else None

    steps = {f"steps/{one}/instruction.md": f"Step {one}." for one in ("one", "two")}
    files = {**FILES, **steps, "task.toml": TOML + STEPS}
    containers = FakeContainers(fault)
    actions = [RIGHT[0], SUBMIT, bash("print here"), SUBMIT]
    outcome, shown = await played(made(written(tmp_path / "task", files), containers), actions)
    await containers.close()
    assert "here" in str(shown[-2].messages)
    assert outcome.reward == 0.5  # the first step has none: the agent's machine was the cause
    assert len(containers.made) == 3
    assert [str(one.settings.image) for one in containers.sidecars] == ["store:1", "web:1"] * 3


async def test_a_separate_verifier_has_the_image_of_main_and_no_services(tmp_path: Path) -> None:
    compose = COMPOSE.replace("  main:\n", "  main:\n    image: main:1\n")
    toml = 'artifacts = ["/app"]\n' + TOML + '[verifier]\nenvironment_mode = "separate"\n'
    files = {"environment/docker-compose.yaml": compose, "task.toml": toml}
    containers = FakeContainers()
    outcome, _ = await played(made(written(tmp_path / "task", files), containers), RIGHT)
    assert outcome.reward == 1.0
    agent, verifier = containers.made
    assert {str(agent.settings.image), str(verifier.settings.image)} == {"main:1"}
    assert (agent.settings.names != (), verifier.settings.names) == (True, ())
    assert len(containers.sidecars) == 2
    await containers.close()


@pytest.mark.parametrize(
    ("compose", "toml", "network", "said"),
    [
        (COMPOSE, TOML, "task", "docker-compose.yaml and a public network"),
        (COMPOSE, TOML + 'network_mode = "no-network"\n', "task", ""),
        (
            COMPOSE,
            TOML + '[verifier]\nenvironment_mode = "separate"\n' + STEPS,
            "none",
            "steps and a separate verifier",
        ),
        (COMPOSE, TOML + URL.format("http", "http://web:8000/mcp"), "none", ""),
        (COMPOSE, TOML + URL.format("sse", "http://other/"), "none", "no service of .*main"),
        ("", TOML + URL.format("sse", "http://localhost:1/"), "none", ""),
        ("", TOML + URL.format("sse", "https://mcp.org/"), "none", "needs a public network"),
        ("", TOML + URL.format("sse", "https://mcp.org/"), "task", ""),
    ],
)
def test_what_services_and_servers_need_of_the_network_is_refused_by_name(
    tmp_path: Path, compose: str, toml: str, network: str, said: str
) -> None:
    files = {"environment/docker-compose.yaml": compose, "task.toml": toml}
    if STEPS in toml:
        files |= {f"steps/{one}/instruction.md": one for one in ("one", "two")}
    written(tmp_path / "task", files)
    if said:
        with pytest.raises(UnusableTask, match=said):
            made(tmp_path / "task", network=network)
    else:
        assert made(tmp_path / "task", network=network).folders


@pytest.mark.parametrize(
    "files",
    [
        {"environment/docker-compose.yaml": COMPOSE},
        {"task.toml": TOML + URL.format("sse", "http://localhost:1/")},
    ],
)
async def test_podman_and_docker_are_refused_by_name(tmp_path: Path, files: dict[str, str]) -> None:
    task = made(written(tmp_path / "task", files))
    with pytest.raises(UnusableTask, match="set backend to 'bubblewrap'"):
        await task.check_sandbox(FakeContainers(own_loopback=False))  # type: ignore[arg-type]


def test_headers_take_only_named_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = TOML + URL.format("http", "http://localhost:1/") + "headers = {X-Key = 'a ${KEY}'}\n"
    written(tmp_path / "task", {"task.toml": toml})
    with pytest.raises(UnusableTask, match=r"headers of 's' takes .\{KEY\} of this"):
        made(tmp_path / "task")
    monkeypatch.setenv("KEY", "secret")
    task = made(tmp_path / "task", variables=["KEY"])
    (folder,) = task.folders
    (server,) = folder.mcp_servers(task.limits.variables)
    assert server.headers == {"X-Key": "a secret"}


def test_check_lists_services_and_ignored_keys(tmp_path: Path) -> None:
    text = COMPOSE.replace("image: web:1", "image: web:1\n    restart: always")
    remarks = made(written(tmp_path / "task", {"environment/docker-compose.yaml": text})).remarks()
    assert any("1 tasks have services, such as 'task'" in one for one in remarks)
    assert any("that need nothing are ignored: task: services.web.restart" in o for o in remarks)
