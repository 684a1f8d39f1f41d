"""A scripted provider behind a client: replies in order, waits that take no time, a meter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from composer_mesh.actors.provider.breaker import BreakerRules
from composer_mesh.actors.provider.client import ProviderClient, Retries, TeacherEndpoint, Timeouts
from composer_mesh.actors.provider.errors import ProviderBudgetError, ProviderError
from composer_mesh.actors.provider.meter import Meter
from composer_mesh.rollouts.pairs import TeacherAnswer

KEY = "sk-test-0123456789abcdef"
TEACHER = TeacherEndpoint("t1", "https://provider.test/v1/", "some/model", "TEST_KEY")
ASK = [{"role": "user", "content": "What is 2 plus 3?"}]
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]
PATIENT = BreakerRules(failures=10**6)
"""For tests of everything but the breaker."""


def completion(message: dict[str, Any], **extra: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "c1", "object": "chat.completion", "choices": [choice], **extra}


def said(content: Any, **extra: Any) -> httpx.Response:
    return httpx.Response(200, json=completion({"role": "assistant", "content": content}, **extra))


def called(arguments: Any, name: Any = "calculator") -> httpx.Response:
    call = {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}
    message = {"role": "assistant", "content": "Let me see.", "tool_calls": [call, call]}
    return httpx.Response(200, json=completion(message))


def error(status: int, text: str = "no", **headers: str) -> httpx.Response:
    """An error body; keywords are headers, with _ for -."""
    body = {"error": {"message": text, "code": status}}
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, json=body, headers=names)


class Script:
    """A provider that sends these replies in order and keeps the requests and the waits.

    Time is its own: it passes only where the client waits.
    """

    def __init__(self, *replies: httpx.Response | Exception) -> None:
        self.replies = list(replies)
        self.requests: list[httpx.Request] = []
        self.waits: list[float] = []
        self.now = 1000.0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def clock(self) -> float:
        return self.now


def client(
    script: Script,
    total_s: float = 60.0,
    key: str = KEY,
    attempts: int = 4,
    breaker: BreakerRules = PATIENT,
    environ: Mapping[str, str] | None = None,
) -> ProviderClient:
    return ProviderClient(
        Timeouts(total_s),
        Retries(attempts),
        breaker,
        environ={"TEST_KEY": key} if environ is None else environ,
        transport=httpx.MockTransport(script),
        sleep=script.sleep,
        clock=script.clock,
    )


async def ask(
    script: Script,
    teacher: TeacherEndpoint = TEACHER,
    meter: Meter | None = None,
    **options: Any,
) -> TeacherAnswer:
    async with client(script, **options) as asking:
        return await asking.complete(teacher, ASK, TOOLS, seed=11, meter=meter)


async def fault(script: Script, teacher: TeacherEndpoint = TEACHER, **options: Any) -> Any:
    """The error that a question ends with."""
    with pytest.raises(ProviderError) as caught:
        await ask(script, teacher, **options)
    return caught.value


class CeilingMeter:
    """A meter in memory with one ceiling, in nano-dollars; keeps what it was told."""

    def __init__(self, ceiling: int = 10**18) -> None:
        self.ceiling = ceiling
        self.open: dict[int, int] = {}
        self.charges: list[int] = []
        self.bounds: list[int | None] = []

    @property
    def spent(self) -> int:
        return sum(self.charges)

    async def reserve(self, teacher: str, bound: int | None) -> int:
        self.bounds.append(bound)
        amount = 1000 if bound is None else bound
        if self.spent + sum(self.open.values()) + amount > self.ceiling:
            raise ProviderBudgetError(teacher, f"{self.ceiling} nano-dollars are spent")
        number = len(self.bounds)
        self.open[number] = amount
        return number

    async def settle(self, reservation: int, charge: int | None) -> int:
        amount = self.open.pop(reservation)
        self.charges.append(amount if charge is None else charge)
        return self.charges[-1]
