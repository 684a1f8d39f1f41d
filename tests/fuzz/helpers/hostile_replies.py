"""Replies that no honest provider sends, made from a seed.

A reply starts as one that a provider might send. Then values anywhere in it are replaced, removed
or nested, its text is damaged, and its headers, status and encoding are chosen from what breaks
readers.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx

RAW = "@raw@"
"""Marks a text that is written into the JSON as it stands, as no JSON writer would."""
NUMBERS = [
    "NaN",
    "-Infinity",
    "1e999",
    "-1e999",
    "1e-999",
    "0",
    "-0.0",
    "-1",
    "2.5",
    "9" * 400,
    "9" * 4299,
    "-" + "9" * 4299,
    "9" * 4301,
    "18446744073709551616",
    "1e308",
    "0.1",
    "1E400",
    "5e-324",
    "200",
    "429",
]
TEXTS = [
    "",
    " ",
    "x",
    "\ud800",
    "\udfff\ud800",
    "\x00",
    "\x1b[2J\x07",
    "\u202e\u200b\ufeff",
    "e\u0301" * 9,
    "9" * 5000,
    "1e999999999",
    "1e-999999999999999999",
    "sNaN",
    "Infinity",
    "-0",
    "0x1",
    "\u0661",
    "²",
    "content_filter",
    "error",
    "429",
    "insufficient_quota",
    '<tool_call>\n{"name": "f"',
    "</tool_call>",
    '<tool_call>\n{"name": "f", "arguments": {"a": 1e999}}\n</tool_call>',
    "Answer: 1e999",
    "Answer: 5",
    "Answer: " + "9" * 400,
    "</think>",
    "Hint: ",
    "{}",
    "[" * 2000,
    '{"a":' * 70 + "1" + "}" * 70,
    '{"a": NaN, "a": -1e999}',
    '{"e\\u0301": 1, "\\u00e9": 2}',
    "\U0001f600" * 50,
    "a" * 3000,
]
KEY_WORDS = """
choices message content tool_calls function name arguments finish_reason usage
prompt_tokens completion_tokens cost is_byok cost_details upstream_inference_cost error
code type metadata reasons flagged_input innererror detail model id data pricing prompt
completion request internal_reasoning logprobs text
"""
KEYS = [*KEY_WORDS.split(), "\ud800", ""]
STATUSES = [*range(100, 104), *range(199, 207), *range(299, 309), *range(400, 430), 451, 499]
STATUSES += [*range(500, 530), 599, 600, 777, 999]
DAYS, MONTHS = ["Mon", "Sun", "Monday", "Xyz", ""], ["Jan", "Feb", "Dec", "Foo", "13"]
YEARS = ["0", "1", "70", "1969", "2026", "9999", "10000", "99999", "9" * 20, "-5"]
ZONES = [
    "GMT",
    "UTC",
    "+0000",
    "-9999",
    "+2400",
    "+99999999999999999999",
    "EST",
    "-0000",
    "",
    "(x)",
]
ENCODINGS = [
    "gzip",
    "GZIP",
    "x-gzip",
    "gzip, gzip",
    "deflate",
    "br",
    "zstd",
    "identity",
    "gzip;q=0",
    ",",
    "\x80",
]
LOCATIONS = [
    "http://[::1",
    "//",
    "http://\u2603.test/",
    "http://a:99999999/",
    "javascript:0",
    "http://" + "a" * 300,
    "/x",
    "https://user:pass@elsewhere.test/",
    "http://xn--a",
    "\x7f",
    "http://a b/",
    ":",
    "?",
    "http:///",
]
COOKIES = [
    "a=b; expires=Thu, 01 Jan 99999 00:00:00 GMT",
    "=;",
    "a=b; max-age=" + "9" * 99,
    'a=b; domain=..; path="',
    "a=b; expires=" + "-" * 200,
    "; ; ;",
    'a=b; version=x; port="1,x"',
]


class HostileReplies:
    """The replies of one seed and one test, so that no two tests make the same ones."""

    def __init__(self, seed: int, test: str) -> None:
        self.rng = random.Random(f"{test} {seed}")

    def completion(self) -> httpx.Response:
        """A reply to a query."""
        return self._response(self.rng.choice([self._answer, self._answer, self._error])())

    def listing(self) -> httpx.Response:
        """A reply to a request for the list of models and their prices."""
        return self._response(self.rng.choice([self._models, self._models, self._error])())

    def _answer(self) -> dict[str, Any]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        spoken = {
            "role": "assistant",
            "content": "Answer: 5",
            "tool_calls": self._one([[], [call]]),
        }
        usage = {
            "prompt_tokens": 9,
            "completion_tokens": 9,
            "cost": 0.001,
            "is_byok": True,
            "cost_details": {"upstream_inference_cost": 0.1},
        }
        choice = {
            "index": 0,
            "message": spoken,
            "finish_reason": "stop",
            "logprobs": {"content": []},
        }
        return {"id": "g1", "model": "m", "choices": [choice], "usage": usage}

    def _error(self) -> dict[str, Any]:
        error = {
            "message": "no",
            "code": self._one([429, "502", "content_filter", None]),
            "type": "x",
            "metadata": {"reasons": ["a"], "error_type": "x"},
            "innererror": {"code": "x"},
        }
        return {"error": error, "usage": {"cost": 0.5}}

    def _models(self) -> dict[str, Any]:
        pricing = {
            "prompt": "0.000001",
            "completion": "0.000002",
            "request": "0",
            "internal_reasoning": "0",
        }
        return {"data": [{"id": "other"}, {"id": "some/model", "pricing": pricing}]}

    def _response(self, body: Any) -> httpx.Response:
        rng = self.rng
        for _ in range(rng.choice([0, 1, 1, 2, 3, 8])):
            body = self._mutated(body)
        headers, content = self._encoded(self._damaged(_written(body)))
        status = 200 if rng.random() < 0.6 else rng.choice(STATUSES)
        return httpx.Response(
            status, headers=headers + self._headers(), stream=Pieces(content, rng)
        )

    def _mutated(self, value: Any) -> Any:
        """Replace, remove, add or wrap one value somewhere inside."""
        if not isinstance(value, dict | list) or not value or self.rng.random() < 0.15:
            return self._atom(value)
        value = copy.copy(value)
        place = self.rng.choice(list(value) if isinstance(value, dict) else list(range(len(value))))
        act = self.rng.random()
        if act < 0.15:
            del value[place]
        elif act < 0.3 and isinstance(value, dict):
            value[self.rng.choice(KEYS)] = self._atom(value[place])
        else:
            value[place] = self._mutated(value[place])
        return value

    def _atom(self, old: Any) -> Any:
        rng = self.rng
        kind = rng.randrange(9)
        if kind < 3:
            return RAW + rng.choice(NUMBERS)
        if kind < 6:
            return rng.choice(TEXTS)
        if kind == 6:
            return rng.choice([None, True, False, [], {}, [None], [[]], {"": {}}, [old, old]])
        if kind == 7:
            levels = rng.choice([2, 30, 63, 70, 400, 5000])
            opened, closed = rng.choice(
                [("[", "]"), ('{"a":', "}"), ('{"error":', "}"), ('[{"a":[', "]}]")]
            )
            return RAW + opened * levels + "1" + closed * levels
        return {rng.choice(KEYS): old for _ in range(3)}

    def _damaged(self, raw: bytes) -> bytes:
        rng, body = self.rng, bytearray(raw)
        if rng.random() < 0.75:
            return raw
        for _ in range(rng.choice([1, 2, 9])):
            at = rng.randrange(len(body) + 1)
            body[at : at + rng.choice([0, 1, 1, 50])] = rng.randbytes(rng.choice([0, 1, 1, 4]))
        return bytes(body)

    def _encoded(self, raw: bytes) -> tuple[list[tuple[bytes, bytes]], bytes]:
        rng = self.rng
        if rng.random() < 0.7:
            return [], raw
        ways = [
            gzip.compress,
            zlib.compress,
            bytes,
            lambda data: gzip.compress(gzip.compress(data)),
            lambda data: gzip.compress(data)[: rng.randrange(30)],
        ]
        names = [
            (b"content-encoding", rng.choice(ENCODINGS).encode("latin-1"))
            for _ in range(rng.choice([1, 1, 1, 2]))
        ]
        return names, rng.choice(ways)(raw)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        rng, headers = self.rng, list[tuple[str, str]]()
        if rng.random() < 0.5:
            headers.append(("Retry-After", self._retry_after()))
        extra = [
            ("Location", rng.choice(LOCATIONS)),
            ("Set-Cookie", rng.choice(COOKIES)),
            ("X-Request-Id", rng.choice(TEXTS)),
            ("Content-Length", rng.choice(NUMBERS)),
            (
                "Content-Type",
                "application/json; charset=" + rng.choice(["utf-16", "rot13", "x" * 99, '"']),
            ),
            ("Cf-Ray", rng.choice(TEXTS)),
            ("X-Long", "y" * rng.choice([9, 70_000])),
        ]
        headers += rng.sample(extra, rng.choice([0, 0, 1, 2]))
        return [(name.encode(), value.encode("utf-8", "replace")) for name, value in headers]

    def _retry_after(self) -> str:
        rng = self.rng
        if rng.random() < 0.4:
            return rng.choice(NUMBERS + TEXTS)
        clock = rng.choice(["00:00:00", "23:59:60", "99:99:99", "-1:0:0", "1", ""])
        forms = [
            "{d}, {n} {m} {y} {c} {z}",
            "{d}, {n}-{m}-{y} {c} {z}",
            "{d} {m} {n} {c} {y}",
            "{y} {z}",
            "{c}{z}",
        ]
        return rng.choice(forms).format(
            d=rng.choice(DAYS),
            n=rng.choice(["0", "1", "31", "99999999999"]),
            m=rng.choice(MONTHS),
            y=rng.choice(YEARS),
            c=clock,
            z=rng.choice(ZONES),
        )

    def _one(self, values: list[Any]) -> Any:
        return self.rng.choice(values)


class Pieces(httpx.AsyncByteStream):
    """A body that arrives in a few pieces, and sometimes breaks off."""

    def __init__(self, content: bytes, rng: random.Random) -> None:
        size = max(1, len(content) // rng.choice([1, 1, 2, 5]))
        self._pieces = [content[at : at + size] for at in range(0, len(content), size)]
        self._breaks = rng.random() < 0.02

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece
        if self._breaks:
            raise httpx.ReadError("cut")


def _written(body: Any) -> bytes:
    """Write JSON in which texts marked RAW stand as they are."""
    if isinstance(body, str) and body.startswith(RAW):
        return body.removeprefix(RAW).encode()
    if isinstance(body, dict):
        inner = [_key(key) + b":" + _written(value) for key, value in body.items()]
        return b"{" + b",".join(inner) + b"}"
    if isinstance(body, list):
        return b"[" + b",".join(map(_written, body)) + b"]"
    return json.dumps(body).encode()


def _key(key: str) -> bytes:
    return json.dumps(key).encode()
