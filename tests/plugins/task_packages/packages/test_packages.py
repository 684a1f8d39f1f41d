"""Each package's gold actions are accepted, its empty answers refused, and nothing is fetched."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from composer_mesh.plugins.task_packages.reasoning_gym import LISTS, REFUSED, WITHOUT_SOLUTION
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.loading import task_class
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.task import Task, TaskSettings

FAMILIES = (
    *("leg_counting", "gsm_symbolic", "countdown", "spell_backward", "mini_sudoku"),
    *("basic_arithmetic", "n_queens", "word_sorting", "knights_knaves", "spiral_matrix"),
)
SETTINGS = TaskSettings(max_turns=60)


@pytest.fixture(autouse=True)
def _without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a task of a package has opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def successes(task: Task, episodes: int, gold: bool) -> int:
    """Return how many held-out episodes succeed by gold actions, or by empty answers."""
    found = 0
    for index in range(episodes):
        episode = task.episode("heldout", index)
        actions = iter(task.gold(episode.payload) if gold else ())
        with SyncSession(task, episode) as session:
            while not session.step(next(actions, "")).done:
                pass
            found += session.outcome().success
    return found


@pytest.mark.parametrize("category", ["base", "miss_func", "miss_param", "long_context"])
def test_all_200_of_bfcl_accept_gold_and_refuse_empty_answers(category: str) -> None:
    task = task_class("bfcl").create(SETTINGS, train=[], evaluate=[category])
    assert len(task.rows("heldout") or []) == 200
    assert successes(task, 200, gold=True) == 200
    assert successes(task, 200, gold=False) == 0


def test_training_on_bfcl_leaves_out_base_and_every_held_out_scenario() -> None:
    task = task_class("bfcl").create(SETTINGS)
    numbers = {
        split: {row["id"].rpartition("_")[2] for row in task.rows(split) or []}
        for split in ("train", "heldout")
    }
    assert (len(task.rows("train") or []), len(task.rows("heldout") or [])) == (480, 40)
    assert not numbers["train"] & numbers["heldout"]


def test_sixty_tickets_of_tau2_accept_gold_and_refuse_empty_answers() -> None:
    task = task_class("tau2_telecom").create(SETTINGS, evaluate="base")
    assert successes(task, 60, gold=True) == 60
    assert successes(task, 60, gold=False) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_reasoning_gym_accepts_gold_and_refuses_empty_answers(family: str) -> None:
    task = task_class("reasoning_gym").create(SETTINGS, name=family)
    assert successes(task, 20, gold=True) == 20
    assert successes(task, 20, gold=False) == 0


@pytest.mark.parametrize("family", sorted(WITHOUT_SOLUTION))
def test_families_without_a_stored_solution_say_so(family: str) -> None:
    task = task_class("reasoning_gym").create(SETTINGS, name=family)
    with pytest.raises(UnusableTask, match="stores no solution"):
        task.gold(task.episode("heldout", 0).payload)


def test_every_family_whose_verifier_evaluates_text_is_screened_or_refused() -> None:
    import inspect

    from reasoning_gym.factory import DATASETS

    evaluating = {
        name
        for name, (data, _) in DATASETS.items()
        if any(call in inspect.getsource(data.score_answer) for call in ("eval(", "sympy.", "sp."))
        or "parse_expr(answer)" in inspect.getsource(data.score_answer)
    }
    assert evaluating - {*LISTS, *REFUSED, "countdown", "puzzle24"} <= {"number_sorting"}


@pytest.mark.parametrize("game", ["GuessTheNumber-v0", "Mastermind-v0", "FrozenLake-v0-random"])
def test_games_accept_gold_and_refuse_empty_answers(game: str) -> None:
    task = task_class("textarena").create(SETTINGS, name=game)
    assert successes(task, 20, gold=True) == 20
    assert successes(task, 20, gold=False) == 0
