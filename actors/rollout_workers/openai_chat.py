"""`/v1/chat/completions`: what agents send, and what they get, also as a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from composer_mesh.actors.rollout_workers.agent_episode import (
    AgentEpisode,
    Ask,
    ChatQuestion,
    Exchange,
)
from composer_mesh.actors.rollout_workers.openai_wire import (
    DONE,
    MOST_ANSWERS,
    Count,
    Stops,
    StreamOptions,
    Usage,
    WireRequest,
    checked_tools,
    pieces,
    read_as,
    sse,
    stop_strings,
)
from composer_mesh.rollouts.captured_turns import CapturedTurn


class WireMessage(BaseModel):
    """The shape of a message; which fields count is decided where messages are compared."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(WireRequest):
    messages: list[WireMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    stop: Stops = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


@dataclass(frozen=True)
class ChatAnswer:
    """A request for chat completions, read."""

    request: ChatRequest
    ask: Ask
    model: str
    decode: Any

    @classmethod
    def read(cls, body: bytes, episode: AgentEpisode, model: str) -> ChatAnswer:
        request = read_as(ChatRequest, body)
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        limits = [request.max_completion_tokens, request.max_tokens]
        ask = Ask(
            [ChatQuestion(messages, checked_tools(request.tools))],
            request.n or 1,
            min((limit for limit in limits if limit is not None), default=None),
            stop_strings(request.stop),
        )
        return cls(request, ask, request.model or model, episode.token_text)

    @property
    def stream(self) -> bool:
        return bool(self.request.stream)

    def reply(self, exchange: Exchange) -> dict[str, Any]:
        choices = [self._choice(turn, at) for at, turn in enumerate(exchange.turns)]
        usage = Usage.of(exchange, self.ask.n).named()
        return {**self._head(exchange, "chat.completion"), "choices": choices, "usage": usage}

    def events(self, exchange: Exchange) -> Iterator[bytes]:
        """Yield the chunks of a stream: role, pieces of text, calls, end, usage."""
        options = self.request.stream_options
        with_usage = options is not None and bool(options.include_usage)
        head = self._head(exchange, "chat.completion.chunk")
        if with_usage:
            head["usage"] = None
        for index, turn in enumerate(exchange.turns):
            for chunk in self._chunks(turn):
                yield sse({**head, "choices": [{"index": index, **chunk}]})
        if with_usage:
            yield sse({**head, "choices": [], "usage": Usage.of(exchange, self.ask.n).named()})
        yield DONE

    def _head(self, exchange: Exchange, kind: str) -> dict[str, Any]:
        names = {"id": f"chatcmpl-{exchange.id}", "object": kind}
        return {**names, "created": exchange.created, "model": self.model}

    def _choice(self, turn: CapturedTurn, index: int) -> dict[str, Any]:
        choice = {"index": index, "message": {**turn.answer, "refusal": None}}
        choice |= {"logprobs": self._logprobs(turn), "finish_reason": finish_reason(turn)}
        return choice | ({"token_ids": turn.turn.action_ids} if self._with_ids else {})

    def _chunks(self, turn: CapturedTurn) -> Iterator[dict[str, Any]]:
        first = {"delta": {"role": "assistant", "content": ""}, "logprobs": self._logprobs(turn)}
        yield {**first, "finish_reason": None}
        for delta in _deltas(turn):
            yield {"delta": delta, "logprobs": None, "finish_reason": None}
        last: dict[str, Any] = {"delta": {}, "logprobs": None, "finish_reason": finish_reason(turn)}
        yield last | ({"token_ids": turn.turn.action_ids} if self._with_ids else {})

    @property
    def _with_ids(self) -> bool:
        return bool(self.request.return_token_ids)

    def _logprobs(self, turn: CapturedTurn) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        sampled = zip(turn.turn.action_ids, turn.turn.logprobs, strict=True)
        return {"content": [token_logprob(self.decode(i), logprob) for i, logprob in sampled]}


def _deltas(turn: CapturedTurn) -> Iterator[dict[str, Any]]:
    for piece in pieces(turn.answer.get("reasoning_content") or ""):
        yield {"reasoning_content": piece}
    for piece in pieces(turn.answer["content"] or ""):
        yield {"content": piece}
    for index, call in enumerate(turn.answer.get("tool_calls", [])):
        function = {**call["function"], "arguments": ""}
        yield {"tool_calls": [{"index": index, **call, "function": function}]}
        for piece in pieces(call["function"]["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def finish_reason(turn: CapturedTurn) -> str:
    """Return why an answer ended, as the API names it."""
    return "tool_calls" if turn.answer.get("tool_calls") else turn.finish


def token_logprob(text: str, logprob: float) -> dict[str, Any]:
    """Return one sampled token with its log-prob; others are not offered."""
    given = {"token": text, "logprob": logprob, "bytes": list(text.encode(errors="replace"))}
    return {**given, "top_logprobs": []}
