"""Parser and writer of tool calls in the text of actions, as all parts of a run read it.

Calls are JSON objects between `<tool_call>` tags, as Hermes and Qwen models write them. What models
of other families write is converted where ids become text (`call_formats`). The text is untrusted
and is only parsed as JSON.
"""

import html
import json
import re
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.rollouts.foreign_text import unescaped
from composer_mesh.rollouts.traces import Message

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MALFORMED = re.compile(r'<tool_call error="([^"]*)">\n')


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call; `id` is the one that the model wrote, where its format has one."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Text that opens a tool call without being a valid one."""

    text: str
    reason: str


def parse_bounded(text: str, most: int) -> tuple[ToolCall, ...] | MalformedCall:
    """Parse the tool calls in an action's text; more than `most` of them make it malformed."""
    if most == 1:
        action = parse_action(text)
        return action if isinstance(action, MalformedCall) else (action,) if action else ()
    found = parse_calls(text)
    if isinstance(found, MalformedCall) or len(found) <= most:
        return found
    return MalformedCall(text, f"write at most {most} tool calls")


def parse_action(text: str) -> ToolCall | MalformedCall | None:
    """Parse the tool call in an action's text; None if the text is a plain answer.

    An action makes one call at most; a second one makes it malformed.
    """
    if (told := malformed_call(text)) is not None:
        return told
    if OPEN not in text and CLOSE not in text:
        return None
    if text.count(OPEN) != 1 or text.count(CLOSE) > 1:
        return MalformedCall(text, "write exactly one tool call")
    return _parsed(text, text.partition(OPEN)[2])


def parse_calls(text: str) -> tuple[ToolCall, ...] | MalformedCall:
    """Parse all tool calls in an action's text; none if the text is a plain answer.

    One malformed call makes the action malformed.
    """
    if (told := malformed_call(text)) is not None:
        return told
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


def malformed_text(text: str, reason: str) -> str:
    """Return the action text of a call that a model wrote malformed in a format of its own."""
    return f'<tool_call error="{html.escape(reason)}">\n{text}'


def malformed_call(text: str) -> MalformedCall | None:
    """Return the call of a text by `malformed_text`; None if it is none."""
    found = _MALFORMED.match(text)
    if found is None:
        return None
    return MalformedCall(text[found.end() :], unescaped(found[1]))


def text_before_calls(text: str) -> str:
    """Return what an action says before its first call."""
    return text.partition(OPEN)[0]


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


def assistant_message(text: str, call_id: str, most: int = 1) -> Message:
    """Convert an action's text to an OpenAI chat message; a malformed call stays content.

    Calls after the first have the id `call_id` with their number. An action of more than `most`
    calls is malformed.
    """
    found = parse_bounded(text, most)
    if isinstance(found, MalformedCall) or not found:
        return {"role": "assistant", "content": text}
    calls = []
    for at, call in enumerate(found):
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        calls.append({"id": numbered(call_id, at), "type": "function", "function": function})
    content = text_before_calls(text).strip()
    return {"role": "assistant", "content": content, "tool_calls": calls}


def numbered(call_id: str, at: int) -> str:
    """Return the id of an action's call at a place."""
    return f"{call_id}_{at}" if at else call_id


def message_text(message: Message) -> str:
    """Return the action text of an assistant message, the inverse of `assistant_message`.

    Raises ValueError if the arguments are not a JSON object.
    """
    calls = message.get("tool_calls") or []
    if not calls:
        return str(message.get("content") or "")
    texts = []
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        if not isinstance(arguments, dict):
            raise ValueError(f"tool call arguments are {arguments!r}: send a JSON object")
        texts.append(call_text(call["function"]["name"], arguments))
    return "\n".join(texts)
