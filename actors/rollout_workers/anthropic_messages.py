"""`/v1/messages` of Anthropic: what agents send, and what they get, also as a stream of events.

Blocks as chat messages, and chat messages as blocks. Clients send many fields of beta features:
unknown ones are ignored, and what a prompt cannot hold (images, documents) is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from composer_mesh.actors.rollout_workers.agent_episode import (
    AgentEpisode,
    Ask,
    ChatQuestion,
    Exchange,
)
from composer_mesh.actors.rollout_workers.openai_wire import (
    Count,
    TokenUsage,
    WireAnswer,
    WireRequest,
    bad_request,
    checked_tools,
    pieces,
    read_as,
    sse,
)
from composer_mesh.mesh.json_server import Refusal
from composer_mesh.rollouts.captured_turns import CapturedTurn
from composer_mesh.rollouts.traces import Message

Blocks = str | list[dict[str, Any]]
STOP_TOKENS = 32
"""Last tokens of an answer among which its stop sequence is looked for."""
ERRORS = {
    HTTPStatus.BAD_REQUEST: "invalid_request_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


class BlockMessage(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: str
    content: Blocks = ""


class CountRequest(WireRequest):
    """What has tokens in a request."""

    model_config = ConfigDict(extra="ignore")

    messages: Annotated[list[BlockMessage], Field(min_length=1)]
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = None

    def question(self) -> ChatQuestion:
        """Return its messages and tools as those of a chat; raises Refusal."""
        return ChatQuestion(
            messages_of(self.system or "", self.messages), checked_tools(chat_tools(self.tools))
        )


class MessagesRequest(CountRequest):
    max_tokens: Count
    stop_sequences: Annotated[
        list[Annotated[str, Field(min_length=1)]] | None, Field(max_length=16)
    ] = None


def messages_of(system: Blocks, messages: Sequence[BlockMessage]) -> list[Message]:
    """Return a request's system text and messages as those of a chat; raises Refusal.

    Templates have one system message, at the beginning: texts of later ones join a message of the
    user next to them.
    """
    found: list[Message] = []
    head = [_text(system, "system")] if system else []
    for message in messages:
        if message.role == "assistant":
            found.append(_assistant(message.content))
        elif message.role == "user":
            for part in _user(message.content):
                _add(found, part)
        elif message.role != "system":
            raise bad_request(
                f"a message has the role {message.role[:80]!r}: use user, assistant or system",
                "messages",
            )
        elif found:
            _add(found, {"role": "user", "content": _text(message.content, "messages")})
        else:
            head.append(_text(message.content, "messages"))
    return [*([{"role": "system", "content": "\n\n".join(head)}] if head else []), *found]


def chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the tools with a schema as those of chat completions.

    Others are run by Anthropic's servers, or are placeholders for tools that were left out.
    """
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                **({"description": said} if (said := tool.get("description")) else {}),
                "parameters": tool["input_schema"],
            },
        }
        for tool in tools or []
        if isinstance(tool.get("input_schema"), dict)
    ]


def _add(found: list[Message], message: Message) -> None:
    """Add a message; texts of the user that follow each other become one."""
    if message["role"] == "user" and found and found[-1]["role"] == "user":
        found[-1] = {"role": "user", "content": f"{found[-1]['content']}\n\n{message['content']}"}
    else:
        found.append(message)


def _user(content: Blocks) -> Iterator[Message]:
    """Yield the results of tools, then the texts."""
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    for block in content:
        if block.get("type") == "tool_result":
            text = _text(block.get("content") or "", "messages")
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
    texts = [block for block in content if block.get("type") != "tool_result"]
    if texts:
        yield {"role": "user", "content": _text(texts, "messages")}


def _assistant(content: Blocks) -> Message:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thinking, calls = list[str](), list[str](), list[dict[str, Any]]()
    for block in content:
        kind = block.get("type")
        if kind == "text":
            texts.append(str(block.get("text", "")))
        elif kind == "thinking":
            thinking.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise _unusable(kind, "messages")
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if any(thinking):
        message["reasoning_content"] = "".join(thinking)
    return message | ({"tool_calls": calls} if calls else {})


def _text(content: Any, param: str) -> str:
    """Return the text of blocks, as paragraphs; raises Refusal for blocks of other types."""
    if isinstance(content, str):
        return content
    texts = []
    for block in content if isinstance(content, list) else [{}]:
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        if kind != "text" or not isinstance(block.get("text"), str):
            raise _unusable(kind, param)
        texts.append(block["text"])
    return "\n\n".join(texts)


def _unusable(kind: Any, param: str) -> Refusal:
    return bad_request(
        f"a block has the type {str(kind)[:80]!r}, but the policy reads texts only: send text, "
        "tool_use or tool_result",
        param,
    )


@dataclass(frozen=True)
class MessagesAnswer(WireAnswer):
    """A request for a message, read."""

    request: MessagesRequest
    model: str
    decode: Callable[[int], str]

    @classmethod
    def read(cls, body: bytes, episode: AgentEpisode, model: str) -> MessagesAnswer:
        request = read_as(MessagesRequest, body)
        stops = tuple(request.stop_sequences or ())
        ask = Ask([request.question()], 1, request.max_tokens, stops)
        return cls(request, ask, request.model or model, episode.token_text)

    def reply(self, exchange: Exchange) -> dict[str, Any]:
        (turn,) = exchange.turns
        reason, sequence = self._end(turn)
        return {
            **self._message(exchange),
            "content": list(_blocks(turn)),
            "stop_reason": reason,
            "stop_sequence": sequence,
        }

    def events(self, exchange: Exchange) -> Iterator[bytes]:
        """Yield the events of a stream: the message starts, each block, the message ends."""
        (turn,) = exchange.turns
        opening = self._message(exchange)
        usage = opening["usage"]
        opening["usage"] = {**usage, "output_tokens": 0}
        yield _event("message_start", message=opening)
        for index, block in enumerate(_blocks(turn)):
            field, kind, text = _streamed(block)
            empty = {**block, field: {} if field == "input" else ""}
            yield _event("content_block_start", index=index, content_block=empty)
            for piece in pieces(text):
                key = "partial_json" if field == "input" else field
                yield _event("content_block_delta", index=index, delta={"type": kind, key: piece})
            yield _event("content_block_stop", index=index)
        reason, sequence = self._end(turn)
        ended = {"stop_reason": reason, "stop_sequence": sequence}
        yield _event("message_delta", delta=ended, usage=usage)
        yield _event("message_stop")

    def waiting(self) -> bytes:
        return _event("ping")

    def refused(self, refusal: Refusal) -> bytes:
        return sse(error_body(refusal), "error")

    def _message(self, exchange: Exchange) -> dict[str, Any]:
        return {
            "id": f"msg_{exchange.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": TokenUsage.of(exchange, 1).named("input_tokens", "output_tokens"),
        }

    def _end(self, turn: CapturedTurn) -> tuple[str, str | None]:
        """Return why an answer ended, and by which of the request's stop sequences."""
        if turn.answer.get("tool_calls"):
            return "tool_use", None
        if turn.finish != "stop":
            return "max_tokens", None
        tail = "".join(map(self.decode, turn.turn.action_ids[-STOP_TOKENS:]))
        found = next((stop for stop in self.ask.stops if stop in tail), None)
        return ("stop_sequence", found) if found else ("end_turn", None)


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Return an error in Anthropic's JSON."""
    kind = ERRORS.get(
        refusal.status, "api_error" if refusal.status >= 500 else ERRORS[HTTPStatus.BAD_REQUEST]
    )
    return {"type": "error", "error": {"type": kind, "message": refusal.text}}


def _blocks(turn: CapturedTurn) -> Iterator[dict[str, Any]]:
    """Yield an answer as blocks: its thinking, its text, its calls."""
    answer = turn.answer
    if thinking := answer.get("reasoning_content"):
        yield {"type": "thinking", "thinking": thinking, "signature": ""}
    calls = answer.get("tool_calls", [])
    if answer["content"] or not calls:
        yield {"type": "text", "text": answer["content"] or ""}
    for call in calls:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        yield {"type": "tool_use", "id": call["id"], "name": name, "input": arguments}


def _streamed(block: dict[str, Any]) -> tuple[str, str, str]:
    """Return the field of a block that is streamed, the type of its deltas, and its text."""
    if block["type"] == "tool_use":
        return "input", "input_json_delta", json.dumps(block["input"], ensure_ascii=False)
    field = block["type"]
    return field, f"{field}_delta", block[field]


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)
