"""Environments of verifiers as a workflow, against a driver that speaks its protocol.

The address that they ask: who is let through, and what is passed on. Also docs/verifiers.md.
"""

import asyncio
import inspect
import pickle
import shlex
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import fake_verifiers_driver
import httpx
import pytest
from agent_clients import OpenedAgent, opened_agent
from guides import Guide
from scripted_generation import a_sample
from workflow_ports import Ports, sample

from composer_mesh.actors.rollout_workers.workflows import WorkflowPlayer
from composer_mesh.configs.load import read_table
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.environment import IMPORT_PATHS
from composer_mesh.mesh.failures import FailureClass, classify
from composer_mesh.plugins.frameworks.verifiers.driver import Driver
from composer_mesh.plugins.frameworks.verifiers.driver_process import (
    INFRASTRUCTURE,
    DriverError,
    EpisodeFailed,
    EpisodeLost,
    environ,
    failure,
)
from composer_mesh.plugins.frameworks.verifiers.forwarder import Forwarder
from composer_mesh.plugins.frameworks.verifiers.workflow import VerifiersEnvironment, VerifiersTask
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.traces import Trace
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.task import TaskSettings
from composer_mesh.tasks.toolbox import ToolboxTask

Making = Callable[..., VerifiersEnvironment]


@pytest.fixture
def made(tmp_path: Path) -> Making:
    """Makes an environment whose interpreter plays what `env` says."""
    python = tmp_path / "python"
    command = shlex.join([sys.executable, str(fake_verifiers_driver.__file__)])
    python.write_text(f"#!/bin/sh\nexec {command}\n")
    python.chmod(0o755)

    def make(start_s: float = 300.0, **env: Any) -> VerifiersEnvironment:
        return VerifiersEnvironment(env, python=str(python), start_s=start_s)

    return make


class NumberedToolbox(ToolboxTask):
    """Its rows have the number of a task of verifiers too."""

    def generate(self, rng: Any) -> Any:
        return {**super().generate(rng), "task": 3}


@pytest.fixture
def ports(tokenizer: Any) -> Ports:
    task = NumberedToolbox.create(TaskSettings(seed=3))
    return Ports(task, ChatFormat(tokenizer, task.tools), lambda number: f"word{number}")


async def played(ports: Ports, workflow: VerifiersEnvironment, number: int = 0) -> Trace:
    player = WorkflowPlayer(workflow, ports, ports, ports.chat, 60.0)
    try:
        return (await player.play(sample(ports.task, number), "train-000000-000")).trace
    finally:
        await player.close()


async def test_what_its_requests_sampled_is_trained_with_its_rewards(
    ports: Ports, made: Making
) -> None:
    rewards = {"reward": 2.5, "rewards": {"right": 1.0, "spoke": 1.0}, "metrics": {"n": 7.0}}
    trace = await played(ports, made(traces=[{"turns": 2, **rewards}]))
    assert (trace.reward, trace.success, trace.role) == (2.5, True, "")
    assert trace.rewards == {"right": 1.0, "spoke": 1.0, "metric/n": 7.0}
    assert len(trace.turns) == len(ports.requests) == 2
    assert [turn.context_ids for turn in trace.turns] == [[5], [6]]
    whole = [*ports.requests[1].prompt_ids, *trace.turns[1].action_ids]
    assert [i for turn in trace.turns for i in (*turn.context_ids, *turn.action_ids)] == whole


async def test_each_agent_has_its_own_reward_and_role_and_those_that_are_not_trained_have_none(
    ports: Ports, made: Making
) -> None:
    solver = {"agent": "solver", "reward": 1.0}
    critic = {"agent": "critic", "reward": -0.5}
    judge = {"agent": "judge", "reward": 0.0, "trainable": False}
    lost = {"agent": "critic", "reward": 0.0, "ok": False}
    trace = await played(ports, made(traces=[judge, solver, critic, lost]))
    assert len(ports.requests) == 4
    found = [(one.role, one.reward, len(one.turns)) for one in trace.trajectories()]
    assert found == [("solver", 1.0, 1), ("critic", -0.5, 1)]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (("SandboxError", None), EpisodeLost),
        (("ProviderError", 503), EpisodeLost),
        (("ProviderError", 429), EpisodeLost),
        (("ProviderError", 400), EpisodeFailed),
        (("TunnelError", None), EpisodeLost),
        (("ToolsetError", None), EpisodeLost),
        (("TaskError", None), EpisodeFailed),
        (("HarnessError", None), EpisodeFailed),
        (("TimeoutError", None), EpisodeFailed),
    ],
)
def test_an_error_has_the_class_that_verifiers_gave_it(
    error: tuple[str, int | None], kind: type[Exception]
) -> None:
    found = failure([DriverError(type=error[0], message="it broke", status_code=error[1])])
    assert type(found) is kind
    expected = FailureClass.INFRASTRUCTURE if kind is EpisodeLost else FailureClass.DATA
    assert classify(found) is expected
    assert repr(pickle.loads(pickle.dumps(found))) == repr(found)


async def test_an_episode_that_failed_has_no_reward_but_the_class_of_its_error(
    ports: Ports, made: Making
) -> None:
    told = {"type": "SandboxError", "message": "it broke", "status_code": None}
    with pytest.raises(EpisodeLost, match="SandboxError: it broke"):
        await played(ports, made(complete=False, errors=[told]))
    with pytest.raises(EpisodeFailed, match="KeyError: it broke"):
        await played(ports, made(error={**told, "type": "KeyError"}))


def test_one_error_of_infrastructure_makes_an_episode_that() -> None:
    task = DriverError(type="TaskError", message="a")
    box = DriverError(type="SandboxError", message="b")
    assert isinstance(failure([box, task]), EpisodeLost)
    assert isinstance(failure([task]), EpisodeFailed)
    assert isinstance(failure([]), EpisodeFailed)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"traces": [{"rewards": {"right": None}}]}, "rewards right of agent agent were not"),
        ({"traces": [{"turns": 0}]}, "requested nothing of the endpoint"),
        ({"traces": [{"trainable": False}]}, "without a run of an agent that is trained"),
        ({"traces": []}, "without a run"),
    ],
)
async def test_an_episode_without_a_reward_or_a_sample_fails(
    ports: Ports, made: Making, plan: dict[str, Any], said: str
) -> None:
    with pytest.raises(EpisodeFailed, match=said):
        await played(ports, made(**plan))


async def test_a_driver_that_dies_loses_its_episodes_and_another_one_takes_its_place(
    ports: Ports, made: Making
) -> None:
    workflow = made(dies=True)
    for _ in range(2):
        with pytest.raises(EpisodeLost, match="has ended with status 9: no memory left"):
            await played(ports, workflow)


async def test_an_episode_that_is_cancelled_is_cancelled_there(
    ports: Ports, made: Making, capfd: pytest.CaptureFixture[str]
) -> None:
    workflow = made(waits=True)
    playing = asyncio.create_task(played(ports, workflow))

    async def heard(words: str) -> None:
        text = ""
        while words not in text:
            text += capfd.readouterr().err
            await asyncio.sleep(0.01)

    await heard("base_url")
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await heard('"cancel": true')


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"unusable": "ModuleNotFoundError: taskset \'x\' not found"}', "taskset 'x' not found"),
        ("no json", "it said 'no json.*', which is not an answer"),
        ("[1]", "which is not an answer"),
    ],
)
def test_a_driver_that_cannot_play_is_refused_before_anything_starts(
    made: Making, line: str, said: str
) -> None:
    with pytest.raises(UnusableTask, match=said):
        made(first_line=line)


def test_a_driver_that_does_not_get_ready_is_ended(made: Making) -> None:
    with pytest.raises(UnusableTask, match=r"did not start within 0\.01 s: raise start_s"):
        made(start_s=0.01, first_line='{"id": "other"}')


def test_an_interpreter_that_is_not_there_is_named_with_the_repair(tmp_path: Path) -> None:
    with pytest.raises(
        UnusableTask, match=r"there is no interpreter .*: make .*verifiers==0\.4\.0"
    ):
        VerifiersEnvironment({}, python=str(tmp_path / "python"))


def test_the_client_that_renders_needs_a_tokenizer() -> None:
    with pytest.raises(UnusableTask, match="give renderer"):
        VerifiersEnvironment({}, client="train")


def test_the_driver_gets_the_users_folders_and_none_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv(IMPORT_PATHS, "/theirs")
    monkeypatch.setenv("NO_PROXY", "example.org")
    found = environ(Path("/venv/bin/python"))
    assert found["PYTHONPATH"] == "/theirs"
    assert found["PATH"].startswith("/venv/bin:")
    assert found["NO_PROXY"] == found["no_proxy"] == "example.org,127.0.0.1,localhost"


def test_each_task_of_a_taskset_is_in_one_split() -> None:
    task = VerifiersTask.create(TaskSettings(heldout_every=4), tasks=10)
    assert [row["task"] for row in task.rows("train")] == [0, 1, 2, 4, 5, 6, 8, 9]
    assert [row["task"] for row in task.rows("heldout")] == [3, 7]
    assert task.episode("train", 3).payload == {"task": 4}
    with pytest.raises(UnusableTask, match=r"data\.options\.tasks is 3"):
        VerifiersTask.create(TaskSettings(heldout_every=4), tasks=3)


class CancelledDriver(Driver):
    """A driver whose environment cancels its own episode."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self._free = asyncio.Semaphore(1)

    def say(self, answer: dict[str, Any]) -> None:
        self.said.append(answer)

    async def _play(self, order: dict[str, Any]) -> dict[str, Any]:
        raise asyncio.CancelledError("by its own scope")


async def test_an_episode_that_its_environment_cancels_is_answered_with_an_error() -> None:
    driver = CancelledDriver()
    with pytest.raises(asyncio.CancelledError):
        await driver._answer("0", {})
    (said,) = driver.said
    assert (said["id"], said["error"]["type"]) == ("0", "CancelledError")


QUESTION = {"messages": [{"role": "user", "content": "q"}]}


@pytest.fixture
async def agent(tokenizer: Any) -> AsyncIterator[OpenedAgent]:
    async with opened_agent(ChatFormat(tokenizer, []), "one", "two", "three") as agent:
        yield agent


@pytest.fixture
async def forwarder(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Forwarder]:
    monkeypatch.setenv(Forwarder.KEY_VARIABLE, "")
    async with Forwarder() as forwarder:
        yield forwarder


@pytest.fixture
async def web(forwarder: Forwarder) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {forwarder.key}"}
    async with httpx.AsyncClient(
        base_url=forwarder.base_url, headers=headers, trust_env=False, timeout=60
    ) as web:
        yield web


async def asked(web: httpx.AsyncClient, session: str, **headers: str) -> httpx.Response:
    return await web.post(
        "chat/completions", json=QUESTION, headers={"X-Session-ID": session, **headers}
    )


async def test_a_request_reaches_the_episode_of_its_session_until_that_is_closed(
    agent: OpenedAgent, forwarder: Forwarder, web: httpx.AsyncClient
) -> None:
    sample = a_sample(1)
    async with agent.endpoint.episode(sample, sample.sampling) as other:
        forwarder.open("a", agent.episode.base_url, agent.episode.api_key)
        forwarder.open("b", other.base_url, other.api_key)
        for session in "ab":
            assert (await asked(web, session)).status_code == 200
        assert len(agent.episode.trajectories("a")) == len(other.trajectories("b")) == 1
        assert agent.episode.trajectories("b") == other.trajectories("a") == []
        forwarder.close("b")
        assert (await asked(web, "b")).status_code == 404


async def test_a_request_without_the_key_or_a_session_reaches_nothing(
    agent: OpenedAgent, forwarder: Forwarder, web: httpx.AsyncClient
) -> None:
    forwarder.open("a", agent.episode.base_url, agent.episode.api_key)
    for key in ("", "Bearer x", f"Bearer {agent.episode.api_key}"):
        assert (await asked(web, "a", Authorization=key)).status_code == 401
    for session in ("", "b"):
        assert (await asked(web, session)).status_code == 404
    assert agent.generation.requests == []


async def test_a_body_that_never_ends_is_refused(
    agent: OpenedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(Forwarder.KEY_VARIABLE, "")
    async with Forwarder(body_s=0.1) as forwarder:
        forwarder.open("a", agent.episode.base_url, agent.episode.api_key)
        address = httpx.URL(forwarder.base_url)
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Session-ID: a\r\n"
            f"Authorization: Bearer {forwarder.key}\r\nContent-Length: 9\r\n\r\n{{".encode()
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        writer.close()
    assert agent.generation.requests == []


async def test_a_stream_and_a_refusal_are_passed_on_as_they_are(
    agent: OpenedAgent, forwarder: Forwarder, web: httpx.AsyncClient
) -> None:
    forwarder.open("a", agent.episode.base_url, agent.episode.api_key)
    session = {"X-Session-ID": "a"}
    streamed = await web.post(
        "chat/completions", json={**QUESTION, "stream": True}, headers=session
    )
    assert streamed.headers["Content-Type"] == "text/event-stream"
    assert streamed.text.endswith("data: [DONE]\n\n")
    refused = await web.post(
        "chat/completions", json={**QUESTION, "guided_json": {}}, headers=session
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "guided_json"
    (model,) = (await web.get("models")).json()["data"]
    assert model["max_model_len"] == 4000


async def test_an_endpoint_that_is_gone_is_an_error_that_may_be_tried_again(
    forwarder: Forwarder, web: httpx.AsyncClient
) -> None:
    forwarder.open("a", "http://127.0.0.1:9/e/x/v1", "k")
    assert (await asked(web, "a")).status_code == 502


PAGE = Guide.read("verifiers.md")
RUN = Path(__file__).parents[1] / "verifiers" / "run.toml"
MOST_TOKENS = 4000


def test_its_config_is_one_and_names_options_that_exist() -> None:
    (text,) = PAGE.blocks("toml")
    table = tomllib.loads(text)
    config = Config.model_validate({"run": {"name": "page", "steps": 1}, **table})
    inspect.signature(VerifiersEnvironment).bind(**config.rollouts.options)
    assert config.rollouts.options["env"]["agent"]["max_total_tokens"] < MOST_TOKENS


def test_every_option_is_on_the_page_and_in_the_run_that_it_names() -> None:
    options = inspect.signature(VerifiersEnvironment).parameters
    assert {*options} - {"python"} <= set(PAGE.inline())
    assert "rollouts.options.python" in PAGE.inline()
    inspect.signature(VerifiersEnvironment).bind(**read_table(RUN)["rollouts"]["options"])


def test_every_class_of_infrastructure_is_on_the_page() -> None:
    assert set(PAGE.inline()) >= INFRASTRUCTURE
