"""Tools, rewards and files of coding tasks, with boxes that answer from a script.

The sandbox that a config names is handed to tasks that need one, and to no others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from code_rows import OTHER, RIGHT, ROW, SOURCE, TEST
from code_tasks import ScriptedBoxes, honest, reported_tests

from composer_mesh.mesh.actor import own_endpoint
from composer_mesh.mesh.task_resources import attach_sandbox, open_configured, serving
from composer_mesh.plugins.code_tasks.static_rules import HINTS, KINDS
from composer_mesh.plugins.code_tasks.task import CodeTask
from composer_mesh.rollouts.hints import TEMPLATES, render_hint
from composer_mesh.rollouts.tasks import Outcome, StepResult
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.calls import TaskCalls
from composer_mesh.tasks.errors import TaskCodeError, UnusableTask
from composer_mesh.tasks.loading import make_task
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.sandbox import SandboxError
from composer_mesh.tasks.task import TaskSettings

BODY = "    raise NotImplementedError\n"
NEW = "    return 2 * value\n"


def made(
    folder: Path, boxes: ScriptedBoxes | None = None, row: Any = ROW, **options: Any
) -> CodeTask:
    file = folder / "tasks.jsonl"
    again = {**row, "name": "again", "prompt": "Again.", "split": "heldout"}
    rows = [{**row, "split": "train"}, again]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = CodeTask.create(TaskSettings(path=file, max_turns=20), **options)
    task.sandbox = boxes or ScriptedBoxes()
    return task


class Played:
    """One episode that a test plays."""

    def __init__(self, task: CodeTask) -> None:
        self.episode = RunningEpisode(task, task.episode("train", 0), TaskCalls())

    async def begin(self) -> Played:
        await self.episode.begin()
        return self

    async def call(self, name: str, **arguments: Any) -> StepResult:
        return await self.episode.step(call_text(name, arguments))

    async def text(self, name: str, **arguments: Any) -> str:
        step = await self.call(name, **arguments)
        assert step.error is None, step.messages
        return str(step.messages[0]["content"])

    async def kind(self, name: str, **arguments: Any) -> str:
        step = await self.call(name, **arguments)
        assert step.error is not None
        render_hint(step.error, None, TEMPLATES.extended(HINTS))
        return step.error.error_kind

    async def outcome(self) -> Outcome:
        return await self.episode.outcome()


async def test_an_agent_reads_edits_tests_and_submits(tmp_path: Path) -> None:
    boxes = ScriptedBoxes()
    played = await Played(made(tmp_path, boxes)).begin()
    assert "lib/sums.py" in (await played.text("list_files")).split("\n")
    assert await played.text("list_files", folder="lib") == "lib/__init__.py\nlib/sums.py"
    assert "3      raise" in await played.text("read_file", path="lib/sums.py")
    assert (
        await played.text("search", text="raise Not")
        == "lib/sums.py:3:     raise NotImplementedError"
    )
    assert "written" in await played.text("edit", path="lib/sums.py", old=BODY, new=NEW)
    assert await played.text("run_tests") == "1 passed or skipped, 0 failed"
    assert (await played.call("submit")).done
    outcome = await played.outcome()
    assert (outcome.reward, outcome.success, outcome.screened) == (1.0, True, False)
    assert outcome.rewards["tests"] == outcome.rewards["solved"] == 1.0
    assert {name for name in outcome.rewards if name.startswith("flag/")} == {
        f"flag/{kind}" for kind in KINDS if not kind.startswith("model_")
    }
    assert boxes.trees[1].read("lib/sums.py") == RIGHT


async def test_an_empty_attempt_has_no_reward(tmp_path: Path) -> None:
    played = await Played(made(tmp_path)).begin()
    await played.call("submit")
    outcome = await played.outcome()
    assert (outcome.reward, outcome.success) == (0.0, False)


async def test_the_gold_policy_solves_each_task(tmp_path: Path) -> None:
    task = made(tmp_path)
    played = await Played(task).begin()
    for action in task.gold(task.episode("train", 0).payload):
        await played.episode.step(action)
    assert (await played.outcome()).reward == 1.0


async def test_every_wrong_call_is_an_error_site_with_a_hint(tmp_path: Path) -> None:
    played = await Played(made(tmp_path)).begin()
    path = "lib/sums.py"
    assert await played.kind("read_file", path="lib/none.py") == "no_such_file"
    assert await played.kind("list_files", folder="none") == "no_such_file"
    assert await played.kind("edit", path=path, old="nothing", new="x") == "edit_no_match"
    assert await played.kind("edit", path=path, old="e", new="x") == "edit_ambiguous"
    assert await played.kind("write_file", path=path, content="def f(:\n") == "syntax_error"
    assert await played.kind("write_file", path="../x.py", content="") == "bad_path"
    assert await played.kind("apply_patch", diff="what") == "patch_failed"
    assert await played.kind("run_tests", files=["tests/none.py"]) == "no_such_file"


async def test_a_failing_test_is_an_error_site_with_its_assertion(tmp_path: Path) -> None:
    played = await Played(made(tmp_path)).begin()
    step = await played.call("run_tests")
    assert step.error is not None
    assert step.error.error_kind == "test_failed"
    assert step.error.data == {"test": TEST, "assertion": "assert 1 == 2"}


async def test_a_patch_changes_all_of_its_files_or_none(tmp_path: Path) -> None:
    played = await Played(made(tmp_path)).begin()
    good = "--- a/lib/sums.py\n+++ b/lib/sums.py\n@@ -3 +3 @@\n-" + BODY + "+" + NEW
    bad = "--- a/lib/none.py\n+++ b/lib/none.py\n@@ -1 +1 @@\n-a\n+b\n"
    assert await played.kind("apply_patch", diff=good + bad) == "no_such_file"
    assert "Not" in await played.text("read_file", path="lib/sums.py")
    assert await played.text("apply_patch", diff=good) == "lib/sums.py was written"
    assert "2 * value" in await played.text("read_file", path="lib/sums.py")


async def test_what_commands_change_is_kept_and_a_late_one_is_an_error_site(tmp_path: Path) -> None:
    boxes = ScriptedBoxes()
    played = await Played(made(tmp_path, boxes)).begin()
    boxes.result = {"changed": {"lib/new.py": b"x = 1\n"}, "stdout": b"hello\n"}
    assert await played.text("run_command", command=["python3", "x.py"]) == "exit code 0\nhello\n"
    assert "x = 1" in await played.text("read_file", path="lib/new.py")
    boxes.result = {"ended": "wall_time", "exit_code": None}
    assert await played.kind("run_command", command=["sleep"]) == "command_timeout"


async def test_a_long_result_is_cut(tmp_path: Path) -> None:
    boxes = ScriptedBoxes()
    played = await Played(made(tmp_path, boxes, output_characters=300)).begin()
    boxes.result = {"stdout": b"x" * 5000}
    text = await played.text("run_command", command=["python3"])
    assert len(text) < 400
    assert "characters are left out here" in text


async def test_a_box_that_fails_is_infrastructure_and_neither_an_observation_nor_a_reward(
    tmp_path: Path,
) -> None:
    boxes = ScriptedBoxes()
    played = await Played(made(tmp_path, boxes)).begin()
    boxes.error = SandboxError("no box could be started")
    for tool, arguments in (("run_tests", {}), ("run_command", {"command": ["true"]})):
        with pytest.raises(SandboxError) as failed:
            await played.call(tool, **arguments)
        assert failed.value.failure_class == "infrastructure"
    with pytest.raises(SandboxError):
        await played.outcome()


HACK = SOURCE.replace(b"raise NotImplementedError", b"import gc; return 2 * value").decode()


def answer(spec: dict[str, Any], tree: Any) -> list[dict[str, Any]]:
    """Say that all tests and values are right."""
    lines = honest(spec, tree.with_edits({"lib/sums.py": RIGHT}))
    return reported_tests(spec["wanted"], [TEST, OTHER]) if "wanted" in spec else lines


@pytest.mark.parametrize(
    ("monitor", "reward", "success", "screened"),
    [("report", 1.0, True, False), ("penalize", 0.5, True, False), ("screen", 1.0, False, True)],
)
async def test_a_flagged_rollout_is_reported_penalized_or_screened(
    tmp_path: Path, monitor: str, reward: float, success: bool, screened: bool
) -> None:
    boxes = ScriptedBoxes(answer)
    played = await Played(made(tmp_path, boxes, monitor=monitor, penalty=0.5)).begin()
    await played.call("write_file", path="lib/sums.py", content=HACK)
    await played.call("submit")
    outcome = await played.outcome()
    assert (outcome.reward, outcome.success, outcome.screened) == (reward, success, screened)
    assert (outcome.rewards["flagged"], outcome.rewards["flag/object_inspection"]) == (1.0, 1.0)
    assert outcome.rewards["flag/network"] == 0.0


async def test_hidden_tests_are_in_no_tree_of_the_agent(tmp_path: Path) -> None:
    boxes = ScriptedBoxes()
    played = await Played(made(tmp_path, boxes, tests="hidden")).begin()
    assert "tests/test_sums.py" not in (await played.text("list_files")).split("\n")
    await played.call("run_tests")
    assert "tests/test_sums.py" not in boxes.trees[0].files()
    await played.call("edit", path="lib/sums.py", old=BODY, new=NEW)
    await played.call("submit")
    assert (await played.outcome()).reward == 1.0


async def test_no_box_of_an_agents_command_has_what_was_deleted_or_hidden(tmp_path: Path) -> None:
    boxes = ScriptedBoxes()
    hidden = {"tests/test_hidden.py": "def test_secret(): pass\n"}
    row = {**ROW, "hidden_files": hidden, "pass_to_pass": ["tests/test_hidden.py::test_secret"]}
    played = await Played(made(tmp_path, boxes, row=row)).begin()
    await played.call("run_command", command=["python3", "-c", "print(1)"])
    await played.call("run_tests")
    told = repr((boxes.trees, boxes.commands, boxes.specs))
    assert len(boxes.trees) == 2
    assert not any(secret in told for secret in ("2 * value", "secret", "test_hidden", "returned"))


def test_tasks_without_hidden_values_are_told_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    rows = [{**ROW, "name": str(n), "prompt": str(n), "cases": []} for n in range(5)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = CodeTask.create(TaskSettings(path=file)).remarks()
    assert any("rests on tests alone" in line for line in told)
    with pytest.raises(UnusableTask, match="hidden cases"):
        CodeTask.create(TaskSettings(path=file), without_values="refuse")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"files": {**ROW["files"], ".git/config": "x"}}, "may still hold"),
        ({"files": {**ROW["files"], "lib/__pycache__/sums.pyc": "x"}}, "may still hold"),
        ({"files": {**ROW["files"], "lib/sums.py.orig": "x"}}, "may still hold"),
        ({"files": {**ROW["files"], "x.egg-info/SOURCES.txt": "x"}}, "may still hold"),
        ({"files": {**ROW["files"], "../x.py": "x"}}, "no path"),
        ({"fail_to_pass": ["tests/none.py::test"]}, "no file has the test"),
        ({"fail_to_pass": []}, "fail_to_pass"),
        ({"visible": [OTHER]}, "not in fail_to_pass"),
        ({"targets": []}, "not deleted"),
        ({"files": {"lib/sums.py": {"base64": "!"}}}, "no base64"),
    ],
)
def test_a_row_that_cannot_be_judged_is_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({**ROW, **change}) + "\n")
    with pytest.raises(UnusableTask, match=said):
        CodeTask.create(TaskSettings(path=file))


def test_wrong_options_are_named(tmp_path: Path) -> None:
    for options in ({"monitor": "ignore"}, {"flag": ["nothing"]}, {"penality": 1.0}):
        with pytest.raises(UnusableTask, match="options"):
            made(tmp_path, **options)


async def test_without_a_sandbox_nothing_runs(tmp_path: Path) -> None:
    task = made(tmp_path)
    task.sandbox = None
    with pytest.raises(UnusableTask, match="sandbox"):
        await Played(task).begin()


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
