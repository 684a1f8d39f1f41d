"""Settings of the provider client: endpoint, timeouts, retries.

Plain values that are sent between processes, without API keys.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from composer_mesh.actors.provider.errors import ProviderRequestError
from composer_mesh.rollouts.money import Prices


@dataclass(frozen=True, slots=True)
class TeacherEndpoint:
    """A teacher's endpoint and limits.

    `api_key_env` names a variable and `api_key_file` a file; without either no key is sent.
    `max_tokens` is sent, so that `prices` bound the cost of an answer. `routing` is OpenRouter's
    `provider` object; any value but None, even an empty one, marks an OpenRouter endpoint.
    """

    name: str
    base_url: str
    model: str
    api_key_env: str | None = None
    api_key_file: Path | None = None
    max_tokens: int = 1024
    temperature: float | None = None
    prices: Prices | None = None
    concurrency: int = 16
    requests_per_minute: int | None = None
    routing: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for key in ("max_tokens", "concurrency", "requests_per_minute"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise ValueError(f"{key} of {self.name!r} is {value}, below 1: raise it")

    def url(self, path: str) -> str:
        return f"{self.base_url.rstrip('/')}/{path}"

    def check_address(self) -> None:
        """Raise ProviderRequestError if `base_url` is unusable."""
        try:
            url = httpx.URL(self.base_url)
        except httpx.InvalidURL:
            url = httpx.URL("")
        secretive = url.userinfo or url.query or url.fragment
        if url.scheme not in ("http", "https") or not url.host or secretive:
            raise ProviderRequestError(
                self.name, "its base_url is not http(s)://HOST/PATH without credentials or query"
            )


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts in seconds; `total_s` bounds one query with all its retries and waits.

    `read_s` bounds the wait for the next bytes; None leaves it to `total_s`. `line_s` is the
    additional time a query may wait for the teacher's own limits before it is first sent;
    `math.inf` suits batch jobs.
    """

    total_s: float
    connect_s: float = 5.0
    read_s: float | None = None
    line_s: float = 0.0

    def __post_init__(self) -> None:
        for key in ("total_s", "connect_s", "read_s"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{key} is {value}: give a number of seconds above 0")
        if not self.line_s >= 0:
            raise ValueError(f"line_s is {self.line_s}: give a number of seconds, 0 or more")

    def of_request(self) -> httpx.Timeout:
        read_s = self.total_s if self.read_s is None else self.read_s
        return httpx.Timeout(self.total_s, connect=self.connect_s, read=read_s)


@dataclass(frozen=True, slots=True)
class RetryDelays:
    """Number of attempts and their delays: full jitter over a doubling range.

    A provider's Retry-After is the minimum wait, and jitter comes on top, so that clients refused
    together do not retry together.
    """

    attempts: int = 4
    base_s: float = 0.25
    cap_s: float = 8.0
