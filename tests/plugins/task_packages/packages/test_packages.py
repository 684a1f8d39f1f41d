"""Each package's gold actions are accepted, its empty answers refused, and nothing is fetched."""

from __future__ import annotations

import importlib
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from composer_mesh.plugins.task_packages.bfcl.single_call import (
    BfclSingleCall,
    DocumentedFunction,
    difference,
)
from composer_mesh.plugins.task_packages.reasoning_gym import LISTS, REFUSED, WITHOUT_SOLUTION
from composer_mesh.rollouts.tool_calls import ToolCall, parse_action
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


@pytest.mark.parametrize(("part", "rows"), [("sft", 337), ("rl", 138)])
def test_all_single_calls_of_bfcl_accept_gold_and_refuse_empty_answers(
    part: str, rows: int
) -> None:
    task = task_class("bfcl_single_call").create(SETTINGS, part=part)
    assert (len(task.rows("train") or []), len(task.rows("heldout") or [])) == (rows, 125)
    assert successes(task, 125, gold=True) == 125
    assert successes(task, 125, gold=False) == 0


def test_single_calls_are_judged_as_by_the_checker_of_bfcl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own table of models is replaced: reading it needs the clients of all of them."""
    models = ModuleType("bfcl_eval.constants.model_config")
    models.MODEL_CONFIG_MAPPING = {"none": SimpleNamespace(underscore_to_dot=False)}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, models.__name__, models)
    checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    language = importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON
    task = BfclSingleCall.create(SETTINGS, part="sft")
    judged: Counter[tuple[bool, bool]] = Counter()
    for row in task.rows("train") or []:
        name, answers = task.answers[row["id"]]
        function = cast(DocumentedFunction, task.functions(row["id"])[name])
        document = {"name": name, "parameters": function.document}
        for arguments in _variants(read_gold(task, row), answers):
            ours = difference(arguments, answers, function.document) is None
            theirs = checker.simple_function_checker(
                document, {name: arguments}, {name: answers}, language, "none"
            )["valid"]
            judged[ours, theirs] += 1
    # The checker takes the type of a first possible value for the parameter's in two answers.
    assert judged[True, False] == 0
    assert judged[False, True] <= 2
    assert judged[True, True] > 2_000
    assert judged[False, False] > 5_000


def read_gold(task: Any, row: Any) -> dict[str, Any]:
    call = parse_action(task.gold(row)[0])
    assert isinstance(call, ToolCall)
    return call.arguments


def _variants(gold: dict[str, Any], answers: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Yield the gold arguments, and changes of one of them, right and wrong ones."""
    yield gold
    yield {**gold, "unknown": 1}
    for name, value in gold.items():
        yield {key: one for key, one in gold.items() if key != name}
        others: list[Any] = [str(value), None, True, 0, 1, [], [value]]
        if isinstance(value, str):
            others += [value.upper(), value + " ", value + "x", value.replace(" ", ",")]
        if type(value) in (int, float):
            others += [float(value), value + 1, int(value)]
        if isinstance(value, list):
            others += [value[::-1], [*value, *value[:1]], [str(one) for one in value]]
        others += [one for one in answers[name] if not isinstance(one, dict)]
        yield from ({**gold, name: one} for one in others)


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
