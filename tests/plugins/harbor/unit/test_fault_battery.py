"""A hundred ways to fail: none of the machine's is a reward, and none of the agent's goes unscored.

The agent's work is right in one half of the episodes and wrong in the other, so that a reward of 1
or 0 is a label, and a wrong one shows.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_containers import FakeContainer, FakeContainers, Fault, finished
from harbor_folders import SUBMIT, TESTS, bash, made, played, written

from composer_mesh.mesh.failures import FailureClass, classify
from composer_mesh.plugins.harbor.containers.port import ContainerError, FinishedCommand
from composer_mesh.plugins.harbor.harness_agent import refuse_silence
from composer_mesh.plugins.harbor.machine import TaskFailure
from composer_mesh.plugins.harbor.verifier import TestsFailed
from composer_mesh.rollouts.tasks import Outcome, StepResult
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import ErrorSite
from composer_mesh.tasks.sandbox import SandboxError

RIGHT, WRONG = bash("write word.txt hello"), bash("write word.txt bye")
OF_START = (
    *(
        "image_missing",
        "image_digest",
        "image_invalid",
        "registry",
        "build",
        "start",
        "unsupported",
    ),
    *("disk_full", "host_memory", "backend"),
)
OF_A_RUNNING_ONE = ("container_died", "disk_full", "host_memory", "backend")
POINTS = (
    *("probe", "run", "put /logs/agent", "put /tests", "test", "stop", "changes"),
    *("remove /logs/verifier", "get /logs/verifier"),
)
Effect = Callable[[FakeContainer], FinishedCommand | None]


def outcome(folder: Path, containers: FakeContainers, *actions: str, tests: str = TESTS) -> Outcome:
    """Play an episode, on which everything is closed at its end."""
    import asyncio

    task = made(written(folder / "task", {"tests/test.sh": tests}), containers)
    try:
        return asyncio.run(played(task, [*actions, SUBMIT]))[0]
    finally:
        asyncio.run(containers.close())


def failing(point: str, kind: str) -> Fault:
    def fault(_: FakeContainer, at: str) -> FinishedCommand | None:
        if at == point:
            raise ContainerError(kind, "as the test wants")  # type: ignore[arg-type]
        return None

    return fault


@pytest.mark.parametrize("kind", OF_START)
def test_what_fails_at_the_start_is_no_reward(tmp_path: Path, kind: str) -> None:
    refused_as(kind, tmp_path, FakeContainers(failing("start", kind)), RIGHT)


@pytest.mark.parametrize("kind", OF_A_RUNNING_ONE)
@pytest.mark.parametrize("point", POINTS)
def test_what_fails_in_a_running_container_is_no_reward(
    tmp_path: Path, point: str, kind: str
) -> None:
    refused_as(kind, tmp_path, FakeContainers(failing(point, kind)), WRONG)


def refused_as(kind: str, folder: Path, containers: FakeContainers, action: str) -> None:
    """Check that an episode has no outcome, but an error that others can count and retry."""
    with pytest.raises(SandboxError) as failed:
        outcome(folder, containers, action)
    assert classify(failed.value) is FailureClass.INFRASTRUCTURE
    assert getattr(failed.value, "kind", None) == kind


def writes(name: str, content: bytes) -> Effect:
    def effect(container: FakeContainer) -> FinishedCommand:
        container.files[f"/logs/verifier/{name}"] = content
        return finished()

    return effect


OF_TESTS: dict[str, tuple[str, Effect]] = {
    "killed": ("verifier_killed", lambda _: finished(None, ended="signal")),
    "out of memory": ("verifier_killed", lambda _: finished(None, ended="memory")),
    "hangs": ("verifier_timeout", lambda _: finished(None, ended="wall_time", s=600)),
    "writes nothing": ("no_reward", lambda _: finished(0)),
    "fails": ("no_reward", lambda _: finished(1)),
    "is no program": ("no_reward", lambda _: finished(127)),
    "writes an empty file": ("empty_reward", writes("reward.txt", b"")),
    "writes words": ("bad_reward", writes("reward.txt", b"passed")),
    "writes NaN": ("bad_reward", writes("reward.json", b'{"reward": NaN}')),
    "writes other keys": ("no_reward_key", writes("reward.json", b'{"a": 1, "b": 1}')),
    "writes too much": ("bad_reward", writes("core", bytes(17 << 20))),
}


def failing_tests(effect: Effect, times: float, everywhere: bool = True) -> Fault:
    """Have tests fail so many times; only on the agent's machine if not everywhere."""
    seen = []

    def fault(container: FakeContainer, at: str) -> FinishedCommand | None:
        if at != "test" or len(seen) >= times:
            return None
        if not everywhere and container is not container.owner.made[0]:
            return None
        seen.append(at)
        return effect(container)

    return fault


@pytest.mark.parametrize("name", OF_TESTS)
@pytest.mark.parametrize(("action", "reward"), [(RIGHT, 1.0), (WRONG, 0.0)])
def test_tests_that_fail_once_are_run_again_and_their_reward_counts(
    tmp_path: Path, name: str, action: str, reward: float
) -> None:
    containers = FakeContainers(failing_tests(OF_TESTS[name][1], 1))
    found = outcome(tmp_path, containers, action)
    assert (found.reward, found.rewards["tests_again"]) == (reward, 1.0)
    assert not found.rewards["flag/verifier_broken"]


@pytest.mark.parametrize("name", OF_TESTS)
@pytest.mark.parametrize("action", [RIGHT, WRONG])
def test_tests_that_fail_on_any_machine_are_no_reward(
    tmp_path: Path, name: str, action: str
) -> None:
    kind, effect = OF_TESTS[name]
    with pytest.raises(TestsFailed, match="on any machine") as failed:
        outcome(tmp_path, FakeContainers(failing_tests(effect, 100)), action)
    assert failed.value.kind == kind
    assert classify(failed.value) is FailureClass.INFRASTRUCTURE


@pytest.mark.parametrize("name", OF_TESTS)
def test_tests_that_fail_on_the_agents_machine_alone_are_the_agents_failure(
    tmp_path: Path, name: str
) -> None:
    containers = FakeContainers(failing_tests(OF_TESTS[name][1], 100, everywhere=False))
    found = outcome(tmp_path, containers, RIGHT)
    assert (found.reward, found.success) == (0.0, False)
    assert found.rewards["flag/verifier_broken"] == 1.0


@pytest.mark.parametrize("kind", OF_START)
def test_a_fresh_machine_that_cannot_be_started_is_no_reward(tmp_path: Path, kind: str) -> None:
    broken = failing_tests(OF_TESTS["fails"][1], 100)

    def fault(container: FakeContainer, at: str) -> FinishedCommand | None:
        if at == "start" and container.owner.made:
            raise ContainerError(kind, "as the test wants")  # type: ignore[arg-type]
        return broken(container, at)

    refused_as(kind, tmp_path, FakeContainers(fault), WRONG)


DOINGS = {
    "a command that fails": [bash("exit 3"), RIGHT],
    "a command that takes too long": [bash("sleep 500", timeout_s=5), RIGHT],
    "a command without memory": [bash("eat"), RIGHT],
    "a command that is killed": [bash("kill"), RIGHT],
    "the time of the task used up": [RIGHT, bash("sleep 9999", timeout_s=9999)],
    "a file that cannot be read": [call_text("read_file", {"path": "nowhere"}), RIGHT],
    "a tool that does not exist": [call_text("fly", {}), RIGHT],
    "a call that is malformed": ["<tool_call>{", RIGHT],
    "an answer in place of a call": [RIGHT, "done"],
    "all turns": [RIGHT, *[bash("print more")] * 30],
}


@pytest.mark.parametrize("name", DOINGS)
@pytest.mark.parametrize("right", [True, False])
def test_what_the_agent_does_is_scored_by_its_work(tmp_path: Path, name: str, right: bool) -> None:
    actions = [one if right or one != RIGHT else WRONG for one in DOINGS[name]]
    assert outcome(tmp_path, FakeContainers(), *actions).reward == float(right)


@pytest.mark.parametrize("hours", [-1000, 1000])
def test_a_clock_that_jumps_changes_no_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    now, calls = time.time(), []

    def jumping() -> float:
        calls.append(now)
        return now + 3600 * hours * len(calls)

    monkeypatch.setattr(time, "time", jumping)
    assert outcome(tmp_path, FakeContainers(), RIGHT).reward == 1.0
    assert outcome(tmp_path, FakeContainers(), WRONG).reward == 0.0


@pytest.mark.parametrize("said", ["", "exit code 127: not found", "signal", "wall_time"])
def test_a_harness_without_an_answer_of_the_model_is_no_episode(said: str) -> None:
    site = ErrorSite(0, "harness_failed", "tool_error", {"harness": said}) if said else None
    step = StepResult([], True, site)
    with pytest.raises(TaskFailure, match=said or "exit code 0") as failed:
        refuse_silence(0, step)
    assert classify(failed.value) is FailureClass.INFRASTRUCTURE
    refuse_silence(1, step)


@pytest.mark.parametrize("kind", [ContainerError, TaskFailure, TestsFailed])
def test_errors_keep_their_kind_between_processes(kind: type[Exception]) -> None:
    arrived = pickle.loads(pickle.dumps(kind("registry", "slow")))
    assert type(arrived) is kind
    assert (vars(arrived)["kind"], str(arrived)) == ("registry", "registry: slow")
