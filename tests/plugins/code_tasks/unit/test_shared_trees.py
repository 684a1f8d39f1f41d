"""Trees that tasks share: deletions, solutions and refusals."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from code_rows import RIGHT, ROW, SOURCE
from code_tasks import ScriptedBoxes

from composer_mesh.plugins.code_tasks.deletions import Deletion, lines_of, with_deletions
from composer_mesh.plugins.code_tasks.task import CodeTask
from composer_mesh.plugins.code_tasks.task_file import TaskFile, restoring_patch
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.tasks.calls import TaskCalls
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.loading import TaskMixture
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import TaskSettings
from composer_mesh.tasks.toolbox import ToolboxTask

TREE = {"tree": "lib-1", "files": {**ROW["files"], "lib/sums.py": RIGHT.decode()}}
DELETION = {
    "path": "lib/sums.py",
    "first": 3,
    "last": 3,
    "text": "    raise NotImplementedError\n",
}
SHARED = {
    **{key: value for key, value in ROW.items() if key not in {"files", "solution"}},
    "tree": "lib-1",
    "deletions": [DELETION],
}


def made(folder: Path, *rows: Any) -> CodeTask:
    file = folder / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = CodeTask.create(TaskSettings(path=file, max_turns=20, heldout_every=2))
    task.sandbox = ScriptedBoxes()
    return task


def test_tasks_of_one_tree_have_its_files_with_their_own_deletions() -> None:
    other = {**SHARED, "name": "other", "prompt": "Another.", "deletions": []}
    file = TaskFile([TREE, SHARED, other])
    assert dict(file.tasks["double"].files)["lib/sums.py"] == SOURCE
    assert dict(file.tasks["other"].files)["lib/sums.py"] == RIGHT
    assert file.solution("double") == {"lib/sums.py": RIGHT.decode()}
    assert [row["name"] for row in file.rows] == ["double", "other"]
    first, second = (file.tasks[one].files["tests/test_sums.py"] for one in ("double", "other"))
    assert first is second


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([SHARED], "no earlier row is the tree 'lib-1'"),
        ([SHARED, TREE], "no earlier row is the tree 'lib-1'"),
        ([TREE, {**SHARED, "files": {"a": "b"}}], "state deletions alone"),
        ([TREE, {**SHARED, "deletions": [{**DELETION, "path": "lib/no.py"}]}], "lib/no.py"),
        ([TREE, {**SHARED, "deletions": [{**DELETION, "last": 90}]}], "state lines that exist"),
        ([TREE, {**SHARED, "deletions": [DELETION, DELETION]}], "each once"),
        (
            [{**TREE, "files": {**TREE["files"], ".git/x": "a"}}, SHARED],
            "may still hold what was deleted",
        ),
    ],
)
def test_a_task_that_does_not_fit_its_tree_is_refused(rows: list[Any], says: str) -> None:
    with pytest.raises(UnusableTask, match=says):
        TaskFile(rows)


async def test_gold_of_a_shared_tree_is_a_patch_that_our_tool_applies(tmp_path: Path) -> None:
    task = made(tmp_path, TREE, SHARED, {**SHARED, "name": "again", "prompt": "Again."})
    row = task.episode("train", 0).payload
    assert "apply_patch" in task.gold(row)[0]
    episode = RunningEpisode(task, task.episode("train", 0), TaskCalls())
    await episode.begin()
    for action in task.gold(row):
        await episode.step(action)
    assert (await episode.outcome()).reward == 1.0


async def test_the_expert_follows_the_gold_actions_from_the_messages_alone(tmp_path: Path) -> None:
    task = made(tmp_path, TREE, SHARED, {**SHARED, "name": "again", "prompt": "Again."})
    episode = RunningEpisode(task, task.episode("heldout", 0), TaskCalls())
    messages = await episode.begin()
    while not (await episode.step(task.expert(messages))).done:
        messages = episode.messages
    assert (await episode.outcome()).reward == 1.0
    with pytest.raises(ValueError, match="the prompt of no coding task"):
        task.expert([{"role": "user", "content": "What is this?"}])
    assert task.expert(episode.messages) == call_text("submit", {})


async def test_a_corrupted_action_of_the_expert_is_a_patch_that_does_not_solve(
    tmp_path: Path,
) -> None:
    task = made(tmp_path, TREE, SHARED, {**SHARED, "name": "again", "prompt": "Again."})
    episode = RunningEpisode(task, task.episode("train", 0), TaskCalls())
    messages = await episode.begin()
    assert (await episode.step(task.corrupted(messages, random.Random(0)))).error is None
    await episode.step(task.corrupted(episode.messages, random.Random(0)))
    assert (await episode.outcome()).reward == 0.0


def test_two_tasks_with_one_prompt_are_refused_by_their_names() -> None:
    with pytest.raises(
        UnusableTask, match=r"row 3: tasks 'double' and 'other' have the same prompt"
    ):
        TaskFile([TREE, SHARED, {**SHARED, "name": "other"}])


def test_the_expert_of_a_mixture_leaves_other_conversations_to_others(
    tmp_path: Path, toolbox: ToolboxTask
) -> None:
    code = made(tmp_path, TREE, SHARED, {**SHARED, "name": "again", "prompt": "Again."})
    both = TaskMixture([code, toolbox], [1.0, 1.0])
    question = SyncSession(toolbox, toolbox.episode("train", 0)).messages
    assert both.expert(question) == toolbox.expert(question)
    assert both.expert([{"role": "user", "content": "Again."}]) == code.gold({"name": "again"})[0]


def test_a_file_that_no_patch_can_restore_is_written_whole() -> None:
    assert restoring_patch({"a.py": b"x\n"}, {"a.py": "y\n"}) is not None
    assert restoring_patch({}, {"a.py": "y\n"}) is None
    assert restoring_patch({"a.py": b"x"}, {"a.py": "x\ny"}) is None


def test_lines_are_counted_as_the_parser_of_python_does() -> None:
    text = "a\x0cb\u2028c\r\nd\ne"
    assert lines_of(text) == ["a\x0cb\u2028c\r\n", "d\n", "e"]
    assert with_deletions(text, [Deletion("", 2, 2, "D\n")]) == "a\x0cb\u2028c\r\nD\ne"
