"""A harness of the tests: asks, says "again", and asks once more, in its own process."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["TwoTurns"]


class TwoTurns(vf.Harness[vf.HarnessConfig]):
    """Two answers in one conversation."""

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
        messages: list[Any] = []
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for words in (data.prompt, "again"):
                messages.append({"role": "user", "content": words})
                said = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append(said.choices[0].message.model_dump(exclude_none=True))
        return ProgramResult(exit_code=0, stdout="", stderr="")
