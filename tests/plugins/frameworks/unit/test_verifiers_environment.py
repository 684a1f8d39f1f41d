"""Environments of verifiers as a workflow, against a driver that speaks its protocol."""

import asyncio
import pickle
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_verifiers_driver
import pytest
from workflow_ports import Ports, sample

from composer_mesh.actors.rollout_workers.workflows import WorkflowPlayer
from composer_mesh.mesh.environment import IMPORT_PATHS
from composer_mesh.mesh.failures import FailureClass, classify
from composer_mesh.plugins.frameworks.verifiers.driver import Driver
from composer_mesh.plugins.frameworks.verifiers.driver_process import (
    DriverError,
    EpisodeFailed,
    EpisodeLost,
    environ,
    failure,
)
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
        ("no json", "it said 'no json.*', which is no answer"),
        ("[1]", "which is no answer"),
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
    with pytest.raises(UnusableTask, match=r"there is no interpreter .*: make .* `make verifiers`"):
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
