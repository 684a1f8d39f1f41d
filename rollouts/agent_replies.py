"""The assistant message that an agent gets for sampled text, and how it may echo it. Pure."""

import hashlib
import json
from dataclasses import dataclass

from composer_mesh.rollouts.agent_messages import message_keys
from composer_mesh.rollouts.thinking import ThinkingStyle
from composer_mesh.rollouts.tool_calls import (
    MalformedCall,
    ToolCall,
    malformed_call,
    parse_calls,
    text_before_calls,
)
from composer_mesh.rollouts.traces import Message

ID_LENGTH = 9
"""Letters of a call's id: templates of Mistral models take no other length."""


@dataclass(frozen=True)
class Reply:
    """An assistant message, with the keys of all forms in which a client may send it back."""

    message: Message
    keys: list[bytes]


def reply_to(text: str, style: ThinkingStyle, with_tools: bool, name: str) -> Reply:
    """Convert an action's text to the message for the client; `name` makes ids of calls unique.

    A malformed call stays content.
    """
    told = malformed_call(text)
    thinking, answer = style.split(told.text if told else text)
    found = parse_calls(answer) if with_tools and told is None else ()
    calls = () if isinstance(found, MalformedCall) else found
    content = text_before_calls(answer).strip() if calls else answer
    message: Message = {"role": "assistant", "content": content or (None if calls else "")}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = [_wire_call(call, name, at) for at, call in enumerate(calls)]
    return Reply(message, _keys(text, message))


def _keys(text: str, message: Message) -> list[bytes]:
    """Return the keys of a reply without its thinking, which comes first, as it was sent, and as
    its whole text."""
    sent, whole = message_keys(message), message_keys({"role": "assistant", "content": text})
    return list(dict.fromkeys([sent.plain, sent.exact, whole.exact, whole.plain]))


def _wire_call(call: ToolCall, name: str, index: int) -> dict[str, object]:
    hashed = hashlib.sha256(f"{name}:{index}".encode()).hexdigest()
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": hashed[:ID_LENGTH], "type": "function", "function": function}
