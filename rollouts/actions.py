"""Equivalence classes of actions, used to count teacher votes.

The rules, which users may rely on:

- **Tool calls** are compared by tool name and by arguments as JSON values. Key order, white space,
  escapes and surrounding text are ignored. Numbers are equal by value: `2`, `2.0` and `2e0` are the
  same, and integers are exact at any size. Types are distinct: `2`, `"2"` and `true` differ, and a
  missing argument is not `null`. Strings are compared in Unicode NFC; case and white space are
  significant, because a path, a key or a program may depend on them. List order is significant.
- An **answer with a number** (`Answer: 5`) is compared by the number that the environment parses.
- Any other **words** are compared after casefolding and collapsing white space; a leading
  `<think>…</think>` block is ignored.
- **Malformed** actions are equal to nothing, not even to themselves: a call that is not valid JSON
  or not the only call, that has text behind it, `NaN`, an infinity or a key twice (also in another
  normal form), or that stands in thinking which is not closed; an empty
  answer; a thought that is not closed.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from composer_mesh.rollouts.tool_calls import (
    THINKING,
    THINKING_ENDS,
    ToolCall,
    normal_form,
    parse_action,
)

_ANSWER = re.compile(r"Answer:\s*(-?[\d,]*\.?\d+)\s*$")


def read_answer(text: str) -> float | None:
    """Return the number after a final `Answer:`, or None if there is none."""
    match = _ANSWER.search(text.strip()[-80:])
    return float(match[1].replace(",", "")) if match else None


@dataclass(frozen=True, slots=True)
class ActionKey:
    """Equivalence class of an action; a malformed action equals nothing, not even itself."""

    kind: Literal["call", "number", "words", "malformed"]
    value: str

    @property
    def name(self) -> str:
        """Return the class as a string that is unique to the class."""
        return f"{self.kind}: {self.value}"

    def agrees(self, other: "ActionKey") -> bool:
        return self.kind != "malformed" and self == other


def canonical_action(text: str) -> ActionKey:
    """Return the equivalence class of an action's text."""
    if text.lstrip().startswith(THINKING) and THINKING_ENDS not in text:
        return ActionKey("malformed", text)
    action = parse_action(text)
    if isinstance(action, ToolCall):
        return _call_key(text, action)
    if action is not None:
        return ActionKey("malformed", text)
    number = read_answer(text)
    if number is not None:
        return ActionKey("number", _canonical_json(number))
    words = _words(text.rpartition(THINKING_ENDS)[2])
    return ActionKey("words", words) if words else ActionKey("malformed", text)


def _call_key(text: str, call: ToolCall) -> ActionKey:
    try:
        return ActionKey("call", f"{_text(call.name)} {_canonical_json(call.arguments)}")
    except (ValueError, RecursionError):
        return ActionKey("malformed", text)


def _canonical_json(value: Any) -> str:
    """Serialize a value canonically; raise ValueError if it has no JSON representation."""
    normal = _normal(value)
    return json.dumps(normal, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _normal(value: Any) -> Any:
    if isinstance(value, dict):
        normal = {_text(key): _normal(inner) for key, inner in value.items()}
        if len(normal) < len(value):
            raise ValueError(f"{len(value)} keys are {len(normal)} texts: name each key once")
        return normal
    if isinstance(value, list):
        return [_normal(inner) for inner in value]
    if isinstance(value, str):
        return _text(value)
    return _number(value) if isinstance(value, float) else value


def _number(value: float) -> int | float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is no JSON number: send one that a float can hold")
    return int(value) if value.is_integer() else value


def _text(value: str) -> str:
    return normal_form("NFC", value)


def _words(text: str) -> str:
    return _text(_text(" ".join(text.split())).casefold())
