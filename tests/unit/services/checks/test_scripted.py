"""All episodes of a task are played by its gold actions and by empty answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.traces import Split
from composer_mesh.services.checks.scripted import describe_scripts
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.reward import Transcript, reward
from composer_mesh.tasks.rows import Row
from composer_mesh.tasks.task import Task


class Echo(Task):
    """Answers are rows' words; rows in both splits are one problem."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words

    def rows(self, split: Split) -> Sequence[Row] | None:
        return [{"word": word} for word in self.words]

    def identity(self, row: Row) -> str:
        return str(row["word"])

    def prompt(self, row: Row) -> str:
        return f"Say {row['word']}"

    def gold(self, row: Row) -> Sequence[str]:
        word = str(row["word"])
        return {"wrong": ["other"], "none": []}.get(word, [word])

    @reward
    def right(self, transcript: Transcript) -> float:
        if transcript.row["word"] == "bad":
            raise ValueError("broken")
        return float(transcript.answer == transcript.row["word"])


def lines(build_config: Any, task: Task, *scripts: Any) -> list[str]:
    config: Config = build_config()
    return list(describe_scripts(config, task, scripts))


def test_each_problem_is_played_once_and_counted(build_config: Any) -> None:
    task = Echo.create(words=["a", "b", "c"])
    assert lines(build_config, task, "gold", "empty") == [
        "task 'echo': gold actions solve 3 of 3 episodes",
        "task 'echo': empty answers solve 0 of 3 episodes",
    ]
    assert lines(build_config, task) == []


@pytest.mark.parametrize(
    ("word", "why"),
    [("wrong", "reward 0"), ("none", "it states none"), ("bad", "ValueError: broken")],
)
def test_a_problem_that_its_gold_actions_do_not_solve_is_named(
    build_config: Any, word: str, why: str
) -> None:
    task = Echo.create(words=["a", word])
    with pytest.raises(UnusableTask, match="do not solve 1 of 2 episodes") as refused:
        lines(build_config, task, "gold")
    assert f"{word} (" in str(refused.value)
    assert why in str(refused.value)


def test_a_problem_that_an_empty_answer_solves_is_named(build_config: Any) -> None:
    with pytest.raises(UnusableTask, match=r"empty answers solve 1 of 2 episodes.*\(reward 1\)"):
        lines(build_config, Echo.create(words=["a", ""]), "empty")
