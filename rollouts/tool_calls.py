"""Parser and writer of tool calls in text.

The format is that of Hermes and Qwen models: a JSON object between `<tool_call>` tags. The text is
untrusted and is only parsed as JSON.
"""

import json
from dataclasses import dataclass
from typing import Any

from composer_mesh.rollouts.traces import Message

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Text that opens a tool call without being a valid one."""

    text: str
    reason: str


def parse_action(text: str) -> ToolCall | MalformedCall | None:
    """Parse the tool call in an action's text; None if the text is a plain answer.

    An action makes one call at most; a second one makes it malformed.
    """
    if OPEN not in text and CLOSE not in text:
        return None
    if text.count(OPEN) != 1 or text.count(CLOSE) > 1:
        return MalformedCall(text, "write exactly one tool call")
    return _parsed(text, text.partition(OPEN)[2])


def parse_calls(text: str) -> tuple[ToolCall, ...] | MalformedCall:
    """Parse all tool calls in an action's text; none if the text is a plain answer.

    One malformed call makes the action malformed.
    """
    before, *bodies = text.split(OPEN)
    if CLOSE in before:
        return MalformedCall(text, f"a call is not opened by {OPEN}")
    calls: list[ToolCall] = []
    for body in bodies:
        call = _parsed(text, body)
        if isinstance(call, MalformedCall):
            return call
        calls.append(call)
    return tuple(calls)


def _parsed(text: str, body: str) -> ToolCall | MalformedCall:
    """Parse what follows the opening tag of one call in an action's text."""
    if body.count(CLOSE) != 1:
        return MalformedCall(text, f"the call is not closed by {CLOSE}")
    try:
        value = json.loads(body.partition(CLOSE)[0])
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be encoded
    except (ValueError, RecursionError):  # too many digits raise a plain ValueError
        return MalformedCall(text, "the call is not valid JSON")
    return _checked(text, value)


def _checked(text: str, value: Any) -> ToolCall | MalformedCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return MalformedCall(text, 'the call needs a "name"')
    if not isinstance(value.get("arguments"), dict):
        return MalformedCall(text, 'the call needs an object "arguments"')
    return ToolCall(value["name"], value["arguments"])


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Return the action text of a call, as the chat templates of Qwen models write it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{OPEN}\n{body}\n{CLOSE}"


def assistant_message(text: str, call_id: str) -> Message:
    """Convert an action's text to an OpenAI chat message; a malformed call stays content."""
    action = parse_action(text)
    if not isinstance(action, ToolCall):
        return {"role": "assistant", "content": text}
    function = {"name": action.name, "arguments": json.dumps(action.arguments)}
    call = {"id": call_id, "type": "function", "function": function}
    content = text.partition(OPEN)[0].strip()
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def message_text(message: Message) -> str:
    """Return the action text of an assistant message, the inverse of `assistant_message`.

    Raises ValueError if the arguments are not a JSON object.
    """
    calls = message.get("tool_calls") or []
    if not calls:
        return str(message.get("content") or "")
    function = calls[0]["function"]
    arguments = json.loads(function["arguments"])
    if not isinstance(arguments, dict):
        raise ValueError(f"tool call arguments are {arguments!r}: send a JSON object")
    return call_text(function["name"], arguments)
