"""A harness of verifiers that chats within its process: no program for each rollout.

It does what the harness `null` does, without its compaction: it asks until an answer calls no tool.
Its id is "in_process_chat". Runs in the environment of verifiers.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["InProcessChat"]

DONE = ProgramResult(exit_code=0, stdout="", stderr="")


@dataclass(frozen=True)
class Tools:
    """The tools of a task as `connect_mcp` returns them."""

    offered: list[Any] = field(default_factory=list)
    dispatch: dict[str, Any] = field(default_factory=dict)
    servers: dict[str, Any] = field(default_factory=dict)


class InProcessChatConfig(HarnessConfig):
    """No settings of its own."""


class InProcessChat(Harness[InProcessChatConfig]):
    """Asks for answers, and calls the tools of the task, until one calls none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        messages = _first_messages(*self.resolve_prompt(data))
        async with AsyncExitStack() as opened:
            client = await opened.enter_async_context(
                AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None)
            )
            tools = Tools()
            if mcp_urls:
                limit = {"timeout": self.config.tool_timeout}
                known = {name: {"url": url, **limit} for name, url in mcp_urls.items()}
                tools = Tools(*await connect_mcp({"mcpServers": known}, opened, set()))
            try:
                await self.chat(client, ctx.model, messages, tools)
            except APIStatusError as error:
                if error.code != "context_length_exceeded":
                    raise
        return DONE

    async def chat(
        self, client: AsyncOpenAI, model: str, messages: list[Any], tools: Tools
    ) -> None:
        """Ask until an answer calls no tool; `messages` grow by what is said."""
        offered: dict[str, Any] = {"tools": tools.offered} if tools.offered else {}
        while True:
            answer = await client.chat.completions.create(model=model, messages=messages, **offered)
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                content = await _result(call.function, tools)
                named = {"tool_call_id": call.id, "name": call.function.name}
                messages.append({"role": "tool", **named, "content": content})


async def _result(function: Any, tools: Tools) -> Any:
    if function.name not in tools.dispatch:
        return f"error: unknown tool {function.name!r}"
    try:
        arguments = json.loads(function.arguments or "{}")
    except json.JSONDecodeError as error:
        return f"error: the arguments are not valid JSON ({error})"
    if not isinstance(arguments, dict):
        return "error: the arguments must be a JSON object"
    return await call_mcp(tools.servers, tools.dispatch, function.name, arguments)


def _first_messages(system: str | None, prompt: Any) -> list[Any]:
    given = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*given, {"role": "user", "content": prompt}]
    return [*given, *(message_to_wire(one) for one in prompt or [])]
