"""Held-out rows are never trained on, and every process draws the same rows."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from composer_mesh import Task, TaskSettings
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.gsm8k import Gsm8kTask
from composer_mesh.tasks.loading import heldout_indices
from composer_mesh.tasks.rows import read_rows, row_identity

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
