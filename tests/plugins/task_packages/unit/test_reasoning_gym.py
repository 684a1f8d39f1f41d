"""Reasoning Gym's families, with a small library of our own in place of the package."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest

from composer_mesh.plugins.task_packages.reasoning_gym import ReasoningGym
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.task import TaskSettings

EVALUATED: list[str] = []


@dataclass
class Config:
    seed: int = 0
    size: int = 1
    largest: int = 1_000_000


class Data:
    """Sums; the verifier evaluates what it is given, as some of the package's do."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = random.Random(self.config.seed + index).randint(0, self.config.largest)
        return {"question": f"Write {number}.", "answer": str(number), "metadata": {}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        EVALUATED.append(answer)
        if answer == "raise":
            raise ValueError("unreadable")
        scores = {"nan": float("nan"), "too much": 7.0, entry["answer"]: 1.0}
        return scores.get(answer, 0.01)


class Curriculum:
    def set_global_level(self, level: int) -> None:
        self.level = level

    def generate_configuration(self) -> Config:
        return Config(largest=10 ** (self.level + 2))


NAMES = ("sums", "countdown", "n_queens", "rush_hour")
LIBRARY = SimpleNamespace(
    DATASETS=dict.fromkeys(NAMES, (Data, Config)),
    CURRICULA={"sums": Curriculum},
    create_dataset=lambda name, **config: Data(Config(**config)),
)


class FakeGym(ReasoningGym):
    @cached_property
    def library(self) -> Any:
        return LIBRARY


def made(name: str = "sums", **options: Any) -> FakeGym:
    return FakeGym.create(TaskSettings(max_turns=3), name=name, **options)


def scored(task: FakeGym, *actions: str) -> tuple[float, list[str]]:
    kinds = []
    with SyncSession(task, task.episode("heldout", 0)) as session:
        for action in actions:
            step = session.step(action)
            kinds += [step.error.error_kind] if step.error else []
            if step.done:
                break
        return session.outcome().reward, kinds


def answered(answer: str) -> str:
    return f"I think so. <answer>{answer}</answer>"


def test_gold_is_accepted_and_an_empty_answer_is_refused() -> None:
    task = made()
    assert scored(task, *task.gold(task.episode("heldout", 0).payload)) == (1.0, [])
    assert scored(task, "", "", "")[0] == 0.0
    assert scored(task, answered(""))[0] == 0.0


def test_an_answer_without_the_stated_format_is_an_error_and_can_be_written_again() -> None:
    task = made()
    [gold] = task.gold(task.episode("heldout", 0).payload)
    assert "<answer>" in str(task.prompt(task.episode("heldout", 0).payload))
    assert scored(task, "42", gold) == (1.0, ["answer_format"])


def test_a_part_of_the_reward_counts_only_where_it_is_asked_for() -> None:
    assert scored(made(), answered("wrong"))[0] == 0.0
    assert scored(made(partial=True), answered("wrong"))[0] == 0.01
    assert scored(made(partial=True), answered("too much"))[0] == 1.0


def test_a_verifier_that_raises_refuses_the_answer_and_one_that_returns_no_number_is_told() -> None:
    assert scored(made(), answered("raise"))[0] == 0.0
    with pytest.raises(UnusableTask, match="returned nan"):
        scored(made(), answered("nan"))


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("countdown", "__import__('os').abort()"),
        ("countdown", "9**9**9"),
        ("countdown", "(1).__class__"),
        ("n_queens", "__import__('os').abort()"),
        ("n_queens", "[x for x in [1]]"),
        ("n_queens", "print(1)"),
        ("n_queens", "[0]*10**10"),
        ("sums", "a" * 20_000),
    ],
)
def test_code_in_an_answer_never_reaches_a_verifier_that_evaluates(
    family: str, answer: str
) -> None:
    EVALUATED.clear()
    assert scored(made(family), answered(answer))[0] == 0.0
    assert EVALUATED == []


@pytest.mark.parametrize(
    ("family", "answer"),
    [("countdown", "(3 + 4) * 2"), ("n_queens", "[['Q', '_']]"), ("n_queens", "Q _\n_ Q")],
)
def test_answers_in_the_form_that_is_asked_for_reach_the_verifier(family: str, answer: str) -> None:
    EVALUATED.clear()
    scored(made(family), answered(answer))
    assert answer in EVALUATED


@pytest.mark.parametrize("family", ["simple_integration", "polynomial_multiplication", "composite"])
def test_families_whose_verifier_evaluates_formulas_are_refused(family: str) -> None:
    with pytest.raises(UnusableTask, match=r"evaluates formulas|mixes families"):
        made(family)


def test_families_without_a_stored_solution_have_no_gold_actions() -> None:
    task = made("rush_hour")
    with pytest.raises(UnusableTask, match="stores no solution that its verifier accepts"):
        task.gold(task.episode("heldout", 0).payload)


def test_a_level_sets_the_parameters_of_the_curriculum_and_config_overrides_them() -> None:
    assert made(level=1)._config == {"largest": 1_000}
    assert made(level=1, config={"largest": 5_000})._config == {"largest": 5_000}
    with pytest.raises(UnusableTask, match="has no curriculum"):
        made("countdown", level=1)
    with pytest.raises(UnusableTask, match="sums takes largest"):
        made(config={"smallest": 1})
    with pytest.raises(UnusableTask, match="name one of"):
        made("no_such_family")


def test_training_and_held_out_questions_differ() -> None:
    task = made(config={"largest": 30})
    train = {task.episode("train", i).payload["question"] for i in range(40)}
    held = {task.episode("heldout", i).payload["question"] for i in range(40)}
    assert not train & held
