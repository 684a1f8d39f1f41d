"""Chooses the format in which a chat template writes tool calls, by what it writes for one call.

The formats of tool calls that are known. Several may share a name: variants of one family.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, product, takewhile
from typing import Any

from composer_mesh.rollouts.call_formats.json_calls import (
    HarmonyCalls,
    HermesCalls,
    ListedJson,
    LlamaJson,
    MistralArgs,
    TokenFramed,
)
from composer_mesh.rollouts.call_formats.port import CallFormat, Schemas
from composer_mesh.rollouts.call_formats.pythonic_calls import PythonicCalls
from composer_mesh.rollouts.call_formats.tagged_calls import GemmaCalls, GlmXml, QwenXml
from composer_mesh.rollouts.tool_calls import ParsedAction, ToolCall, wire_arguments
from composer_mesh.rollouts.traces import Message

HERMES = HermesCalls()
HARMONY = HarmonyCalls()

_DEEPSEEK = (
    "deepseek",
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "<｜tool▁sep｜>",
)
_GEMMA_CHANNEL = ("<|channel>thought\n", "<channel|>")

KNOWN: tuple[CallFormat, ...] = (
    HERMES,
    QwenXml(),
    GlmXml(),
    GlmXml(between=""),
    HARMONY,
    MistralArgs(),
    ListedJson("mistral", "[TOOL_CALLS]", with_ids=True),
    ListedJson("granite", "<|tool_call|>"),
    ListedJson("phi4", "<|tool_call|>", "<|/tool_call|>"),
    ListedJson("cohere", "<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"),
    TokenFramed(
        "kimi",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|tool_call_begin|>", "<|tool_call_end|>"),
        "<|tool_call_argument_begin|>",
        numbered=True,
    ),
    TokenFramed(*_DEEPSEEK, head="function", fence=("\n```json\n", "\n```"), between="\n"),
    TokenFramed(*_DEEPSEEK),
    PythonicCalls("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", quote="'", json_values=True),
    GemmaCalls("gemma", "<|tool_call>", "<tool_call|>", '<|"|>', _GEMMA_CHANNEL),
    GemmaCalls("gemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    LlamaJson(),
    PythonicCalls("llama_pythonic"),
)
NAMES = tuple(dict.fromkeys(one.name for one in KNOWN))


EXAMPLE = ToolCall(
    "get_weather",
    {
        "city": "Paris",
        "days": 3,
        "share": 0.5,
        "hourly": True,
        "unit": None,
        "parts": ["wind", 1, None],
        "place": {"floor": 2, "indoors": False},
    },
    "a1b2c3d4e",
)
"""The call that templates write as a probe, with each type of JSON; ids of Mistral's have nine
letters or digits."""

EXAMPLE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": EXAMPLE.name,
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city."},
                "days": {"type": "integer", "description": "Number of days."},
                "share": {"type": "number", "description": "Share of the sky."},
                "hourly": {"type": "boolean", "description": "Whether by the hour."},
                "unit": {"type": "string", "description": "Unit of temperatures."},
                "parts": {"type": "array", "items": {"type": "string"}, "description": "Parts."},
                "place": {
                    "type": "object",
                    "properties": {"floor": {"type": "integer"}, "indoors": {"type": "boolean"}},
                    "description": "Place in the city.",
                },
            },
            "required": list(EXAMPLE.arguments),
        },
    },
}
_PROPERTIES = EXAMPLE_TOOL["function"]["parameters"]["properties"]
_SCHEMAS: Schemas = {
    EXAMPLE.name: {"properties": {**_PROPERTIES, "unit": {"type": ["string", "null"]}}}
}
"""Schemas for formats without types; templates get a plain type, since some know no others."""
_QUESTION: Message = {"role": "user", "content": "q"}
_ANSWER: Message = {"role": "tool", "content": "4", "name": EXAMPLE.name}

Render = Callable[[list[Message], bool, list[dict[str, Any]]], str]
"""Renders messages, with a generation prompt or without, and tools."""


@dataclass(frozen=True)
class CallStyle:
    """How calls are written and read, and how messages give them to the template."""

    format: CallFormat = HERMES
    arguments_as_text: bool = False
    """Whether the template takes arguments as a JSON text, as on the wire, and not as a mapping."""
    without_content: bool = False
    """Whether a message with calls and no text has the content None, and not an empty one."""
    by_template: bool = True
    """Whether the template writes calls at all; where it does not, they are part of the text."""
    numbered_ids: bool = False
    """Whether the template writes ids in place of names, so that they have to hold both."""

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages whose calls have the form that the template takes."""
        if self.numbered_ids:
            messages = list(_numbered(messages))
        return [self._message(one) if one.get("tool_calls") else one for one in messages]

    def _message(self, message: Message) -> Message:
        calls = [self._call(call) for call in message["tool_calls"]]
        content = message.get("content") or (None if self.without_content else "")
        return {**message, "content": content, "tool_calls": calls}

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if self.arguments_as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not self.arguments_as_text and isinstance(arguments, str):
            arguments = wire_arguments(arguments)
        return {**call, "function": {**call["function"], "arguments": arguments}}


_NUMBERED = re.compile(r"functions\..+:\d+")


def _numbered(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages whose calls and results have Kimi's ids: `functions.NAME:NUMBER`.

    Numbers count the calls of the conversation. Ids that a model has written are kept.
    """
    numbers, ids = count(), dict[str, str]()
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or []:
            given, at = str(call.get("id") or ""), next(numbers)
            named = f"functions.{call['function']['name']}:{at}"
            ids[given] = given if _NUMBERED.fullmatch(given) else named
            calls.append({**call, "id": ids[given]})
        if calls:
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            given = str(message.get("tool_call_id") or "")
            message = {**message, "tool_call_id": ids.get(given, given)}
        yield message


def calling(*calls: ToolCall) -> Message:
    """Return the message of an assistant that makes calls."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in calls
        ],
    }


def styles(render: Render, end_tokens: Callable[[CallFormat], Sequence[str]]) -> list[CallStyle]:
    """Return the styles that read the call that a template writes, the best one first.

    The best one also writes it as the template does. A template that writes no call leaves the
    format open: all of them are returned, Hermes first. `end_tokens` are those that end an action.
    """
    found, unread = list[tuple[int, CallStyle]](), False
    # Arguments that are a text are passed on as they were sent; few templates take ids for names.
    for numbered, text_arguments, without in product((False, True), (True, False), (False, True)):
        if numbered and found:
            break
        style = CallStyle(HERMES, text_arguments, without, numbered_ids=numbered)
        if (written := _written(render, style)) is not None:
            found += _reading(written, style, end_tokens)
            unread |= EXAMPLE.name in written
    if not found and not unread:
        return [CallStyle(one, by_template=False) for one in KNOWN]
    return [style for _, style in sorted(found, key=lambda one: -one[0])]


def _written(render: Render, style: CallStyle) -> str | None:
    """Return what the template writes from the call on; None where it refuses it."""
    said = [_QUESTION, calling(EXAMPLE), {**_ANSWER, "tool_call_id": EXAMPLE.id}]
    tools = [EXAMPLE_TOOL]
    try:
        before = render([_QUESTION], False, tools)
        begun = render([_QUESTION], True, tools)
        text = render(style.messages(said), False, tools)
    except Exception:  # noqa: BLE001 whatever a stranger's template raises refuses this form
        return None
    if not text.startswith(before):
        return None
    text, begun = text[len(before) :], begun[len(before) :]
    pairs = zip(text, begun, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    token = text.rfind("<", 0, same)  # which both begin alike: <think> and <tool_call>
    return text[token if token > text.rfind(">", 0, same) else same :]


def _is_example(spoken: ParsedAction) -> bool:
    """Whether an action is the example, with the types of its values: 1 is not true."""
    made = [[one.name, one.arguments] for one in spoken.calls]
    return json.dumps(made, sort_keys=True) == _MADE


_MADE = json.dumps([[EXAMPLE.name, EXAMPLE.arguments]], sort_keys=True)


def _reading(
    written: str, style: CallStyle, end_tokens: Callable[[CallFormat], Sequence[str]]
) -> list[tuple[int, CallStyle]]:
    found = []
    for one in KNOWN:
        stops = [at for end in end_tokens(one) if (at := written.find(end)) >= 0]
        text = written[: min(stops)] if stops else ""
        spoken = one.read(text, _SCHEMAS)
        if isinstance(spoken, ParsedAction) and _is_example(spoken):
            again = one.write(ParsedAction(spoken.text, spoken.calls))
            rank = 2 * (again == text) + (again.strip() == text.strip())
            found.append((rank, replace(style, format=one)))
    return found
