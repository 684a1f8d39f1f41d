"""Tasks with a given number of calls, all of which have to be right.

They have an imperfect agent that does not notice what no tool reports.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from composer_mesh.rollouts.tool_calls import ToolCall, message_text, parse_action
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.errors import ERROR_PREFIX, ToolError, UnusableTask
from composer_mesh.tasks.mistakes import (
    Mistake,
    MistakeKinds,
    as_number,
    calls_and_results,
    corrupt,
    off_by_one,
    stale_value,
)
from composer_mesh.tasks.planned import (
    PlannedCall,
    PlannedTask,
    next_call,
    plan_results,
    question_of,
)

FEWEST_CALLS, MOST_CALLS = 2, 9
UNREPORTED = {
    "wrong_step": "Not this step. Do now: {step}.",
    "extra_step": "Every step is done. End now.",
}
"""Templates of the hints for mistakes that no tool reports."""
HABIT_SHARE = 0.5
"""Share of a long task's mistakes that are the habit of their tool, which the tool reports."""


def value_or_text(content: str) -> Any:
    """Return the number in a tool's response, or the response; None if it is an error."""
    if content.startswith(ERROR_PREFIX):
        return None
    number = as_number(content)
    return content if number is None else number


def accepted_results(
    steps: Sequence[PlannedCall], messages: Sequence[Message], read: Callable[[str], Any]
) -> list[Any]:
    """Return the results of the plan as one sees them who takes accepted calls for right.

    A call stands for the first open step that it is like, whose predecessors are skipped, or else
    for the next step. Skipped steps have the latest result.
    """
    results: list[Any] = []
    for call, content in calls_and_results(messages):
        result = read(content)
        if result is None or len(results) == len(steps):
            continue
        at = len(results)
        like = next((n for n in range(at, len(steps)) if steps[n].is_like(call)), at)
        results += [results[-1] if results else result] * (like - at)
        results.append(result)
    return results


def skipped_call(steps: Sequence[PlannedCall], results: Sequence[Any]) -> str | None:
    """Return the action text of one who forgets the next step; None where none follows it."""
    if not results or len(results) + 1 >= len(steps):
        return None
    return next_call(steps, [*results, results[-1]])


class LongTask(PlannedTask):
    """Episodes of a given number of calls, and a reward for the end result alone."""

    hint_templates: ClassVar[Mapping[str, str]] = UNREPORTED

    def __init__(self, calls: int = 6) -> None:
        if type(calls) is not int or not FEWEST_CALLS <= calls <= MOST_CALLS:
            raise UnusableTask(
                f"data.options.calls is {calls!r} but must be a whole number from {FEWEST_CALLS} "
                f"to {MOST_CALLS}, which is how many calls solve an episode: change it"
            )
        self.calls = calls

    def load(self) -> None:
        """Refuse too few turns for the calls."""
        if self.settings.max_turns <= self.calls:
            raise UnusableTask(
                f"environment.max_turns is {self.settings.max_turns} but data.options.calls is "
                f"{self.calls}, and an answer follows the calls, so no episode could succeed: "
                f"raise environment.max_turns to {self.calls + 1} or more, or lower "
                "data.options.calls"
            )

    def words_of_steps(self, question: str) -> Sequence[str]:
        """Return for each call of the plan the words of the question that ask for it.

        A call that reads what another one needs has words of its own.
        """
        raise UnusableTask(f"task {self.name!r} says no steps: define words_of_steps")

    def unreported_error(self, messages: list[Message], text: str) -> ToolError | None:
        """Return the error of a call that is not the next one of the plan."""
        question, action = question_of(messages), parse_action(text)
        steps = self.plan(question)
        results = plan_results(steps, messages, self.result_of)
        if not isinstance(action, ToolCall):
            return None
        if len(results) == len(steps):
            return ToolError("extra_step", "a step too many")
        if action == steps[len(results)].call(results):
            return None
        step = self.words_of_steps(question)[len(results)]
        return ToolError("wrong_step", "not the next step", {"step": step})

    def located(self, wrong: ToolError, messages: Sequence[Message]) -> ToolError:
        """Return the error of the first call that was accepted and is not of the plan.

        `wrong` is that of the end, which is returned where each accepted call is of the plan.
        """
        turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        for turn, at in enumerate(turns[:-1]):
            if messages[at + 1]["role"] != "tool":
                continue  # no call
            if self.result_of(messages[at + 1]["content"]) is None:
                continue  # a reported error, which is a site already
            found = self.unreported_error(list(messages[:at]), message_text(messages[at]))
            if found is not None:
                return ToolError(found.kind, found.text, found.facts, turn=turn)
        return wrong

    def continued(self, messages: list[Message]) -> str:
        """Return the next action of an agent that takes each call that was accepted for right."""
        steps = self.plan(question_of(messages))
        return self._next(steps, accepted_results(steps, messages, self.result_of))

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        """Return a wrong version of what an agent does that takes accepted calls for right."""
        steps = self.plan(question_of(messages))
        results = accepted_results(steps, messages, self.result_of)

        def forgotten_step(_: ToolCall, __: list[Message]) -> str | None:
            return skipped_call(steps, results)

        def of_call(call: ToolCall) -> Sequence[Mistake]:
            own = self.mistakes_of(call)
            return [*own, stale_value, off_by_one, forgotten_step]

        kinds = MistakeKinds(of_call, self.wrong_end, HABIT_SHARE)
        return corrupt(self._next(steps, results), messages, rng, kinds)

    def mistakes_of(self, call: ToolCall) -> Sequence[Mistake]:
        """Return the mistakes of a call, except those of all long tasks, the habitual one first."""
        raise UnusableTask(f"task {self.name!r} has no mistakes: define mistakes_of(self, call)")

    def wrong_end(self, right: str, messages: list[Message]) -> str:
        """Return a wrong version of the last words."""
        raise UnusableTask(f"task {self.name!r} has no wrong end: define wrong_end")
