"""The port `Generation` with scripted answers, and what an agent's test needs beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.episode import Sample, Sampling
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.tasks import Episode

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


class ScriptedGeneration:
    """Answers the requests in order with these texts, or as `said` does; keeps all requests.

    An answer that is an exception is raised. While `open` is not set, requests wait.
    """

    def __init__(self, chat: ChatFormat, *texts: str | Exception) -> None:
        self.said: Callable[[GenerationRequest], str | Exception] = lambda _: self.texts.pop(0)
        self.chat, self.texts = chat, list(texts)
        self.requests: list[GenerationRequest] = []
        self.results: list[GenerationResult] = []
        self.cancelled: list[str] = []
        self.open = asyncio.Event()
        self.open.set()
        self.asked = asyncio.Event()
        self.gave_up = asyncio.Event()

    async def generate(self, request: GenerationRequest, group: str) -> GenerationResult:
        self.requests.append(request)
        self.asked.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            self.gave_up.set()
            raise
        said = self.said(request)
        if isinstance(said, Exception):
            raise said
        return self._result(request, self.chat.action(said))

    def _result(self, request: GenerationRequest, ids: list[int]) -> GenerationResult:
        full = len(ids) <= request.max_new_tokens
        ids = ids[: request.max_new_tokens]
        logprobs = [-0.5 - at / 64 for at in range(len(ids))]
        versions, reason = [3] * len(ids), "stop" if full else "length"
        name = request.request_id
        self.results.append(GenerationResult(name, ids, logprobs, versions, reason))
        return self.results[-1]


def a_sample(index: int = 0, **sampling: Any) -> Sample:
    """A sample with room for all that a test says."""
    settings = {"temperature": 1.0, "max_new_tokens": 200, "max_context": 4000, "seed": 5}
    return Sample(
        Episode("task", "train", index, {}), index, 0, Sampling(**{**settings, **sampling})
    )
