"""Each package's gold actions are accepted, its empty answers refused, and nothing is fetched.

TextArena's own games, played to their ends by scripted policies.
"""

from __future__ import annotations

import importlib
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle, product
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from composer_mesh.plugins.task_packages.bfcl.single_call import (
    BfclSingleCall,
    DocumentedFunction,
    difference,
)
from composer_mesh.plugins.task_packages.reasoning_gym import LISTS, REFUSED, WITHOUT_SOLUTION
from composer_mesh.plugins.task_packages.textarena import Game, GameSession, TextArena
from composer_mesh.plugins.task_packages.textarena import _way as shortest_path
from composer_mesh.rollouts.tasks import Outcome, StepResult
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


GAME_SETTINGS = TaskSettings(max_turns=400)


EPISODES = 5


Policy = Callable[[Game], Iterator[str]]


Grid = list[list[bool]]


def made(name: str, settings: TaskSettings = GAME_SETTINGS) -> TextArena:
    task = task_class("textarena").create(settings, name=name)
    assert isinstance(task, TextArena)
    return task


def played(task: TextArena, index: int, policy: Policy) -> tuple[list[StepResult], Outcome, Any]:
    """Return the steps of a held-out episode, its outcome, and the rewards of the game itself."""
    episode = task.episode("heldout", index)
    steps: list[StepResult] = []
    with SyncSession(task, episode) as session:
        own = session._running._session
        assert isinstance(own, GameSession)
        actions = policy(own.game)
        while not steps or not steps[-1].done:
            steps.append(session.step(next(actions)))
        return steps, session.outcome(), own.game.environment.state.rewards


def crack_code(game: Game) -> Iterator[str]:
    yield f"[{' '.join(map(str, game.environment.state.game_state['secret_code']))}]"


def guess_number(game: Game) -> Iterator[str]:
    yield f"[{game.environment.state.game_state['game_number']}]"


def cross_lake(game: Game) -> Iterator[str]:
    for step in shortest_path(game.environment.state.game_state):
        yield f"I go [{step}]."


def solve_sudoku(game: Game) -> Iterator[str]:
    board, whole = game.environment.game_board, game.environment.full_grid
    for row, column in product(range(9), repeat=2):
        if not board[row][column]:
            yield f"[{row + 1} {column + 1} {whole[row][column]}]"


def press(grid: Grid, row: int, column: int) -> None:
    """Toggle a light and its neighbours."""
    for down, right in ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)):
        if 0 <= row + down < 5 and 0 <= column + right < 5:
            grid[row + down][column + right] ^= True


def put_lights_out(game: Game) -> Iterator[str]:
    """Press each combination of the first row, and then below each light that is on."""
    start = game.environment.state.game_state["grid"]
    found: list[list[tuple[int, int]]] = []
    for first in product((False, True), repeat=5):
        grid = [list(row) for row in start]
        pressed = [(0, column) for column in range(5) if first[column]]
        for row, column in pressed:
            press(grid, row, column)
        for row, column in product(range(1, 5), range(5)):
            if grid[row - 1][column]:
                press(grid, row, column)
                pressed.append((row, column))
        if not any(map(any, grid)):
            found.append(pressed)
    for row, column in min(found, key=len):
        yield f"I press the light there: [{row} {column}]"


def slide_tiles(game: Game) -> Iterator[str]:
    """Slide to the first side that moves a tile, to three sides where it can."""
    environment = game.environment
    while True:
        board = environment.state.game_state["board"]
        for number, name in enumerate(("left", "down", "right", "up")):
            before = [list(row) for row in board]
            environment._apply_move({"up": 0, "down": 1, "left": 2, "right": 3}[name])
            moved = before != board
            board[:] = before
            if moved or number == 3:
                yield f"[{name}]"
                break


def repeated(*actions: str) -> Policy:
    return lambda _: cycle(actions)


WINNING: dict[str, Policy] = {
    "Sudoku-v0-very-easy": solve_sudoku,
    "Sudoku-v0": solve_sudoku,
    "LightsOut-v0": put_lights_out,
    "2048-v0-ultra-easy": slide_tiles,
    "FrozenLake-v0": cross_lake,
    "FrozenLake-v0-hardcore": cross_lake,
    "Mastermind-v0-hard": crack_code,
    "Mastermind-v0-extreme": crack_code,
    "GuessTheNumber-v0-hardcore": guess_number,
}


PLAYING: dict[str, Policy] = {
    "2048-v0-3x3": slide_tiles,
    "Bandit-v0": repeated("[red]"),
    "Blackjack-v0": repeated("[Stand]"),
    "FifteenPuzzle-v0": repeated("[up]", "[left]", "[down]", "[right]"),
    "Secretary-v0": repeated("[continue]", "[accept]"),
    "Set-v0": repeated("[1, 2, 3]", "[2, 3, 4]", "[4, 5, 6]"),
}


@pytest.mark.parametrize("name", sorted(WINNING))
def test_a_game_that_is_played_by_its_rules_is_won_with_its_whole_reward(name: str) -> None:
    task = made(name)
    for index in range(EPISODES):
        steps, outcome, rewards = played(task, index, WINNING[name])
        assert (outcome.reward, outcome.success, rewards) == (1.0, True, {0: 1.0})
        assert not any(step.error for step in steps)


@pytest.mark.parametrize("name", sorted(PLAYING))
def test_a_game_that_is_played_to_its_end_has_the_reward_of_the_game_within_0_and_1(
    name: str,
) -> None:
    task = made(name)
    for index in range(EPISODES):
        steps, outcome, rewards = played(task, index, PLAYING[name])
        assert outcome.reward == min(1.0, max(0.0, float(rewards[0])))
        assert len(steps) < GAME_SETTINGS.max_turns


@pytest.mark.parametrize("name", sorted({*WINNING, *PLAYING}))
def test_empty_answers_are_error_sites_up_to_the_turn_limit_and_score_nothing(name: str) -> None:
    steps, outcome, rewards = played(made(name, TaskSettings(max_turns=5)), 0, repeated(""))
    assert [one.error.error_kind for one in steps if one.error] == ["action_format"] * 5
    assert (outcome.reward, outcome.success, rewards) == (0.0, False, None)


@pytest.mark.parametrize("name", sorted({*WINNING, *PLAYING}))
def test_a_move_against_the_rules_is_an_error_site_that_the_agent_reads(name: str) -> None:
    steps, outcome, _ = played(made(name), 0, repeated("[999 999 999 999 no such move]"))
    assert {one.error.error_kind for one in steps if one.error} == {"invalid_move"}
    assert all((one.error and one.messages) or one.done for one in steps)
    assert not outcome.success


@pytest.mark.parametrize("name", ["2048-v0", "LightsOut-v0"])
def test_an_unfinished_game_ends_with_the_turn_limit_and_scores_nothing(name: str) -> None:
    policy = slide_tiles if name == "2048-v0" else repeated("[0 0]")
    steps, outcome, rewards = played(made(name, TaskSettings(max_turns=6)), 0, policy)
    assert (len(steps), outcome.reward, rewards) == (6, 0.0, None)
