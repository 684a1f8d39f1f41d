"""Held-out rows are never trained on, and every process draws the same rows.

An evaluation plays each held-out problem once, and its interval counts no trial twice.

Several tasks as one: shares by weight, no row lost or repeated, each with its own tools.
"""

from __future__ import annotations

import datetime
import decimal
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from controller_world import World, finished
from repository import ROOT

from composer_mesh import SyncSession, Task, TaskSettings
from composer_mesh.configs.errors import ConfigError
from composer_mesh.configs.load import load_config
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.cli import main
from composer_mesh.services.schedule.metrics import success_of_tasks
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.gsm8k import Gsm8kTask
from composer_mesh.tasks.loading import TaskMixture, fewer_episodes, heldout_indices, make_task
from composer_mesh.tasks.rows import read_rows, row_identity
from composer_mesh.tasks.toolbox import ToolboxTask

HELD_OUT = (
    "heldout",
    "test",
    "testing",
    "validation",
    "valid",
    "val",
    "dev",
    "eval",
    "Test",
    "held-out",
)


class Questions(Task):
    """Rows of a file."""

    def prompt(self, row: Any) -> str:
        return str(row["q"])


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(path: Path, split: Any) -> list[str]:
    rows = Questions.create(TaskSettings(path=path)).rows(split)
    return [row["q"] for row in rows or ()]


@pytest.mark.parametrize("label", HELD_OUT)
def test_rows_that_say_they_are_held_out_are_never_trained_on(label: str, tmp_path: Path) -> None:
    rows = [{"q": f"q{at}", "split": label if at % 5 == 0 else "train"} for at in range(20)]
    path = written(tmp_path, rows)
    assert questions(path, "heldout") == ["q0", "q5", "q10", "q15"]
    assert questions(path, "train") == [f"q{at}" for at in range(20) if at % 5]


def test_a_row_in_both_splits_is_held_out(tmp_path: Path) -> None:
    rows = [{"q": "both", "split": "train"}, {"q": "a", "split": "train"}]
    path = written(tmp_path, [*rows, {"q": "both", "split": "test"}])
    assert (questions(path, "train"), questions(path, "heldout")) == (["a"], ["both"])


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (
            ["train", "test_sft", 3],
            r"with 'test_sft' \(row 2\), '3' \(row 3\).*one of train, .*dev",
        ),
        (["train", None, "test"], r"with 'None' \(row 2\)"),
        (["train", "train"], "2 different rows and none is for 'heldout' with its column 'split'"),
        (["dev", "test"], "none is for 'train' with its column 'split'"),
    ],
)
def test_labels_that_decide_no_split_are_an_error_that_lists_them(
    labels: list[Any], said: str, tmp_path: Path
) -> None:
    rows = [{"q": f"q{at}", "split": label} for at, label in enumerate(labels)]
    with pytest.raises(UnusableTask, match=said):
        questions(written(tmp_path, rows), "train")


def test_of_a_saved_data_set_with_three_splits_only_one_is_trained_on(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    sizes = {"train": 8, "test": 4, "dev": 4}
    made = {
        name: datasets.Dataset.from_list([{"q": f"{name}{at}"} for at in range(size)])
        for name, size in sizes.items()
    }
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / "saved"))
    assert questions(tmp_path / "saved", "train") == [f"train{at}" for at in range(8)]
    assert len(questions(tmp_path / "saved", "heldout")) == 8


def test_labels_of_math_problems_decide_their_splits_too(tmp_path: Path) -> None:
    rows = [
        {
            "question": f"What is {at}?",
            "answer": f"#### {at}",
            "split": "test" if at < 3 else "train",
        }
        for at in range(10)
    ]
    rows.append({**rows[0], "split": "train"})
    task = Gsm8kTask.create(TaskSettings(path=written(tmp_path, rows)))
    assert [row["answer"] for row in task.rows("heldout")] == [0, 1, 2]
    assert [row["answer"] for row in task.rows("train")] == list(range(3, 10))


class Drawn(Task):
    """Rows with one field of a kind that is given."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def generate(self, rng: random.Random) -> dict[str, Any]:
        return {"number": rng.randint(1, 10**6), "tags": self.made()}


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda: {"a", "b"}, "set"),
        (lambda: [{"deep": frozenset("ab")}], "frozenset"),
        (object, "object"),
        (lambda: np.int64(3), "int64"),
        (lambda: np.zeros(2), "ndarray"),
        (lambda: {("a", 1): 2}, "tuple"),
        (lambda: {"a": 1, 2: 3}, "'<' not supported"),
    ],
)
def test_a_row_that_json_cannot_carry_is_refused_with_its_field(made: Any, kind: str) -> None:
    said = f"train episode 3 of task 'drawn': JSON cannot carry the field 'tags'.*{kind}"
    with pytest.raises(UnusableTask, match=said):
        Drawn.create(made=made).episode("train", 3)


def test_rows_of_own_code_that_json_cannot_carry_are_refused_when_they_are_compared() -> None:
    class Own(Questions):
        def rows(self, split: Any) -> Any:
            return [{"q": "a"}, {"q": object()}]

    with pytest.raises(UnusableTask, match=r"heldout episode 1 of task 'own'.*field 'q'"):
        heldout_indices(Own.create(), 4)


def test_dates_decimals_and_bytes_of_a_file_are_parts_of_an_identity() -> None:
    rows = [
        {"at": datetime.datetime(2026, 1, 2, 3), "price": decimal.Decimal("1.50"), "raw": b"a"},
        {"at": datetime.datetime(2026, 1, 2, 4), "price": decimal.Decimal("1.50"), "raw": b"a"},
    ]
    assert row_identity(rows[0]) == row_identity({**rows[0]})
    assert row_identity(rows[0]) != row_identity(rows[1])
    assert (
        row_identity({"b": [1], "a": {"d": 1, "c": None}}) == '{"a": {"c": null, "d": 1}, "b": [1]}'
    )


EVERY_EPISODE = """
import datetime, json, random
from composer_mesh import Task, TaskSettings
from composer_mesh.configs import plugins
from composer_mesh.tasks.loading import task_class
from composer_mesh.tasks.rows import read_rows, row_identity

class Mixed(Task):
    def generate(self, rng):
        day = datetime.date(2026, 1, rng.randint(1, 28))
        return {"day": day, "pair": (rng.random(), None), "words": rng.sample("abcdefgh", 3)}

names = ["toolbox", "tool_chains", "home_devices", "one_liners"]  # the last three are of plugins
names = [name for name in names if plugins.find("tasks", name)]
for task in [*(task_class(name) for name in names), Mixed]:
    made = task.create(TaskSettings(seed=5, max_turns=10))
    for split in ("train", "heldout"):
        for index in range(60):
            print(task.__name__, split, index, row_identity(made.episode(split, index).payload))
"""


def test_two_processes_draw_the_same_episodes() -> None:
    said = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        ran = subprocess.run(
            [sys.executable, "-c", EVERY_EPISODE],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
        )
        said.append(ran.stdout.splitlines())
    assert len(said[0]) in (2 * 2 * 60, 5 * 2 * 60)
    assert said[0] == said[1]
    drawn = [line.split(" ", 3) for line in said[0]]
    for task in {one[0] for one in drawn}:
        train, heldout = (
            {row for name, named, _, row in drawn if (name, named) == (task, split)}
            for split in ("train", "heldout")
        )
        assert not train & heldout


LINES = b'{"q": 1}\n' + '{"q": "caf\u00e9"}\n'.encode("latin-1")


UTF_16 = '{"q": "x"}\n'.encode("utf-16")


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.jsonl", LINES, "line 2 is not UTF-8: byte 0xe9 at offset 10"),
        ("a.json", b'["caf\xe9"]', "is not UTF-8: byte 0xe9 at offset 5"),
        ("a.jsonl", UTF_16, "line 1 is not UTF-8: byte 0xff at offset 0"),
    ],
)
def test_rows_that_are_not_utf_8_are_refused_with_file_place_and_repair(
    tmp_path: Path, name: str, content: bytes, where: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnusableTask, match=f"{name}.*{where}: save it as UTF-8, such as by iconv"):
        read_rows(tmp_path / name)


def test_lines_end_as_in_any_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"q": "\u00e9"}\r\n\n{"q": 2}'.encode())
    assert read_rows(tmp_path / "a.jsonl") == [{"q": "\u00e9"}, {"q": 2}]


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """Fifteen questions, three of them held out."""
    rows = [
        {"question": f"What is {number} + 1?", "answer": f"<<{number}+1=1>>\n#### {number + 1}"}
        for number in range(15)
    ]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_problems_that_come_again_are_left_out(problems: Path) -> None:
    task = Gsm8kTask.create(TaskSettings(path=problems, heldout_every=5))
    assert task.episode("heldout", 3).payload == task.episode("heldout", 0).payload
    assert heldout_indices(task, 2) == [0, 1]
    assert heldout_indices(task, 200) == [0, 1, 2]


def test_a_task_that_makes_its_own_problems_has_as_many_as_are_asked_for(
    toolbox: ToolboxTask,
) -> None:
    assert heldout_indices(toolbox, 500) == list(range(500))
    assert fewer_episodes(range(500), 500) == ""


class Repeating(ToolboxTask):
    """A toolbox with three held-out problems."""

    def episode(self, split: Any, index: int) -> Any:
        return super().episode(split, index % 3 if split == "heldout" else index)


async def test_the_interval_of_an_evaluation_counts_each_problem_once(
    tokenizer: Any, build_config: Any
) -> None:
    task = Repeating.create(TaskSettings(seed=3))
    world = World(task, ChatFormat(tokenizer, task.tools))
    controller = await finished(world, build_config(eval={"episodes": 200}))
    assert [evaluation.episodes for evaluation in controller.evaluations] == [3, 3]
    low, high = controller.evaluations[0].interval
    assert (low, high) == pytest.approx((0.4385, 1.0), abs=1e-4)  # of three successes out of three


def test_check_says_that_there_are_fewer_held_out_episodes(
    problems: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ROOT / "configs" / "gsm8k.toml"
    said = "eval.episodes is {} but the data has 3 different held-out episodes"
    for episodes, told in ((3, False), (8, True)):
        settings = [f"data.path={problems}", f"eval.episodes={episodes}"]
        overrides = [part for one in settings for part in ("--set", one)]
        assert main(["check", str(config), *overrides]) == 0
        assert (said.format(episodes) in capsys.readouterr().out) == told


class Second(ToolboxTask):
    """Another task with the same questions."""

    name = "second"


@pytest.fixture
def mixture() -> TaskMixture:
    settings = TaskSettings(seed=3)
    return TaskMixture([ToolboxTask.create(settings), Second.create(settings)], [3.0, 1.0])


def test_training_episodes_have_the_ratio_of_the_weights_at_every_moment(
    mixture: TaskMixture,
) -> None:
    picked = [mixture.pick("train", index).task for index in range(400)]
    for end in range(4, 401, 4):
        assert Counter(picked[:end])["second"] == end // 4
    again = [mixture.pick("train", index).task for index in reversed(range(400))]
    assert again[::-1] == picked


def test_an_episode_is_the_tasks_own_next_one_under_the_mixtures_index(
    mixture: TaskMixture,
) -> None:
    toolbox, second = mixture.parts
    found: dict[str, list[Any]] = {"toolbox": [], "second": []}
    for index in range(40):
        episode = mixture.episode("train", index)
        assert (episode.task, episode.index) == (mixture.pick("train", index).task, index)
        found[episode.task].append(episode.payload)
    assert found["toolbox"] == [toolbox.episode("train", i).payload for i in range(30)]
    assert found["second"] == [second.episode("train", i).payload for i in range(10)]


def test_held_out_episodes_are_taken_from_each_task_in_turn(mixture: TaskMixture) -> None:
    assert [mixture.episode("heldout", i).task for i in range(4)] == ["toolbox", "second"] * 2


def test_a_session_is_that_of_its_own_task(mixture: TaskMixture) -> None:
    episode = next(
        mixture.pick("train", i) for i in range(9) if mixture.pick("train", i).task == "second"
    )
    session = SyncSession(mixture, episode)
    while not session.step(mixture.expert(session.messages)).done:
        pass
    assert session.outcome().success


def test_tasks_of_one_name_are_refused() -> None:
    with pytest.raises(UnusableTask, match="toolbox, toolbox: give each class its own name"):
        TaskMixture([ToolboxTask.create(), ToolboxTask.create()], [1.0, 1.0])


def test_a_config_mixes_tasks(build_config: Any, tmp_path: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from composer_mesh.tasks.toolbox import ToolboxTask\n"
        "class Mine(ToolboxTask):\n    name = 'mine'\n"
    )
    mixed = [{"task": "toolbox"}, {"task": f"{file}:Mine", "weight": 2.0}]
    task = make_task(build_config(data={"mixture": mixed}))
    assert [one.name for one in task.parts] == ["toolbox", "mine"]
    assert Counter(task.pick("train", i).task for i in range(30)) == {"mine": 20, "toolbox": 10}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("", "task is not set"),
        ('task = "toolbox"\n[[data.mixture]]\ntask = "toolbox"', "together with mixture"),
        ('[[data.mixture]]\ntask = "toolbox"\nweight = 0', "weight"),
    ],
)
def test_a_mixture_is_one_way_to_name_tasks(data: str, said: str, tmp_path: Any) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'[run]\nname = "small"\nsteps = 1\n[data]\n{data}\n')
    with pytest.raises(ConfigError, match=said):
        load_config(path)


def test_success_is_told_by_task_where_there_are_several() -> None:
    def trace(task: str, success: bool) -> Trace:
        return Trace("a", 0, 0, task, "heldout", 0, [], [], float(success), success, [])

    assert success_of_tasks([trace("a", True)]) == {}
    found = success_of_tasks([trace("a", True), trace("b", True), trace("b", False)])
    assert found == {"a": (1.0, 1), "b": (0.5, 2)}
