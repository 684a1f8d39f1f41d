"""TextArena's games, with a small game of our own in place of the package."""

from __future__ import annotations

import random
from enum import Enum
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest

from composer_mesh.plugins.task_packages.textarena import NAMES, TextArena
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.playing import SyncSession
from composer_mesh.tasks.task import TaskSettings


class Kind(Enum):
    PROMPT = 1
    PLAYER_ACTION = 2


class Guess:
    """Guess a number; it draws from the global generator, as the package's games do."""

    def reset(self, num_players: int, seed: int) -> None:
        random.seed(seed)
        self.state: Any = SimpleNamespace(
            game_state={"game_number": random.randint(1, 1_000)},
            error_count=0,
            game_info={0: {"invalid_move": False}},
            rewards=None,
        )
        self._said = [(-1, "Guess a number.", Kind.PROMPT)]

    def get_observation(self) -> tuple[int, list[Any]]:
        said, self._said = self._said, []
        return 0, said

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        number = action.strip("[] ")
        self.state.error_count = int(not number.isdigit())
        self._said = [(0, action, Kind.PLAYER_ACTION), (-1, f"roll {random.random()}", Kind.PROMPT)]
        if number == "77":
            self.state.rewards = {0: float("nan")}
        elif number == str(self.state.game_state["game_number"]):
            self.state.rewards = {0: 3.0}
        elif number == "0":
            self.state.rewards = {0: -1.0}
        return self.state.rewards is not None, {}


class FakeArena(TextArena):
    @cached_property
    def library(self) -> Any:
        return SimpleNamespace(make=lambda name: Guess())


def made() -> FakeArena:
    return FakeArena.create(TaskSettings(max_turns=4), name="GuessTheNumber-v0")


def test_gold_is_accepted_with_a_reward_of_at_most_one_and_an_empty_answer_is_refused() -> None:
    task = made()
    episode = task.episode("heldout", 0)
    with SyncSession(task, episode) as session:
        [action] = task.gold(episode.payload)
        assert session.step(action).done
        assert session.outcome().reward == 1.0
    with SyncSession(task, episode) as session:
        steps = [session.step("") for _ in range(4)]
        assert session.outcome().reward == 0.0
    assert {step.error.error_kind for step in steps if step.error} == {"action_format"}


def test_a_text_around_the_action_is_not_given_to_the_game() -> None:
    task = made()
    episode = task.episode("train", 0)
    with SyncSession(task, episode) as session:
        step = session.step(f"It must be {task.gold(episode.payload)[0]}, I think.")
        assert (step.done, session.outcome().reward) == (True, 1.0)


def test_actions_against_the_rules_are_error_sites_and_the_game_goes_on() -> None:
    task = made()
    with SyncSession(task, task.episode("train", 0)) as session:
        kinds = [getattr(session.step(text).error, "error_kind", None) for text in ("9", "[x]")]
        assert kinds == ["action_format", "invalid_move"]
        assert session.step("[0]").done
        assert session.outcome().reward == 0.0


def test_a_reward_that_is_no_number_is_refused() -> None:
    task = made()
    with SyncSession(task, task.episode("train", 0)) as session:
        session.step("[77]")
        with pytest.raises(UnusableTask, match="scored nan"):
            session.outcome()


def test_games_that_take_turns_draw_as_if_alone_and_leave_the_generator_as_it_was() -> None:
    task = made()

    def shown(seed: int, between: Any) -> list[str]:
        game, texts = task.game(seed), []
        for _ in range(3):
            between()
            game.step("[5000]")
            texts.append(game.observed())
        return texts

    other = task.game(2)
    random.seed(9)
    before = random.getstate()
    assert shown(1, lambda: None) == shown(1, lambda: other.step("[5000]"))
    assert random.getstate() == before


@pytest.mark.parametrize(
    "name", ["Wordle-v0", "Hangman-v0", "Chess-v0", "TowerOfHanoi-v0", "os", "../x"]
)
def test_games_that_fetch_ask_a_model_or_have_one_start_are_refused(name: str) -> None:
    with pytest.raises(UnusableTask, match="plays alone and without a network"):
        TextArena(name)


def test_games_without_known_gold_actions_say_so() -> None:
    task = FakeArena.create(TaskSettings(), name="2048-v0")
    with pytest.raises(UnusableTask, match="no gold actions are known"):
        task.gold(task.episode("train", 0).payload)
    assert "2048-v0" in NAMES
