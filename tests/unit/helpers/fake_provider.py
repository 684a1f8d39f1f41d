"""A scripted provider behind a client: replies in order, simulated time, a meter."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, ParamSpec

import httpx
import pytest

from composer_mesh.actors.provider.client import ProviderClient
from composer_mesh.actors.provider.endpoint import RetryDelays, TeacherEndpoint, Timeouts
from composer_mesh.actors.provider.errors import ProviderBudgetError, ProviderError
from composer_mesh.actors.provider.money import Meter
from composer_mesh.actors.provider.request_limiter import BreakerRules
from composer_mesh.rollouts.pairs import TeacherAnswer

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from simulated_time import SimulatedLoop

P = ParamSpec("P")
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


class TickingLoop(SimulatedLoop):
    """Its clock also moves a nanosecond at each look, past what rounding leaves of a wait."""

    def time(self) -> float:
        self.now += 1e-9
        return self.now


def in_simulated_time(
    test: Callable[P, Coroutine[Any, Any, None]],
) -> Callable[P, None]:
    """Runs a test in a loop whose time passes only where everybody waits."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=TickingLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


class Script:
    """A provider that sends these replies in order; keeps the requests and when they came."""

    def __init__(self, *replies: httpx.Response | Exception) -> None:
        self.replies = list(replies)
        self.requests: list[httpx.Request] = []
        self.times: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        self.times.append(asyncio.get_running_loop().time())
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    @property
    def waits(self) -> list[float]:
        """Seconds between one request and the next, to the microsecond."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [round(later - earlier, 6) for earlier, later in pairs]


def client(
    script: Script,
    total_s: float = 60.0,
    key: str = KEY,
    attempts: int = 4,
    breaker: BreakerRules = PATIENT,
    environ: Mapping[str, str] | None = None,
    base_s: float = 0.0,
    line_s: float = 0.0,
) -> ProviderClient:
    return ProviderClient(
        Timeouts(total_s, line_s=line_s),
        RetryDelays(attempts, base_s),
        breaker,
        environ={"TEST_KEY": key} if environ is None else environ,
        transport=httpx.MockTransport(script),
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
