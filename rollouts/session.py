"""A multi-turn tool session: actions in, tool results out, a verified answer at the end."""

import re
from collections.abc import Callable, Mapping
from copy import deepcopy

from composer_mesh.rollouts.tasks import StepResult
from composer_mesh.rollouts.tool_calls import (
    MalformedCall,
    ToolCall,
    assistant_message,
    parse_action,
)
from composer_mesh.rollouts.tools import Tool, ToolError, execute, format_number
from composer_mesh.rollouts.traces import ErrorSite, Message

_ANSWER = re.compile(r"Answer:\s*(-?[\d,]*\.?\d+)\s*$")


def read_answer(text: str) -> float | None:
    """Return the number after a final `Answer:`, or None if there is none."""
    match = _ANSWER.search(text.strip()[-80:])
    return float(match[1].replace(",", "")) if match else None


class ToolSession:
    """One running episode; not safe to share between asyncio tasks.

    `penalty` is subtracted from the reward for each failed call, never below 0.
    """

    def __init__(
        self,
        opening: list[Message],
        tools: Mapping[str, Tool],
        correct: Callable[[float], bool],
        max_turns: int,
        penalty: float,
    ) -> None:
        self._messages = deepcopy(opening)
        self._seen = [len(opening)]
        self._tools, self._correct = tools, correct
        self._max_turns, self._penalty = max_turns, penalty
        self._turn, self._failures, self._done = 0, 0, False

    @property
    def messages(self) -> list[Message]:
        return deepcopy(self._messages)

    def state(self, turn: int) -> list[Message]:
        """Return exactly what the agent saw when it acted at `turn` (0-based)."""
        if not 0 <= turn < len(self._seen):
            raise IndexError(
                f"turn {turn} of an episode with {len(self._seen)} states: ask for 0 to "
                f"{len(self._seen) - 1}"
            )
        return deepcopy(self._messages[: self._seen[turn]])

    def step(self, text: str) -> StepResult:
        """Apply the agent's action; raise RuntimeError after the end of the episode."""
        if self._done:
            raise RuntimeError(f"turn {self._turn} after the end: start a new session")
        call_id = f"call_{self._turn}"
        self._messages.append(assistant_message(text, call_id))
        action = parse_action(text)
        result = self._answer(text) if action is None else self._call(action, call_id)
        self._turn += 1
        self._done = result.done
        self._messages += deepcopy(result.messages)
        if not result.done:
            self._seen.append(len(self._messages))
        return result

    def _answer(self, text: str) -> StepResult:
        value = read_answer(text)
        if value is None:
            return self._end(False, self._site("no_answer", {}))
        if not self._correct(value):
            return self._end(False, self._site("wrong_answer", {"answer": format_number(value)}))
        return self._end(True, None)

    def _call(self, action: ToolCall | MalformedCall, call_id: str) -> StepResult:
        error: ErrorSite | None = None
        try:
            if isinstance(action, MalformedCall):
                raise ToolError("malformed_call", action.reason, {"reason": action.reason})
            content = format_number(execute(self._tools, action))
        except ToolError as failure:
            self._failures += 1
            content, error = f"error: {failure.text}", self._site(failure.kind, failure.data)
        if self._turn + 1 >= self._max_turns:
            return self._end(False, error or self._site("no_answer", {}))
        role = {"role": "tool", "tool_call_id": call_id}
        if isinstance(action, MalformedCall):
            role = {"role": "user"}
        return StepResult([{**role, "content": content}], False, 0.0, False, error)

    def _end(self, success: bool, error: ErrorSite | None) -> StepResult:
        reward = max(0.0, float(success) - self._penalty * self._failures)
        return StepResult([], True, reward, success, error)

    def _site(self, kind: str, data: dict[str, str]) -> ErrorSite:
        return ErrorSite(self._turn, kind, kind, data)
