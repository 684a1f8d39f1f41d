"""The sandbox that a config names is handed to tasks that need one, and to no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from code_rows import ROW

from composer_mesh.actors.mcp_servers.servers import serving
from composer_mesh.mesh.actor import own_endpoint
from composer_mesh.mesh.task_sandboxes import attach_sandbox, open_configured
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.errors import TaskCodeError, UnusableTask
from composer_mesh.tasks.loading import make_task

SCRIPTED = "code_tasks:ScriptedBoxes"


@pytest.fixture
def code_config(tmp_path: Path, build_config: Any) -> Any:
    file = tmp_path / "tasks.jsonl"
    rows = [
        {**ROW, "split": "train"},
        {**ROW, "name": "again", "prompt": "Again.", "split": "heldout"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def build(**sandbox: Any) -> Any:
        data = {"task": "code", "path": str(file)}
        return build_config(data=data, environment={"sandbox": sandbox})

    return build


async def test_an_environment_actor_judges_code_in_the_configured_sandbox(
    code_config: Any, environment_actor: Any
) -> None:
    actor = environment_actor()
    config = code_config(kind=SCRIPTED)
    await own_endpoint(actor, "load")(config)
    task = make_task(config)
    episode = task.episode("train", 0)
    await own_endpoint(actor, "begin")("one", episode)
    for action in task.gold(episode.payload):
        step = await own_endpoint(actor, "step")("one", action)
    assert step.done
    outcome = await own_endpoint(actor, "finish")("one")
    assert (outcome.reward, outcome.success) == (1.0, True)


async def test_a_box_that_fails_is_no_outcome_of_an_environment_actor(
    code_config: Any, environment_actor: Any
) -> None:
    actor = environment_actor()
    config = code_config(kind="code_tasks:BrokenBoxes")
    await own_endpoint(actor, "load")(config)
    await own_endpoint(actor, "begin")("one", make_task(config).episode("train", 0))
    await own_endpoint(actor, "step")("one", call_text("submit", {}))
    with pytest.raises(Exception, match="no box could be started") as failed:
        await own_endpoint(actor, "finish")("one")
    assert failed.value.failure_class == "infrastructure"  # type: ignore[attr-defined]


def test_a_task_that_runs_no_code_has_no_sandbox(build_config: Any) -> None:
    config = build_config(environment={"sandbox": {"kind": "no_such_module:opener"}})
    task = make_task(config)
    assert attach_sandbox(config, task) is None
    assert task.sandbox is None


def test_commands_hand_the_sandbox_in_and_close_it(code_config: Any) -> None:
    config = code_config(kind=SCRIPTED)
    task = make_task(config)
    with serving(config, task):
        sandbox: Any = task.sandbox
        assert not sandbox.closed
    assert sandbox.closed


def test_code_of_agents_runs_in_boxes_if_nothing_else_is_named(code_config: Any) -> None:
    assert code_config().environment.sandbox.kind == "bubblewrap"
    with pytest.raises(UnusableTask, match=r"options\.boxes is 0"):
        open_configured(code_config(options={"boxes": 0}))


@pytest.mark.parametrize("kind", ["no_such_module:opener", "code_tasks:none", "docker", ":x"])
def test_a_sandbox_that_cannot_be_imported_is_refused(code_config: Any, kind: str) -> None:
    config = code_config(kind=kind)
    with pytest.raises(UnusableTask, match=r"environment\.sandbox\.kind"):
        attach_sandbox(config, make_task(config))


def test_options_that_a_sandbox_does_not_take_are_refused(code_config: Any) -> None:
    config = code_config(kind=SCRIPTED, options={"boxes": 2})
    with pytest.raises(UnusableTask, match=r"environment\.sandbox\.options"):
        attach_sandbox(config, make_task(config))


@pytest.mark.parametrize("name", ["StopIteration", "SystemExit", "CancelledError"])
def test_whatever_an_opener_raises_is_an_error_that_names_it(code_config: Any, name: str) -> None:
    config = code_config(kind="raised_kinds:fail", options={"name": name})
    with pytest.raises(TaskCodeError, match=rf"opening the sandbox .*fail.*{name}"):
        attach_sandbox(config, make_task(config))
