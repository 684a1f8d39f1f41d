"""Reasoning Gym: one family of generated puzzles with a verifier, by its name.

Several of its verifiers evaluate an answer as Python. What they would evaluate is screened here
before they see it, and families whose answers cannot be screened are refused.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import random
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, cast

from composer_mesh.plugins.task_packages.requirement import Requirement
from composer_mesh.tasks.errors import ToolError, UnusableTask
from composer_mesh.tasks.reward import Transcript, reward
from composer_mesh.tasks.rows import Row
from composer_mesh.tasks.session import Reply, Session
from composer_mesh.tasks.task import Task

REASONING_GYM = Requirement(
    "reasoning_gym",
    "reasoning_gym",
    "reasoning_gym",
    ("0.1.25",),
    "pip install 'composer-mesh[reasoning-gym]'",
)
SEEDS = 2**31
"""Each problem has a seed of its own: some families prepare all that may be requested of them."""

LONGEST_ANSWER = 10_000
MOST_LEVEL = 100
FORMAT = "Write your final answer, and nothing else, between <answer> and </answer>."
OPEN, CLOSE = "<answer>", "</answer>"

WITHOUT_SOLUTION = frozenset(
    {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
)
"""Families whose stored answer is not accepted by their own verifier."""

REFUSED = {
    "composite": "it mixes families: name each under [[data.mixture]]",
    "simple_integration": "its verifier evaluates formulas that the model wrote as Python",
    "intermediate_integration": "its verifier evaluates formulas that the model wrote as Python",
    "polynomial_multiplication": "its verifier evaluates formulas that the model wrote as Python",
}
ARITHMETIC = frozenset({"countdown", "puzzle24"})
"""Families whose verifier evaluates an answer as arithmetic."""

LISTS = frozenset({"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"})
"""Families whose verifier evaluates an answer as a list, for a part of the reward."""

_DIGITS = re.compile(r"[\d+\-*/()\s]{1,200}")
_PLAIN = re.compile(r"[\w \n]*")


class PuzzleSession(Session):
    """A question that is answered once."""

    answer: str | None = None

    def reply(self, text: str) -> Reply:
        """Take the answer; one without the tags can be written again."""
        answer = last_answer(text)
        if answer is None:
            raise ToolError("answer_format", FORMAT, {"format": FORMAT})
        self.answer = answer
        return Reply()


def last_answer(text: str) -> str | None:
    """Return what stands between the last tags; None without them."""
    found, end = None, 0
    while (start := text.find(OPEN, end)) >= 0 and (end := text.find(CLOSE, start)) >= 0:
        found = text[start + len(OPEN) : end].strip()
    return found


class ReasoningGym(Task):
    """Puzzles of one family; `level` is that of its curriculum, `config` its own parameters.

    The reward is 1 for an answer that is accepted in full, else 0; with `partial` it is the
    verifier's own score.
    """

    name = "reasoning_gym"
    session_class = PuzzleSession
    hint_templates: ClassVar[Mapping[str, str]] = {"answer_format": "{format}"}

    def __init__(
        self,
        name: str,
        level: int | None = None,
        config: Mapping[str, Any] | None = None,
        partial: bool = False,
    ) -> None:
        if name in REFUSED:
            raise UnusableTask(f"options.name is {name!r}: {REFUSED[name]}")
        if level is not None and not 0 <= level <= MOST_LEVEL:
            raise UnusableTask(f"options.level is {level} but goes from 0 to {MOST_LEVEL}")
        self._family, self._level, self._partial = name, level, partial
        self._given = dict(config or {})
        self.name = f"reasoning_gym.{name}"  # type: ignore[misc]

    @cached_property
    def library(self) -> Any:
        """The module that makes data sets: DATASETS, CURRICULA and create_dataset."""
        return REASONING_GYM.imported("factory")

    def load(self) -> None:
        if self._family not in self.library.DATASETS:
            known = ", ".join(sorted(set(self.library.DATASETS) - set(REFUSED)))
            raise UnusableTask(f"options.name is {self._family!r}: name one of {known}")
        _, kind = self.library.DATASETS[self._family]
        fields = {one.name for one in dataclasses.fields(kind)} - {"seed", "size"}
        if unknown := sorted(set(self._given) - fields):
            raise UnusableTask(
                f"options.config holds {', '.join(unknown)}, but {self._family} takes "
                f"{', '.join(sorted(fields)) or 'nothing'}: correct it"
            )
        self._config = {**self._of_level(), **self._given}
        try:
            self._data(0)
        except (AssertionError, ValueError, TypeError) as error:
            raise UnusableTask(f"{self._family} refuses options.config: {error}") from error

    def generate(self, rng: random.Random) -> Row:
        seed = rng.randrange(SEEDS)
        return {"seed": seed, "question": str(self._data(seed)[0]["question"])}

    def identity(self, row: Row) -> str:
        return str(row["question"])

    def prompt(self, row: Row) -> str:
        return f"{row['question']}\n\n{FORMAT}"

    @reward
    def solved(self, transcript: Transcript) -> float:
        """The verifier's score of the answer, from 0 to 1."""
        answer = cast(PuzzleSession, transcript.session).answer
        if not answer or not self._is_safe(answer):
            return 0.0
        score = self._score(answer, self._data(transcript.row["seed"]))
        return score if self._partial else float(score >= 1.0)

    def gold(self, row: Row) -> list[str]:
        if self._family in WITHOUT_SOLUTION:
            raise UnusableTask(
                f"{self._family} stores no solution that its verifier accepts, so there are no "
                "gold actions: evaluate a model, or another family"
            )
        return [f"<answer>{self._data(row['seed'])[0]['answer']}</answer>"]

    def _of_level(self) -> dict[str, Any]:
        """Return the parameters at a level of the family's curriculum."""
        if self._level is None:
            return {}
        if self._family not in self.library.CURRICULA:
            raise UnusableTask(
                f"options.level is {self._level}, but {self._family} has no curriculum: set "
                "options.config in its place"
            )
        curriculum = self.library.CURRICULA[self._family]()
        curriculum.set_global_level(self._level)
        found = vars(curriculum.generate_configuration())
        return {key: value for key, value in found.items() if key not in ("seed", "size")}

    def _data(self, seed: int) -> Any:
        return self.library.create_dataset(self._family, **self._config, seed=seed, size=1)

    def _score(self, answer: str, data: Any) -> float:
        try:
            score = float(data.score_answer(answer, data[0]))
        except Exception:  # noqa: BLE001  verifiers raise for answers that they cannot read
            return 0.0
        if not math.isfinite(score):
            raise UnusableTask(f"the verifier of {self._family} returned {score}")
        return min(1.0, max(0.0, score))

    def _is_safe(self, answer: str) -> bool:
        """Whether a verifier that evaluates this answer as Python computes nothing dangerous."""
        if len(answer) > LONGEST_ANSWER:
            return False
        if self._family in ARITHMETIC:
            return bool(_DIGITS.fullmatch(answer)) and "**" not in answer
        if self._family in LISTS:
            return bool(_PLAIN.fullmatch(answer)) or _is_literal(answer)
        return True


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True
