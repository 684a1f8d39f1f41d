"""How a provider is reached: endpoint, timeouts, retries, and the API key.

The settings are plain values that are sent between processes, without API keys. A key is read from
its source for each request: a file, the environment of a process that sends requests itself, or the
`Keys` that a run sends to its actors. `Secret` holds it for one request, and redacts it from stored
data.
"""

import base64
import logging
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from composer_mesh.actors.provider.errors import ProviderAuthError, ProviderRequestError
from composer_mesh.configs.regular_files import read_regular
from composer_mesh.rollouts.budget import Prices


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


HIDDEN = "[key]"
SHORTEST_SECRET = 8
"""Shorter keys are not secret, and redacting them would corrupt ordinary text."""
LONGEST_KEY = 16_384

log = logging.getLogger(__name__)


class Keys(dict[str, str]):
    """API keys by the names of their variables, as sent to an actor that uses them.

    They are an argument of its `load`, over the run's own connections: environments and commands of
    processes are logged, inherited and listed. The text of this mapping shows no key.
    """

    def __repr__(self) -> str:
        return f"Keys({', '.join(self)})"


class Secret:
    """The API key of one request, or none; exposed only as a header.

    Texts are searched for the key by letters and digits alone: whatever stands between them, in
    either case, as it is, percent-encoded, in hexadecimal digits, or within base64. A part of the
    key, or another cipher, is not found.
    """

    __slots__ = ("_forms", "_key")

    def __init__(self, key: str | None) -> None:
        self._key = key
        self._forms = () if key is None or len(key) < SHORTEST_SECRET else tuple(_forms(key))

    def __repr__(self) -> str:
        return "Secret()"

    @property
    def headers(self) -> dict[str, str]:
        return {} if self._key is None else {"Authorization": f"Bearer {self._key}"}

    def hide(self, text: str) -> str:
        """Return the text with the key redacted."""
        raw = text.encode("utf-8", "surrogatepass")
        hidden = self.hide_bytes(raw)
        return text if hidden is raw else hidden.decode("utf-8", "surrogatepass")

    def hide_bytes(self, raw: bytes) -> bytes:
        found = raw.translate(None, _BETWEEN).lower() if self._forms else b""
        for form in self._forms:
            if form in found:
                signs = (re.escape(bytes([sign])) for sign in form)
                pattern = rb"[^A-Za-z0-9]*+".join(signs)
                raw = re.sub(pattern, HIDDEN.encode(), raw, flags=re.IGNORECASE)
        return raw

    def hide_all(self, value: Any) -> Any:
        """Redact the key in all texts of a parsed JSON value, however they were escaped."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, list):
            return [self.hide_all(inner) for inner in value]
        if isinstance(value, dict):
            return {self.hide(key): self.hide_all(inner) for key, inner in value.items()}
        return value


_BETWEEN = bytes(one for one in range(256) if not (one < 128 and chr(one).isalnum()))
"""All bytes that are no ASCII letters and digits."""


def _forms(key: str) -> Iterator[bytes]:
    """Yield the forms of a key, in small letters and digits alone; too short ones are left out."""
    raw = key.encode()
    percent = "".join(one if one.isalnum() else f"%{ord(one):02x}" for one in key)
    forms = [raw, percent.encode(), raw.hex().encode()]
    for before in range(3):  # bytes of a group of three that stand before the key
        whole = base64.b64encode(b"\0" * before + raw)
        forms.append(whole[-(-before * 8 // 6) : (before + len(raw)) * 8 // 6])
    for form in dict.fromkeys(one.translate(None, _BETWEEN).lower() for one in forms):
        if len(form) >= SHORTEST_SECRET:
            yield form


def read_key(teacher: TeacherEndpoint, environ: Mapping[str, str]) -> Secret:
    """Read the teacher's current key; raises ProviderAuthError if it cannot be sent."""
    if teacher.api_key_file is not None:
        source, key = str(teacher.api_key_file), _from_file(teacher.name, teacher.api_key_file)
    elif teacher.api_key_env is not None:
        source, key = teacher.api_key_env, environ.get(teacher.api_key_env, "")
    else:
        return Secret(None)
    key = key.strip()
    if not key:
        raise ProviderAuthError(teacher.name, f"{source} is not set or empty")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ProviderAuthError(teacher.name, f"{source} holds characters that no HTTP header may")
    return Secret(key)


def warn_if_others_can_read(path: Path) -> None:
    """Log a warning for a key file that other users of the machine can read."""
    if os.name == "posix" and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("other users can read the key file %s: chmod 600 it", path)


def _from_file(teacher: str, path: Path) -> str:
    try:
        return read_regular(path, LONGEST_KEY).decode("ascii", errors="replace")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ProviderAuthError(teacher, f"the key file {path} cannot be read ({reason})") from None
