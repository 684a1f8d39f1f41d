"""Trees that tasks share: deletions, solutions and refusals; unified diffs; values as tagged JSON.

Results of tools are cut.
"""

from __future__ import annotations

import difflib
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from code_rows import RIGHT, ROW, SOURCE
from code_tasks import ScriptedBoxes

from composer_mesh.plugins.code_tasks.deletions import Deletion, lines_of, with_deletions
from composer_mesh.plugins.code_tasks.task import CodeTask
from composer_mesh.plugins.code_tasks.task_file import TaskFile, restoring_patch
from composer_mesh.plugins.code_tasks.texts import (
    PatchFailed,
    apply_hunks,
    cut,
    numbered,
    read_patch,
    syntax_error,
)
from composer_mesh.plugins.code_tasks.values import decode, encode
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


def diff_of(before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.split("\n"), after.split("\n"), "a/x.py", "b/x.py", "", "", 2
    )
    return "\n".join(line.rstrip("\n") for line in lines)


@pytest.mark.parametrize("seed", range(20))
def test_a_diff_gives_the_text_that_it_was_made_from(seed: int) -> None:
    chance = random.Random(seed)
    before = [f"line {chance.randrange(9)}" for _ in range(30)]
    after = [line for line in before if chance.random() > 0.2]
    for _ in range(4):
        after.insert(chance.randrange(len(after)), f"new {chance.random()}")
    text, wanted = "\n".join(before) + "\n", "\n".join(after) + "\n"
    (file,) = read_patch(diff_of(text, wanted))
    assert apply_hunks(text, file.hunks) == wanted
    assert (file.old, file.new) == ("x.py", "x.py")


def test_a_hunk_is_found_where_the_line_numbers_are_wrong() -> None:
    (file,) = read_patch("--- a/x.py\n+++ b/x.py\n@@ -90,2 +90,2 @@\n b\n-c\n+d\n")
    assert apply_hunks("a\nb\nc\n", file.hunks) == "a\nb\nd\n"


def test_files_are_made_and_removed_by_a_diff() -> None:
    made, gone = read_patch(
        "diff --git a/n.py b/n.py\nnew file mode 100644\n--- /dev/null\n+++ b/n.py\n"
        "@@ -0,0 +1,2 @@\n"
        "+x = 1\n+y = 2\n--- a/o.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-z = 1\n"
    )
    assert (made.old, made.new, gone.old, gone.new) == (None, "n.py", "o.py", None)
    assert apply_hunks("", made.hunks) == "x = 1\ny = 2\n"


@pytest.mark.parametrize(
    "diff", ["", "hello", "--- a/x\n+++ b/x\n", "@@ -1 +1 @@\n-a\n+b\n", "--- a\n+++ b\nwhat\n"]
)
def test_what_is_no_diff_is_refused(diff: str) -> None:
    with pytest.raises(PatchFailed):
        read_patch(diff)


def test_a_hunk_that_fits_nowhere_is_refused() -> None:
    (file,) = read_patch("--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,2 @@\n b\n-c\n+d\n")
    with pytest.raises(PatchFailed, match="hunk 1"):
        apply_hunks("a\nb\n", file.hunks)


def test_a_hunk_of_equal_lines_is_applied_at_the_nearest_place() -> None:
    hunk = "--- a/f\n+++ b/f\n@@ -{} +1 @@\n-a\n a\n"
    for line, left in ((1, "axaa"), (3, "aax")):
        (file,) = read_patch(hunk.format(line))
        text = "\n".join("aaxaa" if line == 1 else "aaax")
        assert apply_hunks(text, file.hunks) == "\n".join(left)


def test_a_diff_of_more_hunks_than_a_file_has_room_for_is_refused() -> None:
    (file,) = read_patch("--- a/f\n+++ b/f\n" + "@@ -1 +1 @@\n-a\n" * 20)
    with pytest.raises(PatchFailed, match="20 hunks for 1,000,001 lines: join hunks"):
        apply_hunks("a\n" * 1_000_000, file.hunks)


def test_a_cut_text_has_its_begin_its_end_and_what_is_missing() -> None:
    text = "a" * 3000 + "b" * 3000
    short = cut(text, 900)
    assert short.startswith("a" * 300 + "\n[5,100 characters are left out here]\n")
    assert short.endswith("b" * 600)
    assert cut(text, 6000) == text


def test_lines_are_numbered_and_the_rest_is_told() -> None:
    assert numbered("a\nb\nc\nd\n", 2, 2) == "    2  b\n    3  c\n[1 more lines]"
    assert numbered("a\n", 7, 2) == ""


def test_a_syntax_error_is_told_with_its_line() -> None:
    found = syntax_error("x.py", "a = 1\nif a\n    b\n")
    assert found is not None
    assert found[0] == 2
    assert syntax_error("x.py", "a = 1\n") is None
    assert syntax_error("x.txt", "if a") is None


def test_a_later_hunk_is_placed_by_what_the_earlier_ones_have_moved() -> None:
    """The line `x` is there twice, and the first one has moved to where the second one was."""
    diff = "--- a/x.py\n+++ b/x.py\n@@ -1 +1,3 @@\n a\n+n\n+n\n@@ -4 +6 @@\n-x\n+y\n"
    (file,) = read_patch(diff)
    assert apply_hunks("a\nx\nb\nx\n", file.hunks) == "a\nn\nn\nx\nb\ny\n"


VALUES = [
    *(None, True, 0, -7, 2**80, 1.5, -0.0, math.inf, "a\ud800", 2j, b"\x00\xff", bytearray(b"x")),
    *([1, [2.0]], (1, (2,)), {"a": 1, 2: (3,)}, {1, 2}, frozenset({"b"}), [], (), {}, {(1, 2): {}}),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_is_the_same_with_its_type_after_json(value: Any) -> None:
    found = decode(json.loads(json.dumps(encode(value))))
    assert type(found) is type(value)
    assert repr(found) == repr(value)


class Likeness(list):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    "value",
    [object(), Likeness(), len, range(3), type, [object()]],
    ids=["object", "subclass", "function", "range", "type", "nested"],
)
def test_no_other_type_is_encoded(value: Any) -> None:
    with pytest.raises(TypeError):
        encode(value)


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="levels"):
        encode(value)


@pytest.mark.parametrize("found", [[1], {}, {"a": 1, "b": 2}, {"eval": "1"}, {"list": 3}])
def test_other_json_is_no_value(found: Any) -> None:
    with pytest.raises(ValueError, match="tagged JSON"):
        decode(found)
