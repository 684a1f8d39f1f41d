"""Items of the Responses API as chat messages, and chat messages as items."""

from __future__ import annotations

from typing import Any

from composer_mesh.actors.rollout_workers.openai_wire import bad_request
from composer_mesh.rollouts.agent_messages import TEXT_PARTS
from composer_mesh.rollouts.captured_turns import CapturedTurn
from composer_mesh.rollouts.traces import Message


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


def output_items(turn: CapturedTurn, name: str) -> list[dict[str, Any]]:
    """Return an answer as items: its thinking, its text, its calls."""
    answer = turn.answer
    items: list[dict[str, Any]] = []
    if thinking := answer.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thinking}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content})
    status = "completed" if turn.finish == "stop" else "incomplete"
    if answer["content"] or not answer.get("tool_calls"):
        items.append(message_item(f"msg_{name}", answer["content"] or "", status))
    for call in answer.get("tool_calls", []):
        found = {"type": "function_call", "id": f"fc_{name}_{call['id']}", "call_id": call["id"]}
        items.append({**found, **call["function"], "status": "completed"})
    return items


def message_item(item_id: str, text: str, status: str) -> dict[str, Any]:
    """Return an assistant's message as an item."""
    content = [text_part(text)]
    head = {"type": "message", "id": item_id, "role": "assistant"}
    return {**head, "status": status, "content": content}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the tools of a request as those of chat completions; other kinds stay as they are."""
    return [_chat_tool(tool) if tool.get("type") == "function" else tool for tool in tools or []]


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
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
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
