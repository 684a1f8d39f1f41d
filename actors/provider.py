"""The client of teachers' providers: one chat completion at a time, retried within bounds.

Speaks the OpenAI chat protocol over one pool of kept connections. It knows no budget, no votes
and no actors. A key is read from the environment at each request and kept nowhere.
"""

import asyncio
import json
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx

from composer_mesh.actors.provider_errors import (
    ProviderAuthError,
    ProviderError,
    ProviderMalformed,
    ProviderRequestError,
    ProviderServerError,
    ProviderTimeout,
)
from composer_mesh.actors.provider_reply import read_answer, read_completion
from composer_mesh.rollouts.pairs import TeacherAnswer
from composer_mesh.rollouts.traces import Message

LARGEST_BODY = 8 * 2**20
SHORTEST_SECRET = 8
LOOPBACK = ("all://127.0.0.1", "all://localhost", "all://[::1]")


@dataclass(frozen=True, slots=True)
class TeacherEndpoint:
    """Where a teacher is asked. `api_key_env` names a variable; None sends no key."""

    name: str
    base_url: str
    model: str
    api_key_env: str | None = None


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. `total_s` bounds one `complete` with all its retries and waits.

    `read_s` bounds the wait for the next bytes; None leaves it to `total_s`.
    """

    total_s: float
    connect_s: float = 5.0
    read_s: float | None = None

    def of_request(self) -> httpx.Timeout:
        read_s = self.total_s if self.read_s is None else self.read_s
        return httpx.Timeout(self.total_s, connect=self.connect_s, read=read_s)


@dataclass(frozen=True, slots=True)
class Retries:
    """How often and how late a failed request is sent again: full jitter, doubling its range.

    A provider's Retry-After is the least wait, and jitter comes on top, so that clients that
    were refused together do not return together.
    """

    attempts: int = 4
    base_s: float = 0.25
    cap_s: float = 8.0

    def delay_s(self, failures: int, error: ProviderError, rng: random.Random) -> float | None:
        """The wait after this many failures, or None to give up."""
        if not error.retryable or failures >= self.attempts:
            return None
        if error.retry_after_s is not None:
            return error.retry_after_s + rng.uniform(0, self.base_s)
        return rng.uniform(0, min(self.cap_s, self.base_s * 2**failures))


class ProviderClient:
    """Asks any teacher for its next action. Safe to use from many tasks of one event loop."""

    def __init__(
        self,
        timeouts: Timeouts,
        retries: Retries = Retries(),
        *,
        environ: Mapping[str, str] = os.environ,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._timeouts, self._retries = timeouts, retries
        self._environ, self._sleep = environ, sleep
        self._rng = random.Random()
        # A proxy of the environment is never asked for an address of this machine.
        direct: dict[str, httpx.AsyncBaseTransport | None] = dict.fromkeys(LOOPBACK)
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=32)
        self._client = httpx.AsyncClient(
            timeout=timeouts.of_request(), limits=limits, transport=transport, mounts=direct
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the kept connections; requests under way fail."""
        await self._client.aclose()

    def check(self, teacher: TeacherEndpoint) -> None:
        """Raises what would stop every request to this teacher; sends nothing."""
        self._key(teacher)
        try:
            url = httpx.URL(teacher.base_url)
        except httpx.InvalidURL:
            url = httpx.URL("")
        if url.scheme not in ("http", "https") or not url.host or url.userinfo:
            raise ProviderRequestError(
                teacher.name, "its base_url is not http(s)://HOST/PATH without credentials"
            )

    async def complete(
        self,
        teacher: TeacherEndpoint,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        seed: int,
    ) -> TeacherAnswer:
        """The teacher's next action. Waits for it, at most `total_s`; raises a ProviderError."""
        self.check(teacher)
        content = json.dumps(_request(teacher.model, messages, tools, seed)).encode()
        started, total_s = time.perf_counter(), self._timeouts.total_s
        try:
            async with asyncio.timeout(total_s):
                completion = await self._persist(teacher, content)
        except TimeoutError:
            raise ProviderTimeout(teacher.name, f"no answer within {total_s} s") from None
        turn = sum(message["role"] == "assistant" for message in messages)
        latency_s = time.perf_counter() - started
        return read_answer(teacher.name, completion, f"call_{turn}", latency_s)

    async def _persist(self, teacher: TeacherEndpoint, content: bytes) -> dict[str, Any]:
        clock = asyncio.get_running_loop().time
        deadline, failures = clock() + self._timeouts.total_s, 0
        while True:
            try:
                return await self._attempt(teacher, content)
            except ProviderError as error:
                failures += 1
                delay_s = self._retries.delay_s(failures, error, self._rng)
                if delay_s is None or clock() + delay_s >= deadline:
                    raise
            await self._sleep(delay_s)

    async def _attempt(self, teacher: TeacherEndpoint, content: bytes) -> dict[str, Any]:
        key = self._key(teacher)
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        url = f"{teacher.base_url.rstrip('/')}/chat/completions"
        try:
            async with self._client.stream("POST", url, content=content, headers=headers) as reply:
                raw = await _bounded_body(teacher.name, reply)
        except httpx.TimeoutException as fault:
            raise ProviderTimeout(teacher.name, f"{type(fault).__name__}") from None
        except httpx.HTTPError as fault:
            raise ProviderServerError(teacher.name, f"{type(fault).__name__}") from None
        if key is not None and len(key) >= SHORTEST_SECRET:
            raw = raw.replace(key.encode(), b"[key]")
        return read_completion(teacher.name, reply.status_code, reply.headers, raw)

    def _key(self, teacher: TeacherEndpoint) -> str | None:
        if teacher.api_key_env is None:
            return None
        key = self._environ.get(teacher.api_key_env, "").strip()
        if not key:
            raise ProviderAuthError(teacher.name, f"{teacher.api_key_env} is not set or empty")
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ProviderAuthError(
                teacher.name, f"{teacher.api_key_env} holds characters that no HTTP header may"
            )
        return key


def _request(
    model: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]], seed: int
) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "messages": list(messages), "seed": seed}
    return {**body, "tools": list(tools), "tool_choice": "auto"} if tools else body


async def _bounded_body(teacher: str, reply: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in reply.aiter_bytes():
        body += chunk
        if len(body) > LARGEST_BODY:
            raise ProviderMalformed(teacher, f"its answer is longer than {LARGEST_BODY} bytes")
    return bytes(body)
