"""`/v1/responses`: what agents send, and what they get, also as a stream of events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from composer_mesh.actors.rollout_workers.agent_episode import (
    AgentEpisode,
    Ask,
    ChatQuestion,
    Exchange,
)
from composer_mesh.actors.rollout_workers.openai_response_items import (
    chat_tools,
    messages_of,
    output_items,
    text_part,
)
from composer_mesh.actors.rollout_workers.openai_wire import (
    Count,
    Usage,
    WireRequest,
    bad_request,
    checked_tools,
    pieces,
    read_as,
    sse,
)
from composer_mesh.rollouts.traces import Message

Event = dict[str, Any]


class ResponsesRequest(WireRequest):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    stream_options: dict[str, Any] | None = None


@dataclass(frozen=True)
class ResponsesAnswer:
    """A request of the Responses API, read; `messages` are without its instructions."""

    request: ResponsesRequest
    ask: Ask
    model: str
    messages: list[Message]
    episode: AgentEpisode

    @classmethod
    def read(cls, body: bytes, episode: AgentEpisode, model: str) -> ResponsesAnswer:
        request = read_as(ResponsesRequest, body)
        messages = [*_before(request, episode), *messages_of(request.input)]
        if not messages:
            raise bad_request("the input is empty: send at least one item", "input")
        system = [{"role": "system", "content": request.instructions}] * bool(request.instructions)
        tools = checked_tools(chat_tools(request.tools))
        ask = Ask([ChatQuestion([*system, *messages], tools)], 1, request.max_output_tokens)
        return cls(request, ask, request.model or model, messages, episode)

    @property
    def stream(self) -> bool:
        return bool(self.request.stream)

    def reply(self, exchange: Exchange) -> dict[str, Any]:
        """Return the whole response; a later request may name it as the previous one."""
        (turn,) = exchange.turns
        self.episode.responses[_response_id(exchange)] = [*self.messages, turn.answer]
        status = "completed" if turn.finish == "stop" else "incomplete"
        output = output_items(turn, exchange.id)
        usage = Usage.of(exchange, 1).named("input_tokens", "output_tokens")
        usage |= {"input_tokens_details": {"cached_tokens": 0}}
        usage |= {"output_tokens_details": {"reasoning_tokens": 0}}
        return self._response(exchange, status, output, usage)

    def events(self, exchange: Exchange) -> Iterator[bytes]:
        """Yield the events of a stream: each item is added, filled and done."""
        numbers, final = count(), self.reply(exchange)
        opening = self._response(exchange, "in_progress", [], None)
        events = [
            {"type": "response.created", "response": opening},
            {"type": "response.in_progress", "response": opening},
            *(event for at, item in enumerate(final["output"]) for event in _item_events(at, item)),
            {"type": f"response.{final['status']}", "response": final},
        ]
        for event in events:
            yield sse({**event, "sequence_number": next(numbers)}, event["type"])

    def _response(
        self, exchange: Exchange, status: str, output: list[Any], usage: Any
    ) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        head: dict[str, Any] = {
            "id": _response_id(exchange),
            "object": "response",
            "status": status,
        }
        head |= {"created_at": exchange.created, "model": self.model, "output": output}
        asked: dict[str, Any] = {
            "instructions": self.request.instructions,
            "tools": self.request.tools or [],
        }
        asked |= {"previous_response_id": self.request.previous_response_id, "metadata": {}}
        asked |= {"max_output_tokens": self.request.max_output_tokens, "tool_choice": "auto"}
        fixed = {"parallel_tool_calls": True, "temperature": None, "top_p": None, "error": None}
        return {**head, **asked, **fixed, "incomplete_details": cut, "usage": usage}


def _response_id(exchange: Exchange) -> str:
    return f"resp_{exchange.id}"


def _before(request: ResponsesRequest, episode: AgentEpisode) -> list[Message]:
    """Return the conversation that a request names as the previous one; raises Refusal."""
    name = request.previous_response_id
    if name is None:
        return []
    if name not in episode.responses:
        raise bad_request(
            f"no response {name[:80]!r} in this episode: send its items as input",
            "previous_response_id",
            "previous_response_not_found",
        )
    return episode.responses[name]


def _item_events(index: int, item: dict[str, Any]) -> Iterator[Event]:
    place = {"output_index": index, "item_id": item["id"]}
    added = {**item, "status": "in_progress"}
    if item["type"] == "function_call":
        added["arguments"] = ""
        body = _call_events(place, item)
    else:
        added["content"] = []
        body = _text_events(place, item["content"][0])
    yield {"type": "response.output_item.added", "output_index": index, "item": added}
    yield from body
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _call_events(place: dict[str, Any], item: dict[str, Any]) -> Iterator[Event]:
    kind, arguments = "response.function_call_arguments", item["arguments"]
    for piece in pieces(arguments):
        yield {"type": f"{kind}.delta", **place, "delta": piece}
    yield {"type": f"{kind}.done", **place, "name": item["name"], "arguments": arguments}


def _text_events(place: dict[str, Any], part: dict[str, Any]) -> Iterator[Event]:
    place, text = {**place, "content_index": 0}, part["text"]
    thinking = part["type"] == "reasoning_text"
    kind = "response.reasoning_text" if thinking else "response.output_text"
    empty = {"type": "reasoning_text", "text": ""} if thinking else text_part("")
    yield {"type": "response.content_part.added", **place, "part": empty}
    for piece in pieces(text):
        yield {"type": f"{kind}.delta", **place, "delta": piece, "logprobs": []}
    yield {"type": f"{kind}.done", **place, "text": text, "logprobs": []}
    yield {"type": "response.content_part.done", **place, "part": part}
