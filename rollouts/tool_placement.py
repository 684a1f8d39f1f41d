"""Where a conversation has its tools, calls and results, by what the chat template writes.

A template that leaves one of them out gets it as plain text: tools in the system message, calls in
the assistant's text, results in user messages.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from jinja2 import TemplateError

from composer_mesh.rollouts.call_formats.choosing import CallStyle, Render, calling
from composer_mesh.rollouts.call_formats.port import CallFormat, ParsedAction
from composer_mesh.rollouts.tool_calls import ToolCall, wire_arguments
from composer_mesh.rollouts.traces import Message

PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "qzname",
        "description": "Does nothing.",
        "parameters": {
            "type": "object",
            "properties": {"qzkey": {"type": "string", "description": "Any text."}},
            "required": ["qzkey"],
        },
    },
}
PROBE_CALL = ToolCall("qzname", {"qzkey": "qzvalue"}, "a1b2c3d4e")
_USER: Message = {"role": "user", "content": "qzuser"}
_SYSTEM: Message = {"role": "system", "content": "qzsystem"}
_RESULT: Message = {"role": "tool", "content": "qzresult", "name": PROBE_CALL.name}
_SHAPE = ParsedAction("", (ToolCall("NAME", {"ARGUMENT": "VALUE"}, "a1b2c3d4e"),))


@dataclass(frozen=True)
class ToolPlacement:
    """Whether the template writes tools and results; `style` knows whether it writes calls."""

    style: CallStyle
    tools_by_template: bool = True
    results_by_template: bool = True

    @classmethod
    def probe(cls, render: Render, style: CallStyle) -> "ToolPlacement":
        """Return what a template writes, by looking for words of its own in what it renders."""
        tools = [PROBE_TOOL]
        called = calling(PROBE_CALL) if style.by_template else {"role": "assistant", "content": "a"}
        answered = [_USER, called, {**_RESULT, "tool_call_id": PROBE_CALL.id}]
        return cls(
            style,
            writes(render, [_USER], tools, PROBE_CALL.name, *PROBE_CALL.arguments),
            writes(render, style.messages(answered), tools, _RESULT["content"]),
        )

    def __str__(self) -> str:
        calls = "by the template" if self.style.by_template else "in the assistant's text"
        results = "by the template" if self.results_by_template else "in user messages"
        tools = "template" if self.tools_by_template else "system"
        return f'tools_in = "{tools}", {self.style.format.name} calls {calls}, results {results}'

    def applied(
        self, messages: Sequence[Message], tools: list[dict[str, Any]]
    ) -> tuple[list[Message], list[dict[str, Any]]]:
        """Return messages and tools as the template is given them."""
        placed = list(messages)
        if not self.style.by_template:
            placed = [_as_text(one, self.style.format) for one in placed]
        if not self.results_by_template:
            placed = list(_results_of_users(placed))
        if tools and not self.tools_by_template:
            placed, tools = _with_system(placed, tools_text(tools, self.style.format)), []
        return self.style.messages(placed), tools


def writes(
    render: Render, messages: list[Message], tools: list[dict[str, Any]], *words: str
) -> bool:
    """Whether all words are in what a template renders; not, where it refuses the messages."""
    try:
        text = render(messages, True, tools)
    except TemplateError:
        return False
    return all(word in text for word in words)


def writes_system(render: Render) -> bool:
    """Whether a template writes the text of a system message."""
    return writes(render, [_SYSTEM, _USER], [], _SYSTEM["content"])


def tools_text(tools: list[dict[str, Any]], calls: CallFormat) -> str:
    """Return what a system message says of tools, and of the format in which they are called."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You can call the functions that are listed here, with their parameters as JSON schemas.\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, replace NAME, ARGUMENT and VALUE, and end your message with the call:\n"
        f"{calls.write(_SHAPE)}\n"
        "The result follows between <tool_response> and </tool_response>."
    )


def _with_system(messages: list[Message], text: str) -> list[Message]:
    if messages and messages[0]["role"] == "system":
        first, *rest = messages
        return [{**first, "content": f"{first.get('content') or ''}\n\n{text}".lstrip()}, *rest]
    return [{"role": "system", "content": text}, *messages]


def _as_text(message: Message, calls: CallFormat) -> Message:
    """Write an assistant's calls as a part of its text."""
    made = message.get("tool_calls")
    if not made:
        return message
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    parsed = tuple(_call(one) for one in made)
    return {**kept, "content": calls.write(ParsedAction(str(message.get("content") or ""), parsed))}


def _call(call: dict[str, Any]) -> ToolCall:
    arguments = wire_arguments(call["function"]["arguments"])
    return ToolCall(call["function"]["name"], arguments, str(call.get("id") or ""))


def _results_of_users(messages: list[Message]) -> Iterator[Message]:
    """Write results as user messages, one for all results of an action."""
    for is_result, group in groupby(messages, lambda one: one["role"] == "tool"):
        if is_result:
            texts = [f"<tool_response>\n{one['content']}\n</tool_response>" for one in group]
            yield {"role": "user", "content": "\n".join(texts)}
        else:
            yield from group
