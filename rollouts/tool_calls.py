"""Tool calls in text: reading what a model wrote, and writing what an expert means.

The format is the one Hermes and Qwen models use: a JSON object between `<tool_call>` tags.
The text is untrusted: it is parsed as JSON and nothing else. Tools are not run here.
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
    """Text that opens a tool call but is not one."""

    text: str
    reason: str


def parse_action(text: str) -> ToolCall | MalformedCall | None:
    """The tool call in an action's text, or None where the text is a plain answer.

    An action makes one call at most; a second one makes it malformed.
    """
    if OPEN not in text and CLOSE not in text:
        return None
    body = text.partition(OPEN)[2]
    if text.count(OPEN) != 1 or text.count(CLOSE) > 1:
        return MalformedCall(text, "write exactly one tool call")
    if CLOSE not in body:
        return MalformedCall(text, f"the call is not closed by {CLOSE}")
    try:
        value = json.loads(body.partition(CLOSE)[0])
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair can not be written
    except (ValueError, RecursionError):  # an integer of too many digits is a plain ValueError
        return MalformedCall(text, "the call is not valid JSON")
    return _checked(text, value)


def _checked(text: str, value: Any) -> ToolCall | MalformedCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return MalformedCall(text, 'the call needs a "name"')
    if not isinstance(value.get("arguments"), dict):
        return MalformedCall(text, 'the call needs an object "arguments"')
    return ToolCall(value["name"], value["arguments"])


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """The action text of a call, as the chat templates of Qwen models write it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{OPEN}\n{body}\n{CLOSE}"


def assistant_message(text: str, call_id: str) -> Message:
    """The OpenAI chat message of an action's text; a malformed call stays content."""
    action = parse_action(text)
    if not isinstance(action, ToolCall):
        return {"role": "assistant", "content": text}
    function = {"name": action.name, "arguments": json.dumps(action.arguments)}
    call = {"id": call_id, "type": "function", "function": function}
    content = text.partition(OPEN)[0].strip()
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def message_text(message: Message) -> str:
    """The action text of an assistant message, the reverse of `assistant_message`.

    Raises ValueError where the message's arguments are not a JSON object.
    """
    calls = message.get("tool_calls") or []
    if not calls:
        return str(message.get("content") or "")
    function = calls[0]["function"]
    arguments = json.loads(function["arguments"])
    if not isinstance(arguments, dict):
        raise ValueError(f"tool call arguments are {arguments!r}: send a JSON object")
    return call_text(function["name"], arguments)
