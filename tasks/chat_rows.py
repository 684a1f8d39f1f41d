"""Rows of conversations for supervised fine-tuning, as the ids that rollouts would have.

A row has `messages`, or `prompt` and `completion`: messages, of which the completion is imitated.
Its `tools` are JSON schemas; a row without the key has the tools of the chat format.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from composer_mesh.rollouts.agent_messages import UnusableMessages, normalized
from composer_mesh.rollouts.call_formats.choosing import HERMES
from composer_mesh.rollouts.captured_episode import ToolFormats
from composer_mesh.rollouts.chat import ChatFormat, ChatTemplateError
from composer_mesh.rollouts.control_tokens import OURS
from composer_mesh.rollouts.tool_calls import ParsedAction, ToolCall, parse_calls
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.errors import UnusableTask
from composer_mesh.tasks.playing import KINDS, Demonstration, Piece, encode
from composer_mesh.tasks.rows import COLUMN, Row, label_of, read_rows

ANSWERS = ("action", "given")


def encoded_rows(path: Path | str, chat: ChatFormat) -> Iterator[Demonstration | None]:
    """Yield the conversation of each row; None for one that its column `split` holds out.

    Raises UnusableTask that names a row that has no conversation.
    """
    formats = ToolFormats(chat)
    for number, row in enumerate(read_rows(path), 1):
        if label_of(row.get(COLUMN)) == "heldout":
            yield None
            continue
        # Tables of columns fill in null where a row lacks a key that another one has.
        complete = isinstance(path, Path) and path.suffix.startswith(".json")
        row = row if complete else _without_nulls(row)
        try:
            yield encode_row(row, formats)
        except UnusableMessages as error:
            raise UnusableTask(f"{path}, row {number}: {error}") from None


def encode_row(row: Row, formats: ToolFormats) -> Demonstration:
    """Encode the conversation of a row up to its last imitated id; raises UnusableMessages."""
    given, imitated = _parts(row)
    for message in (*given, *imitated):
        _check_shape(message)
    messages = [normalized(message) for message in (*given, *imitated)]
    own_system = any(message["role"] == "system" for message in messages)
    chat = formats.of(_tools(row, formats.chat.tools), own_system)
    pieces = [_piece(chat, one, place >= len(given)) for place, one in enumerate(messages)]
    _check_turns([kind for kind, _ in pieces])
    try:
        found = encode(chat, pieces)
    except (TemplateError, ChatTemplateError) as error:
        raise UnusableMessages(f"the chat template refuses the messages ({error})") from None
    ends = max(place for place, learnt in enumerate(found.learn) if learnt) + 1
    return Demonstration(found.ids[:ends], found.learn[:ends])


def _parts(row: Row) -> tuple[list[Message], list[Message]]:
    """Return the messages that are not imitated, and those of which the assistant's are."""
    found = []
    whole = row.get("messages") is not None
    for key in ("messages",) if whole else ("prompt", "completion"):
        messages = row.get(key)
        if not (isinstance(messages, list) and all(isinstance(m, Mapping) for m in messages)):
            raise UnusableMessages(
                f"{key!r} is {_shown(messages)} but must be a list of messages with role and "
                "content: give each row `messages`, or `prompt` and `completion`"
            )
        found.append([dict(message) for message in messages])
    return ([], found[0]) if whole else (found[0], found[1])


def _check_shape(message: Message) -> None:
    """Refuse a message whose values are of other types than those of a chat."""
    role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    parts = content if isinstance(content, list) else []
    if not isinstance(role, str) or not isinstance(content, str | list | None):
        raise UnusableMessages(
            f"a message has the role {_shown(role)} and the content {_shown(content)}: write texts"
        )
    if not isinstance(calls, list | None) or not all(
        isinstance(one, Mapping) for one in (*parts, *(calls or ()))
    ):
        raise UnusableMessages(
            "'tool_calls' and parts of a content must be lists of objects: write them as in "
            "OpenAI's chat format"
        )


def _tools(row: Row, default: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tools = row.get("tools")
    if tools is None:
        return default
    try:
        found = json.loads(tools) if isinstance(tools, str) else tools
        sound = all(_is_tool(tool["function"]) for tool in found)
    except (ValueError, RecursionError, TypeError, LookupError, AttributeError):
        sound = False
    if not sound:
        raise UnusableMessages(
            f"'tools' is {_shown(tools)} but must be a list of JSON schemas, or its JSON text: "
            'write each as {"type": "function", "function": {"name": …, "parameters": …}}'
        )
    return list(found)


def _is_tool(function: Mapping[str, Any]) -> bool:
    properties = (function.get("parameters") or {}).get("properties") or {}
    return isinstance(function["name"], str) and isinstance(properties, Mapping)


def _piece(chat: ChatFormat, message: Message, imitated: bool) -> Piece:
    if message["role"] != "assistant":
        return KINDS[message["role"]], message["content"]
    text, calls = message["content"], message.get("tool_calls", ())
    if calls and not chat.tools:
        raise UnusableMessages(
            "a message has tool_calls but the row has no tools: list its 'tools'"
        )
    if calls:
        before = text if not text or text.endswith("\n") else f"{text}\n"
        made = tuple(_call(one["function"]) for one in calls)
        text = HERMES.write(ParsedAction(before, made))
        if parse_calls(text) != made:
            raise UnusableMessages("a message with tool_calls has a call in its text: remove it")
    if not text:
        raise UnusableMessages("an assistant message is empty: give it content or tool_calls")
    plain = text
    for tag in OURS:
        plain = plain.replace(tag, " ")
    if (found := chat.control_token(plain)) is not None:
        raise UnusableMessages(f"an assistant message holds the control token {found!r}: remove it")
    return ANSWERS[not imitated], text


def _call(function: Mapping[str, Any]) -> ToolCall:
    return ToolCall(function["name"], json.loads(function["arguments"]))


def _check_turns(kinds: Sequence[str]) -> None:
    """Refuse conversations whose turns an agent could not have taken."""
    if "action" not in kinds:
        raise UnusableMessages("no message to imitate: give it one of the role 'assistant'")
    after = ["", *kinds]
    if any(a in ("", *ANSWERS) and b in ANSWERS for a, b in zip(after, kinds, strict=False)):
        raise UnusableMessages(
            "an assistant message is the first, or follows another one: begin with what it "
            "answers, and join messages of one turn"
        )


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _shown(value: Any) -> str:
    return repr(value)[:80]
