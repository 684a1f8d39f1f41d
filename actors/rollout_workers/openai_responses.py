"""`/v1/responses`: what agents send, and what they get, also as a stream of events.

Items of the Responses API as chat messages, and chat messages as items.
"""

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
from composer_mesh.rollouts.agent_messages import TEXT_PARTS
from composer_mesh.rollouts.captured_turns import CapturedTurn
from composer_mesh.rollouts.traces import Message

MCP = "mcp__"
"""How Codex begins the namespace of an MCP server's tools."""


def messages_of(items: str | list[dict[str, Any]]) -> list[Message]:
    """Return a request's input as chat messages; raises Refusal.

    What an assistant wrote in one answer is several items: they become one message again.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    for item in items:
        part = _part(item)
        if _belongs(messages, part):
            _join(messages[-1], part)
        else:
            messages.append(part)
    return [message for message in messages if not _only_thought(message)]


def output_items(
    turn: CapturedTurn, name: str, tools: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return an answer as items: its thinking, its text, its calls."""
    answer = turn.answer
    items: list[dict[str, Any]] = []
    if thinking := answer.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thinking}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content})
    status = "completed" if turn.finish == "stop" else "incomplete"
    if answer["content"] or not answer.get("tool_calls"):
        items.append(message_item(f"msg_{name}", answer["content"] or "", status))
    calls = [
        {
            "type": "function_call",
            "id": f"fc_{name}_{call['id']}",
            "call_id": call["id"],
            **call["function"],
            **_named(call["function"]["name"], tools),
            "status": "completed",
        }
        for call in answer.get("tool_calls", [])
    ]
    return items + calls


def message_item(item_id: str, text: str, status: str) -> dict[str, Any]:
    """Return an assistant's message as an item."""
    return {
        "type": "message",
        "id": item_id,
        "role": "assistant",
        "status": status,
        "content": [text_part(text)],
    }


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the functions of a request as those of chat completions.

    Those of an MCP server, which Codex lists as a namespace, are named as `mcp__SERVER__TOOL`.
    Other kinds are run by OpenAI's servers, or are of no chat template, and are left out.
    """
    every = [one for tool in tools or [] for one in (tool, *_functions(tool))]
    return [_chat_tool(one) for one in every if one.get("type") == "function"]


def _functions(tool: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tools of an MCP server's namespace by their whole names; none of another tool."""
    space, inner = str(tool.get("name")), tool.get("tools")
    if tool.get("type") != "namespace" or not space.startswith(MCP) or not isinstance(inner, list):
        return []
    found = [one for one in inner if isinstance(one, dict)]
    return [{**one, "name": f"{space}__{one.get('name')}"} for one in found]


def _named(name: str, tools: list[dict[str, Any]] | None) -> dict[str, str]:
    """Return how a call names a function: one of a namespace by two names."""
    for tool in tools or []:
        if any(one["name"] == name for one in _functions(tool)):
            return {"namespace": tool["name"], "name": name.removeprefix(f"{tool['name']}__")}
    return {"name": name}


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    fields = ("name", "description", "parameters", "strict")
    function = {field: tool[field] for field in fields if tool.get(field) is not None}
    return {"type": "function", "function": function}


def _part(item: dict[str, Any]) -> Message:
    """Return one item as a message, of the assistant's perhaps only a part of one."""
    kind = item.get("type") or "message"
    if kind == "message":
        return {"role": item.get("role"), "content": item.get("content")}
    if kind == "function_call":
        space = item.get("namespace")
        name = item.get("name") if space is None else f"{space}__{item.get('name')}"
        function = {"name": name, "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        output = {"content": item.get("output"), "tool_call_id": item.get("call_id")}
        return {"role": "tool", **output}
    if kind == "reasoning":
        return {"role": "assistant", "content": None, "reasoning_content": _thinking(item)}
    raise bad_request(f"an input item has the type {kind!r}: send messages and calls", "input")


def _thinking(item: dict[str, Any]) -> str:
    parts = item.get("content") or []
    kinds = ("reasoning_text", *TEXT_PARTS)
    return "".join(str(part.get("text", "")) for part in parts if part.get("type") in kinds)


def _belongs(messages: list[Message], part: Message) -> bool:
    """Whether an item is a part of the same answer as the one before it."""
    if part["role"] != "assistant" or not messages or messages[-1]["role"] != "assistant":
        return False
    ends = bool(messages[-1]["content"] or messages[-1].get("tool_calls"))
    return not ends or "tool_calls" in part


def _join(message: Message, part: Message) -> None:
    if part["content"]:
        message["content"] = part["content"]
    if calls := part.get("tool_calls"):
        message["tool_calls"] = [*message.get("tool_calls", []), *calls]


def _only_thought(message: Message) -> bool:
    """Whether it is an answer of which only the thinking was sent back."""
    empty = not message.get("content") and not message.get("tool_calls")
    return empty and message["role"] == "assistant" and "reasoning_content" in message


Event = dict[str, Any]
RESPONSE = "resp_"
"""Before the name of an exchange, in the id of its response."""


class ResponsesRequest(WireRequest):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    stream_options: dict[str, Any] | None = None


@dataclass(frozen=True)
class ResponsesAnswer(WireAnswer):
    """A request of the Responses API, read; `messages` are without its instructions."""

    request: ResponsesRequest
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
        question = ChatQuestion([*system, *messages], tools)
        ask = Ask([question], 1, request.max_output_tokens, inherited_from=len(system))
        return cls(request, ask, request.model or model, messages, episode)

    def reply(self, exchange: Exchange) -> dict[str, Any]:
        """Return the whole response; a later request may name it as the previous one."""
        (turn,) = exchange.turns
        self.episode.responses[exchange.id] = [*self.messages, turn.answer]
        status = "completed" if turn.finish == "stop" else "incomplete"
        output = output_items(turn, exchange.id, self.request.tools)
        usage = {
            **TokenUsage.of(exchange, 1).named("input_tokens", "output_tokens"),
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
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

    def refused(self, refusal: Refusal) -> bytes:
        error = refusal.body()["error"]
        return sse({**error, "type": "error"}, "error")

    def _response(
        self, exchange: Exchange, status: str, output: list[Any], usage: Any
    ) -> dict[str, Any]:
        return {
            "id": _response_id(exchange),
            "object": "response",
            "status": status,
            "created_at": exchange.created,
            "model": self.model,
            "output": output,
            "instructions": self.request.instructions,
            "tools": self.request.tools or [],
            "previous_response_id": self.request.previous_response_id,
            "metadata": {},
            "max_output_tokens": self.request.max_output_tokens,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "temperature": None,
            "top_p": None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "usage": usage,
        }


def _response_id(exchange: Exchange) -> str:
    return f"{RESPONSE}{exchange.id}"


def _before(request: ResponsesRequest, episode: AgentEpisode) -> list[Message]:
    """Return the conversation that a request names as the previous one; raises Refusal."""
    name = request.previous_response_id
    if name is None:
        return []
    before = episode.responses.get(name.removeprefix(RESPONSE))
    if before is None:
        raise bad_request(
            f"no response {name[:80]!r} in this episode: send its items as input",
            "previous_response_id",
            "previous_response_not_found",
        )
    return before


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
