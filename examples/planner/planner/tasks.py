"""Questions for the largest of some numbers, answered at once, in two tries, or by a plan."""

import random
import re

from composer_mesh import Message, Reply, Row, Session, Task, ToolError, Transcript, reward

CRITIQUE = "Is that right? Answer again."


class Largest(Task):
    """Name the largest of three numbers."""

    name = "largest"
    count = 3

    def generate(self, rng: random.Random) -> Row:
        return {"numbers": rng.sample(range(100), self.count)}

    def prompt(self, row: Row) -> str:
        return question(row["numbers"])

    @reward
    def correct(self, transcript: Transcript) -> float:
        """1 if the last answer is right."""
        return float(transcript.answer.strip() == str(max(transcript.row["numbers"])))

    def expert(self, messages: list[Message]) -> str:
        return str(max(numbers(messages[0]["content"])))

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        *others, _ = sorted(numbers(messages[0]["content"]))
        return str(rng.choice(others))


class TwoAnswers(Session):
    """Always asks the agent whether its first answer is right; the second one counts."""

    def start(self) -> None:
        self.answers = 0

    def reply(self, text: str) -> Reply:
        self.answers += 1
        wrong = text.strip() != str(max(self.row["numbers"]))
        error = ToolError("wrong_result", "wrong", {}) if wrong else None
        again = [{"role": "user", "content": CRITIQUE}]
        return Reply(again if self.answers == 1 else [], done=self.answers == 2, error=error)


class LargestInTwo(Largest):
    """The same in two tries."""

    name = "largest_in_two"
    session_class = TwoAnswers


class Plan(Session):
    """Two pairs are compared for the agent, which then answers; a single pair it answers itself."""

    def start(self) -> None:
        self.planned = len(self.row["numbers"]) == 2

    def reply(self, text: str) -> Reply:
        if self.planned:
            return Reply()
        self.planned = True
        pairs = pairs_of(text)
        if len(pairs) != 2:
            said = [{"role": "user", "content": "error: write two pairs"}]
            return Reply(said, done=False, error=ToolError("no_plan", "write two pairs", {}))
        largest = "; ".join(str(max(pair)) for pair in pairs)
        return Reply([{"role": "user", "content": largest}], done=False)


class LargestByPlan(Largest):
    """Name the largest of four numbers by a plan of two pairs, or of two numbers at once.

    The short questions are what a planner asks its workers.
    """

    name = "largest_by_plan"
    session_class = Plan
    hint_templates = {"no_plan": "Write two pairs of the numbers."}

    def generate(self, rng: random.Random) -> Row:
        return {"numbers": rng.sample(range(100), rng.choice((2, 4)))}

    def expert(self, messages: list[Message]) -> str:
        given = numbers(messages[0]["content"])
        if len(given) == 2 or len(messages) > 1:
            return str(max(numbers(messages[-1]["content"]), default=max(given)))
        return "; ".join(f"{a}, {b}" for a, b in (given[:2], given[2:]))

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        return str(min(numbers(messages[-1]["content"]), default=0))


def question(of: list[int]) -> str:
    """The question for the largest of some numbers."""
    return f"Largest of {', '.join(map(str, of))}?"


def numbers(text: str) -> list[int]:
    """The numbers in a text."""
    return [int(one) for one in re.findall(r"\d+", text)]


def pairs_of(plan: str) -> list[list[int]]:
    """The pairs of numbers of a plan."""
    return [pair for part in plan.split(";") if len(pair := numbers(part)) == 2]
