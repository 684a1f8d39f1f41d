"""A provider that fails on purpose, with an exact ledger of its charges in nano-dollars.

Speaks the OpenAI chat protocol on 127.0.0.1. The fault of a request is determined by the seed and
the request's id, so that a repeated run meets the same faults. It charges whenever it generated,
whether or not its answer arrives.
"""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

HUGE = 9 << 20
CHARS_PER_TOKEN = 4
LARGEST_REQUEST = 1 << 20
CHUNK = 1 << 16


class Fault(StrEnum):
    """Outcome of a request; all but the refusals were generated and charged."""

    NONE = "none"
    RATE = "429"
    RATE_WAIT = "429_retry_after"
    RATE_DATE = "429_retry_after_date"
    UNAVAILABLE = "503_retry_after"
    MODERATED = "403_moderated"
    SERVER = "500"
    GATEWAY = "502_html"
    HANG = "hang"
    DRIP = "slow_drip"
    ENDLESS = "endless_drip"
    CUT = "cut"
    CUT_EARLY = "cut_before_the_status"
    TRUNCATED = "truncated_json"
    NOT_UTF8 = "not_utf8"
    SCHEMA = "wrong_schema"
    LATE_ERROR = "error_in_a_200"
    HUGE = "huge_body"
    HUGE_ANNOUNCED = "huge_body_announced"


REFUSALS = {Fault.RATE, Fault.RATE_WAIT, Fault.RATE_DATE, Fault.MODERATED}
ENDS_THE_CONNECTION = {Fault.HANG, Fault.CUT, Fault.CUT_EARLY, Fault.HUGE_ANNOUNCED}
STORM: dict[Fault, float] = {**dict.fromkeys(Fault, 2.0), Fault.NONE: 60.0, Fault.HUGE: 0.5}
"""Weights of all faults at once."""
CALM: dict[Fault, float] = {Fault.NONE: 1.0}
OUTAGE: dict[Fault, float] = {Fault.SERVER: 1.0, Fault.GATEWAY: 1.0, Fault.CUT: 1.0}


@dataclass(frozen=True, slots=True)
class Model:
    """Prices of a model in nano-dollars per token, and what it reports of them."""

    prompt: int
    completion: int
    tells: str = "cost"
    """"cost", "tokens" or "nothing"."""


@dataclass(frozen=True)
class HttpTransport:
    """HTTP/1.1 on one connection, valid or not; `json` and `send` return True."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    drip_s: float

    async def request(self) -> tuple[str, dict[str, str], bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *rest = head.rstrip().split("\r\n")
        pairs = (each.partition(":") for each in rest)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        length = min(int(headers.get("content-length", 0)), LARGEST_REQUEST)
        return line, headers, await self.reader.readexactly(length)

    async def json(
        self, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> bool:
        sent = {"Content-Type": "application/json", **(headers or {})}
        return await self.send(status, json.dumps(body).encode(), sent)

    async def send(
        self,
        status: int,
        content: bytes,
        headers: Mapping[str, str] | None = None,
        announced: int | None = None,
    ) -> bool:
        length = len(content) if announced is None else announced
        self._head(status, {**(headers or {}), "Content-Length": str(length)})
        self.writer.write(content)
        await self.writer.drain()
        return True

    async def drip(self, content: bytes, pieces: int) -> None:
        """Send the content in this many pieces, with waits between them."""
        self._head(200, {"Content-Length": str(len(content))})
        step = -(-len(content) // pieces)
        for start in range(0, len(content), step):
            self.writer.write(content[start : start + step])
            await self.writer.drain()
            await asyncio.sleep(self.drip_s)

    async def stream(self, size: int) -> None:
        """Send blanks without a declared length."""
        self._head(200, {"Transfer-Encoding": "chunked"})
        piece = b"%x\r\n" % CHUNK + b" " * CHUNK + b"\r\n"
        for _ in range(0, size, CHUNK):
            self.writer.write(piece)
            await self.writer.drain()
        self.writer.write(b"0\r\n\r\n")

    async def wait_for_the_end(self) -> None:
        """Wait until the client disconnects."""
        with contextlib.suppress(OSError):
            await self.reader.read()

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.writer.write(f"HTTP/1.1 {status} X\r\n{lines}\r\n".encode())


@dataclass
class FaultProxy:
    """Serves from `async with` to its end; `weights` may be replaced at any time."""

    token: str
    models: Mapping[str, Model]
    seed: int = 0
    weights: Mapping[Fault, float] = field(default_factory=lambda: dict(STORM))
    drip_s: float = 0.005
    retry_after: str = "0.02"

    requests: int = 0
    ledger: Counter[str] = field(default_factory=Counter)
    """Nano-dollars by model."""
    met: Counter[Fault] = field(default_factory=Counter)
    unreadable: int = 0

    @property
    def charged(self) -> int:
        """Nano-dollars, all models."""
        return self.ledger.total()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}/v1"

    async def __aenter__(self) -> Self:
        self._serving: set[asyncio.Task[Any]] = set()
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._listener.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            while await self._exchange(HttpTransport(reader, writer, self.drip_s)):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client disconnected
        except asyncio.CancelledError:
            pass  # the proxy is closing
        finally:
            self._serving.discard(task)
            writer.close()

    async def _exchange(self, wire: HttpTransport) -> bool:
        """Handle one request; return whether the connection can continue."""
        line, headers, body = await wire.request()
        given = headers.get("authorization", "")
        if given != f"Bearer {self.token}":
            return await wire.json(401, {"error": {"message": f"who is {given}?", "code": 401}})
        if line.startswith("GET ") and line.split()[1].endswith("/models"):
            return await wire.json(200, self._listing())
        try:
            question = json.loads(body)
            model = self.models[question["model"]]
        except (ValueError, KeyError, TypeError):
            self.unreadable += 1
            return await wire.json(404, {"error": {"message": "no such model", "code": 404}})
        return await self._answer(wire, question, model, given, headers, len(body))

    async def _answer(
        self,
        wire: HttpTransport,
        question: dict[str, Any],
        model: Model,
        given: str,
        headers: Mapping[str, str],
        size: int,
    ) -> bool:
        self.requests += 1
        rng = random.Random(f"{self.seed} {headers.get('x-request-id', self.requests)}")
        fault = rng.choices(list(self.weights), list(self.weights.values()))[0]
        self.met[fault] += 1
        if fault in REFUSALS:
            return await self._refuse(wire, fault, given)
        prompt = -(-size // CHARS_PER_TOKEN)
        written = rng.randint(1, question["max_tokens"])
        cost = prompt * model.prompt + written * model.completion
        self.ledger[question["model"]] += cost
        usage = _usage(model, prompt, written, cost)
        completion = _completion(question, rng, usage)
        return await self._charged(wire, fault, completion, given)

    async def _refuse(self, wire: HttpTransport, fault: Fault, given: str) -> bool:
        if fault is Fault.MODERATED:
            metadata = {"reasons": ["violence"], "flagged_input": "…"}
            error = {"message": "flagged", "code": 403, "metadata": metadata}
            return await wire.json(403, {"error": error})
        waits = {
            Fault.RATE_WAIT: {"Retry-After": self.retry_after},
            Fault.RATE_DATE: {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"},
        }
        error = {"message": f"slow down, {given}", "code": 429}
        return await wire.json(429, {"error": error}, waits.get(fault))

    def _listing(self) -> dict[str, Any]:
        data = [
            {
                "id": name,
                "pricing": {
                    "prompt": f"{model.prompt}e-9",
                    "completion": f"{model.completion}e-9",
                    "request": "0",
                },
            }
            for name, model in self.models.items()
        ]
        return {"data": data}

    async def _charged(
        self, wire: HttpTransport, fault: Fault, completion: dict[str, Any], given: str
    ) -> bool:
        """Answer with a fault after the generation; return whether the connection continues."""
        content, later = json.dumps(completion).encode(), {"Retry-After": self.retry_after}
        replies: dict[Fault, tuple[int, Any]] = {
            Fault.NONE: (200, completion),
            Fault.UNAVAILABLE: (503, {"error": {"message": f"later, {given}", "code": 503}}),
            Fault.SERVER: (500, {"error": {"message": f"lost it with {given}"}}),
            Fault.SCHEMA: (200, {"result": completion["choices"][0]["message"]}),
            Fault.LATE_ERROR: (200, {"error": {"message": f"broke off, {given}", "code": 502}}),
        }
        page = f"<html><body>Bad gateway\x1b[31m {given}</body></html>"
        if fault in replies:
            return await wire.json(*replies[fault], later if fault is Fault.UNAVAILABLE else None)
        match fault:
            case Fault.GATEWAY:
                await wire.send(502, page.encode(), {"Content-Type": "text/html"})
            case Fault.DRIP:
                await wire.drip(content, pieces=10)
            case Fault.ENDLESS:
                await wire.drip(b" " * HUGE, pieces=HUGE)
            case Fault.CUT:
                await wire.send(200, content[: len(content) // 2], announced=len(content))
            case Fault.TRUNCATED | Fault.NOT_UTF8:
                broken = content[: len(content) // 2], json.dumps(completion).encode("utf-16")
                await wire.send(200, broken[fault is Fault.NOT_UTF8])
            case Fault.HUGE:
                await wire.stream(HUGE)
            case Fault.HUGE_ANNOUNCED:
                await wire.send(200, b"{", announced=HUGE)
        if fault in (Fault.HANG, Fault.HUGE_ANNOUNCED):
            await wire.wait_for_the_end()
        return fault not in ENDS_THE_CONNECTION


def _usage(model: Model, prompt: int, written: int, cost: int) -> dict[str, Any]:
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": written}
    reported = {"cost": {**counts, "cost": cost / 1e9}, "tokens": counts, "nothing": {}}
    return reported[model.tells]


def _completion(
    question: dict[str, Any], rng: random.Random, usage: dict[str, Any]
) -> dict[str, Any]:
    """Return an answer in words, or a call of the first tool where tools are offered."""
    message: dict[str, Any] = {"role": "assistant", "content": f"Answer: {rng.randint(0, 9)}"}
    if tools := question.get("tools"):
        name = tools[0]["function"]["name"]
        arguments = json.dumps({"a": rng.randint(0, 9), "b": 3})
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
    reason = "tool_calls" if "tool_calls" in message else "stop"
    choice = {"index": 0, "message": message, "finish_reason": reason}
    return {
        "id": f"gen-{rng.getrandbits(48):012x}",
        "object": "chat.completion",
        "model": question["model"],
        "choices": [choice],
        "usage": usage,
    }
