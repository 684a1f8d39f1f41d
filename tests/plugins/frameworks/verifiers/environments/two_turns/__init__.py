"""A harness of the tests: asks, says "again", and asks once more, in its own process."""

from __future__ import annotations

from typing import Any

from in_process_chat import InProcessChat, Tools
from openai import AsyncOpenAI

__all__ = ["TwoTurns"]


class TwoTurns(InProcessChat):
    """Two answers in one conversation."""

    async def chat(
        self, client: AsyncOpenAI, model: str, messages: list[Any], tools: Tools
    ) -> None:
        await super().chat(client, model, messages, tools)
        messages.append({"role": "user", "content": "again"})
        await super().chat(client, model, messages, tools)
