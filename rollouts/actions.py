"""When two actions are the same: the equivalence classes that teachers' votes are counted in.

The rules, for a user to rely on:

- A **tool call** is its tool and its arguments as JSON values. Key order, white space and escapes
  the JSON do not matter, nor does talk beside the call. Numbers are equal by value: `2`, `2.0` and
  `2e0` are one, and whole numbers are exact at any size. Types are kept apart: `2`, `"2"` and
  `true` are three things, and a missing argument is no `null`. Strings are equal by Unicode's
  canonical form (an accent may be composed or not); their case and white space count, because a
  path, a key or a program may depend on them. The order of a list counts. Of a key that is written
  twice the last value counts, as for the tool.
- An **answer with a number** (`Answer: 5`) is its number, as the environment reads it.
- Any other **words** are equal by their casefolded words; a leading `<think>…</think>` is not said.
- **Malformed** actions agree with nothing, not even with themselves: a call that is no JSON or is
  not alone, a call with `NaN`, an infinity or two keys that are one text, an empty answer.

Nothing here counts votes, knows tools' defaults or runs a tool.
"""

import json
import math
import unicodedata
from dataclasses import dataclass
from typing import Any, Literal

from composer_mesh.rollouts.session import read_answer
from composer_mesh.rollouts.tool_calls import ToolCall, parse_action

_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True, slots=True)
class ActionKey:
    """The equivalence class of an action. A malformed one agrees with nothing, not even itself."""

    kind: Literal["call", "number", "words", "malformed"]
    value: str

    @property
    def name(self) -> str:
        """The class in one text, the same for the same classes and for no others."""
        return f"{self.kind}: {self.value}"

    def agrees(self, other: "ActionKey") -> bool:
        return self.kind != "malformed" and self == other


def canonical_action(text: str) -> ActionKey:
    """The class of an action's text."""
    action = parse_action(text)
    if isinstance(action, ToolCall):
        return _call_key(text, action)
    if action is not None:
        return ActionKey("malformed", text)
    number = read_answer(text)
    if number is not None:
        return ActionKey("number", _canonical_json(number))
    words = _words(text.rpartition(_END_OF_THOUGHT)[2])
    return ActionKey("words", words) if words else ActionKey("malformed", text)


def _call_key(text: str, call: ToolCall) -> ActionKey:
    try:
        return ActionKey("call", f"{_text(call.name)} {_canonical_json(call.arguments)}")
    except (ValueError, RecursionError):
        return ActionKey("malformed", text)


def _canonical_json(value: Any) -> str:
    """One spelling for one value; raises ValueError where it has no meaning in JSON."""
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
    return unicodedata.normalize("NFC", value)


def _words(text: str) -> str:
    return _text(_text(" ".join(text.split())).casefold())
