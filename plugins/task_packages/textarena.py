"""TextArena's games for one player, by the name of an environment.

Only games that were seen to play without a network are taken: the others fetch word lists or ask a
model when they are imported. The package draws from Python's global generator, so each game gets
its own state of it, and games take turns.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import random
import re
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar, cast

from composer_mesh.plugins.task_packages.requirement import Requirement
from composer_mesh.tasks.errors import ToolError, UnusableTask
from composer_mesh.tasks.reward import Transcript, reward
from composer_mesh.tasks.rows import Row
from composer_mesh.tasks.session import Reply, Session
from composer_mesh.tasks.task import Task

TEXTARENA = Requirement(
    "textarena",
    "textarena",
    "textarena",
    ("0.7.4",),
    "pip install 'composer-mesh[textarena]'",
)
GAMES = {
    "2048": "ultra-easy mega-easy super-easy very-easy easy  hard very-hard extreme 3x3 5x5 6x6",
    "Bandit": " hard",
    "Blackjack": " long",
    "FifteenPuzzle": "",
    "FrozenLake": " random hardcore",
    "GuessTheNumber": " hardcore",
    "LightsOut": "",
    "Mastermind": " hard extreme",
    "Secretary": " long",
    "Set": "",
    "Sudoku": "very-easy easy  medium",
}
"""Games with their variants; an empty word stands for the game itself."""

NAMES = frozenset(
    f"{game}-v0-{variant}" if variant else f"{game}-v0"
    for game, variants in GAMES.items()
    for variant in variants.split(" ")
)
SEEDS = 2**31
ACTION = re.compile(r"\[[^\[\]]{1,200}\]")
LONGEST_ACTION = 10_000
_turn = threading.Lock()


class Game:
    """One game, with a state of the random generator that is its own."""

    def __init__(self, library: Any, name: str, seed: int) -> None:
        self._random: Any = random.Random(seed).getstate()
        with self._own_random():
            self.environment = library.make(f"{name}-raw")
            self.environment.reset(num_players=1, seed=seed)

    def observed(self) -> str:
        """Return what has been shown since the last call."""
        _, found = self.environment.get_observation()
        return "\n".join(str(text) for _, text, kind in found if kind.name != "PLAYER_ACTION")

    def step(self, action: str) -> bool:
        """Apply an action; whether the game has ended."""
        with self._own_random():
            done, _ = self.environment.step(action)
        return bool(done)

    @property
    def refused(self) -> bool:
        """Whether the last action was against the rules."""
        state = self.environment.state
        return bool(state.error_count) or bool(state.game_info[0]["invalid_move"])

    @property
    def score(self) -> float:
        """The reward of the game, from 0 to 1; 0 while it continues."""
        value = float((self.environment.state.rewards or {0: 0.0})[0])
        if not math.isfinite(value):
            raise UnusableTask(f"a game of textarena was scored {value}")
        return min(1.0, max(0.0, value))

    @property
    def problem(self) -> str:
        """A digest of all that the game begins with, the hidden parts too."""
        whole = repr(sorted(self.environment.state.game_state.items(), key=lambda one: one[0]))
        return hashlib.sha256(whole.encode()).hexdigest()[:16]

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        with _turn:
            others = random.getstate()
            random.setstate(self._random)
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # some games print
                    yield
            finally:
                self._random = random.getstate()
                random.setstate(others)


class GameSession(Session):
    """One game; an action is a text with something in square brackets."""

    task: TextArena

    def start(self) -> None:
        self.game = self.task.game(self.row["seed"])

    def opening(self) -> str:
        return f"{self.game.observed()}\n\nWrite one action in square brackets in each message."

    def reply(self, text: str) -> Reply:
        """Give the game the action, without the text around it, which some games refuse.

        A text with several actions is given whole: each game says which one of them counts.
        """
        actions = ACTION.findall(text) if len(text) <= LONGEST_ACTION else []
        if not actions:
            raise ToolError("action_format", "write one action in square brackets, as in [action]")
        done = self.game.step(actions[0] if len(actions) == 1 else text)
        shown = self.game.observed()
        error = None
        if self.game.refused:
            error = ToolError("invalid_move", shown[:500], {"text": shown[:200]})
        return Reply([{"role": "user", "content": shown or "Go on."}], done, error)


class TextArena(Task):
    """One game for one player, played from many seeds; the reward is the game's, from 0 to 1."""

    name = "textarena"
    session_class = GameSession
    hint_templates: ClassVar[Mapping[str, str]] = {
        "action_format": "An action is written in square brackets, as the rules of the game say.",
        "invalid_move": "The game refused this action: {text}",
    }

    def __init__(self, name: str) -> None:
        if name not in NAMES:
            raise UnusableTask(
                f"options.name is {str(name)[:60]!r}, which is not a game that plays alone and "
                f"without a network, from more than one start: name one of "
                f"{', '.join(sorted(NAMES))}"
            )
        self._game = name
        self.name = f"textarena.{name}"  # type: ignore[misc]

    @cached_property
    def library(self) -> Any:
        """The module that makes games."""
        return TEXTARENA.imported()

    def load(self) -> None:
        _ = self.library

    def game(self, seed: int) -> Game:
        """Return a new game from a seed."""
        return Game(self.library, self._game, seed)

    def generate(self, rng: random.Random) -> Row:
        seed = rng.randrange(SEEDS)
        return {"seed": seed, "problem": self.game(seed).problem}

    def identity(self, row: Row) -> str:
        return str(row["problem"])

    def prompt(self, row: Row) -> str:
        return self.game(row["seed"]).observed()

    @reward
    def score(self, transcript: Transcript) -> float:
        """What the game was worth."""
        return cast(GameSession, transcript.session).game.score

    def gold(self, row: Row) -> list[str]:
        """Return the actions that win; known for games whose hidden state says them."""
        state = self.game(row["seed"]).environment.state.game_state
        if self._game.startswith("GuessTheNumber"):
            return [f"[{state['game_number']}]"]
        if self._game.startswith("Mastermind"):
            return [f"[{' '.join(map(str, state['secret_code']))}]"]
        if self._game.startswith("FrozenLake"):
            return [f"[{step}]" for step in _way(state)]
        raise UnusableTask(
            f"no gold actions are known for {self._game}: take GuessTheNumber, Mastermind or "
            "FrozenLake, or evaluate a model"
        )


STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def _way(state: Mapping[str, Any]) -> list[str]:
    """Return the shortest way over a frozen lake without a hole in it."""
    grid, goal = state["grid"], tuple(state["goal_pos"])
    ways: dict[tuple[int, int], list[str]] = {tuple(state["player_pos"]): []}
    for place in (queue := list(ways)):
        for name, (down, right) in STEPS.items():
            there = (place[0] + down, place[1] + right)
            inside = 0 <= there[0] < len(grid) and 0 <= there[1] < len(grid)
            if inside and there not in ways and grid[there[0]][there[1]] != "H":
                ways[there] = [*ways[place], name]
                queue.append(there)
    return ways[goal]
