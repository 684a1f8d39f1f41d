"""Parser and writer of tool calls in the text of actions, as all parts of a run read it.

Calls are JSON objects between `<tool_call>` tags, as Hermes and Qwen models write them. What models
of other families write is converted where ids become text (`call_formats`). The text is untrusted
and is only parsed as JSON.

The rules are those of every format. Thinking is set apart: a call in it is none. Nothing but white
space stands between or behind calls. No mapping names a key twice, and every number is finite.

Unicode and HTML of texts that somebody else wrote, in time that grows with their length.
"""

import html
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from composer_mesh.rollouts.traces import Message

MOST_MARKS = 30
"""Combining marks in a row that are put in order, as in Unicode's stream-safe format."""
_JOINER = "\u034f"
_LONG_REFERENCE = re.compile(r"(?<=&#)[0-9]{8,}")


def normal_form(form: Literal["NFC", "NFKC"], text: str) -> str:
    """Return a text in a normal form of Unicode.

    Longer runs of combining marks are parted: to put n of them in order takes n * n steps.
    """
    if text.isascii():
        return text
    return unicodedata.normalize(form, "".join(_parted(text)))


def unescaped(text: str) -> str:
    """Return a text with the references of HTML resolved; those of no character become U+FFFD.

    Unlike `html.unescape` it takes references of any length, which have too many digits for `int`.
    """
    return html.unescape(_LONG_REFERENCE.sub(lambda digits: digits[0].lstrip("0")[:8] or "0", text))


def _parted(text: str) -> Iterator[str]:
    marks = 0
    for char in text:
        marks = marks + 1 if unicodedata.combining(char) else 0
        if marks > MOST_MARKS:
            yield _JOINER
            marks = 1
        yield char


OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINKING, THINKING_ENDS = "<think>", "</think>"
_SPACE = re.compile(r"\s*")
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


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """An action: its text before the calls, thinking included, and its calls in order."""

    text: str
    calls: tuple[ToolCall, ...] = ()


class Unreadable(ValueError):
    """A call that is not well-formed; the text says why, for the policy to read."""


def parse_bounded(text: str, most: int) -> tuple[ToolCall, ...] | MalformedCall:
    """Parse the tool calls in an action's text; more than `most` of them make it malformed."""
    found = parse_calls(text)
    if isinstance(found, MalformedCall) or len(found) <= most:
        return found
    wanted = "exactly one tool call" if most == 1 else f"at most {most} tool calls"
    return MalformedCall(text, f"write {wanted}")


def parse_action(text: str) -> ToolCall | MalformedCall | None:
    """Parse the tool call in an action's text; None if the text is a plain answer.

    An action makes one call at most; a second one makes it malformed.
    """
    found = parse_bounded(text, 1)
    if isinstance(found, MalformedCall):
        return found
    return found[0] if found else None


def parse_calls(text: str) -> tuple[ToolCall, ...] | MalformedCall:
    """Parse all tool calls in an action's text; none if the text is a plain answer.

    One malformed call makes the action malformed.
    """
    found = read_action(text)
    return found if isinstance(found, MalformedCall) else found.calls


def read_action(text: str) -> ParsedAction | MalformedCall:
    """Parse an action's text into what it says before its calls, and the calls."""
    if (malformed := malformed_call(text)) is not None:
        return malformed
    if OPEN not in text and CLOSE not in text:
        return ParsedAction(text)
    return behind_thinking(text, _read)


def behind_thinking(text: str, read: Callable[[str], ParsedAction]) -> ParsedAction | MalformedCall:
    """Read an action whose calls stand behind its thinking; `read` raises `Unreadable`.

    The prompt may have opened the tag, so that only its end is there. An end inside a call that can
    be read is part of the call.
    """
    thinking, ends, answer = text.partition(THINKING_ENDS)
    opened = text.lstrip().startswith(THINKING)
    try:
        if not opened:
            found = _read_or_none(text, read) if ends else read(text)
            if found is not None and (found.calls or not ends):
                return found
        elif not ends:
            found = read(text)
            if found.calls:
                raise Unreadable(f"the thinking is not closed by {THINKING_ENDS} before the call")
            return found
        found = read(answer)
    except Unreadable as error:
        return MalformedCall(text, str(error))
    return ParsedAction(f"{thinking}{ends}{found.text}", found.calls)


def _read_or_none(text: str, read: Callable[[str], ParsedAction]) -> ParsedAction | None:
    try:
        return read(text)
    except Unreadable:
        return None


def json_at(text: str, at: int = 0) -> tuple[Any, int]:
    """Return the JSON value at a place of a text, and where it ends; raises `Unreadable`."""
    try:
        value, end = _DECODER.raw_decode(text, at)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # no surrogate, no NaN
    except Unreadable:
        raise
    except (ValueError, RecursionError):  # too many digits raise a plain ValueError
        raise Unreadable("the call is not valid JSON") from None
    return value, end


def space_ends(text: str, at: int) -> int:
    """Return where the white space at a place of a text ends."""
    found = _SPACE.match(text, at)
    return found.end() if found else at


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return values by name; raises `Unreadable` for a name that is given twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise Unreadable(f"the argument {name[:60]!r} is given twice")
        found[name] = value
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=unique)


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
    found = read_action(text)
    return text if isinstance(found, MalformedCall) else found.text


def tagged_calls(text: str, read: Callable[[str, int], tuple[ToolCall, int]]) -> ParsedAction:
    """Read an action whose calls stand in `OPEN` and `CLOSE`; raises `Unreadable`.

    `read` returns the call at a place and where it ends, so that calls may hold the tags too.
    """
    before = text.partition(OPEN)[0]
    if CLOSE in before:
        raise Unreadable(f"a call is not opened by {OPEN}")
    calls, at = list[ToolCall](), len(before)
    while at < len(text):
        if not text.startswith(OPEN, at):
            raise Unreadable(f"text stands behind {CLOSE}: end with the call")
        if text.find(CLOSE, at) < 0:
            raise Unreadable(f"the call is not closed by {CLOSE}")
        call, at = read(text, space_ends(text, at + len(OPEN)))
        at = space_ends(text, at)
        if not text.startswith(CLOSE, at):
            raise Unreadable(f"the call is not closed by {CLOSE}")
        calls.append(call)
        at = space_ends(text, at + len(CLOSE))
    return ParsedAction(before, tuple(calls))


def _read(text: str) -> ParsedAction:
    return tagged_calls(text, _json_call)


def _json_call(text: str, at: int) -> tuple[ToolCall, int]:
    value, end = json_at(text, at)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise Unreadable('the call needs a "name"')
    if not isinstance(value.get("arguments"), dict):
        raise Unreadable('the call needs an object "arguments"')
    return ToolCall(value["name"], value["arguments"]), end


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Return the action text of a call, as the chat templates of Qwen models write it."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{OPEN}\n{body}\n{CLOSE}"


def assistant_message(text: str, call_id: str, most: int = 1) -> Message:
    """Convert an action's text to an OpenAI chat message; a malformed call stays content.

    Calls after the first have the id `call_id` with their number. An action of more than `most`
    calls is malformed.
    """
    made = parse_bounded(text, most)
    if isinstance(made, MalformedCall) or not made:
        return {"role": "assistant", "content": text}
    calls = []
    for at, call in enumerate(made):
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
        function = call["function"]
        texts.append(call_text(function["name"], wire_arguments(function["arguments"])))
    return "\n".join(texts)


def wire_arguments(given: Any) -> dict[str, Any]:
    """Return the arguments in a message's call; an empty text stands for none.

    Raises ValueError if they are no JSON object.
    """
    if isinstance(given, str):
        given = json.loads(given) if given.strip() else {}
    if not isinstance(given, dict):
        raise ValueError(f"tool call arguments are {given!r}: send a JSON object")
    return given
