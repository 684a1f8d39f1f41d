"""Chat messages of agents in one form, and the keys by which they are compared.

Two messages are equal if role, text, and calls (id, name, arguments) are; fields that clients add
or drop are ignored, and so is white space around an assistant's text. Pure.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composer_mesh.rollouts.tool_calls import THINKING, THINKING_ENDS
from composer_mesh.rollouts.traces import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "tool": "tool"}
ROLES["assistant"] = "assistant"
OPEN, CLOSE = THINKING, THINKING_ENDS
TEXT_PARTS = ("text", "input_text", "output_text")


class UnusableMessages(ValueError):
    """Messages or tools that no prompt can be made of; the text says why."""


def normalized(message: dict[str, Any]) -> Message:
    """Return a message with the fields that a template may read, its content as one text."""
    role = ROLES.get(message.get("role") or "")
    if role is None:
        raise UnusableMessages(
            f"a message has the role {message.get('role')!r}: use one of {', '.join(ROLES)}"
        )
    found: Message = {"role": role, "content": text_of(message.get("content"))}
    if role == "assistant":
        calls = [_normalized_call(call) for call in message.get("tool_calls") or []]
        return found | ({"tool_calls": calls} if calls else {})
    kept = ("name", "tool_call_id") if role == "tool" else ("name",)
    return found | {name: message[name] for name in kept if message.get(name)}


def text_of(content: Any) -> str:
    """Return a content's text; raise UnusableMessages if it has parts other than texts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise UnusableMessages(
                f"a message has a part of the type {part.get('type')!r}: send texts only"
            )
        texts.append(part["text"])
    return "".join(texts)


@dataclass(frozen=True)
class MessageKeys:
    """Keys of one message: of all that was sent, and without an assistant's thinking."""

    exact: bytes
    plain: bytes


def message_keys(message: dict[str, Any]) -> MessageKeys:
    """Return the keys of a message.

    An assistant's thinking may stand in its content or in a field of its own.
    """
    plain = normalized(message)
    if plain["role"] != "assistant":
        return MessageKeys(*[_key(plain, "")] * 2)
    inside, plain["content"] = _apart(plain["content"])
    thinking = message.get("reasoning_content") or message.get("reasoning") or inside
    return MessageKeys(_key(plain, thinking), _key(plain, ""))


def stopped_key(content: str, stops: Sequence[str]) -> bytes | None:
    """Return the key of an assistant's text before the first stop string; None if it has none.

    What stands behind a stop string was never sampled: a client has added it.
    """
    found = [content.find(stop) for stop in stops if stop in content]
    return ended_key(content[: min(found)]) if found else None


def ended_key(content: str) -> bytes:
    """Return the key of an assistant's text that ended, whatever a client adds to it."""
    return digest(["ended", _apart(content)[1].strip()])


def chained(path: bytes, key: bytes) -> bytes:
    """Return the key of a conversation that continues with one more message."""
    return hashlib.sha256(path + key).digest()


def digest(value: Any) -> bytes:
    """Return a key of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).digest()


def _apart(content: str) -> tuple[str, str]:
    """Return the thinking in a content, and the rest."""
    thinking, closed, answer = content.strip().rpartition(CLOSE)
    if not closed and answer.startswith(OPEN):
        thinking, answer = answer, ""
    return thinking.lstrip().removeprefix(OPEN), answer


def _key(plain: Message, thinking: Any) -> bytes:
    content = plain["content"].strip() if plain["role"] == "assistant" else plain["content"]
    calls = [_call_key(call) for call in plain.get("tool_calls", [])]
    names = [plain.get("name"), plain.get("tool_call_id")]
    return digest([plain["role"], content, calls, names, str(thinking).strip()])


def _call_key(call: dict[str, Any]) -> list[str]:
    function = call["function"]
    arguments = json.dumps(json.loads(function["arguments"]), sort_keys=True)
    return [call["id"], function["name"], arguments]


def _normalized_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableMessages("a tool call names no function: send type, id and function")
    arguments = {"name": function["name"], "arguments": _arguments(function.get("arguments"))}
    return {"id": str(call.get("id") or ""), "type": "function", "function": arguments}


def _arguments(arguments: Any) -> str:
    """Return a call's arguments as JSON."""
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    except (ValueError, RecursionError):
        raise UnusableMessages(
            "the arguments of a tool call are not JSON: send an object"
        ) from None
    if not isinstance(value, dict):
        raise UnusableMessages("the arguments of a tool call are not a JSON object: send one")
    return json.dumps(value, ensure_ascii=False)
