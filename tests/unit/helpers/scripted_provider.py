"""A provider in this process: it answers, counts its requests, and keeps its own accounts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx

from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.rollouts.budget import NANO, Prices
from composer_mesh.rollouts.pairs import FrozenState

KEY = "sk-test-0123456789"
ENVIRON = {"TEST_KEY": KEY}
PRICES = Prices.per_million(1, 2)

Say = Callable[[dict[str, Any]], httpx.Response]


def teacher(name: str, prices: Prices | None = PRICES, **more: Any) -> TeacherEndpoint:
    settled = {"max_tokens": 100, "concurrency": 64, "model": f"model-of-{name}", **more}
    return TeacherEndpoint(
        name, "https://teacher.test/v1", api_key_env="TEST_KEY", prices=prices, **settled
    )


def state(number: int, seed: int | None = None) -> FrozenState:
    messages = [{"role": "user", "content": f"question {number}"}]
    return FrozenState(f"state-{number}", messages, number if seed is None else seed)


def answer(text: str, cost: float | None = None, **usage: Any) -> httpx.Response:
    told = usage if cost is None else {**usage, "cost": cost}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}}
    return httpx.Response(200, json={"choices": [choice], "usage": told})


class ScriptedProvider:
    """Answers each question with its own text, after a turn of the loop; `charged` is what it
    billed, in nano-dollars. `gate` holds answers back while it is closed."""

    def __init__(self, cost: float = 0.0001, say: Say | None = None) -> None:
        self.cost, self._say = cost, say
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.listing: dict[str, Any] = {"data": []}
        self.charged = 0
        self.gate, self.asked = asyncio.Event(), asyncio.Event()
        self.gate.set()

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._answer)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json=self.listing)
        body = json.loads(request.content)
        self.requests.append(body)
        self.asked.set()
        await self.gate.wait()
        await asyncio.sleep(0)
        self.charged += round(self.cost * NANO)
        if self._say is not None:
            return self._say(body)
        return answer(f"Answer: {body['messages'][-1]['content']}", self.cost)
