"""A registry's HTTP API, as far as pulling goes: manifests and blobs, with the token it requires.

Credentials go to the registry and to the server of tokens that it names, never to where it
redirects. Plain HTTP is used for this machine only. What is late, refused or broken is tried
again, as long as there is time.
"""

from __future__ import annotations

import base64
import email.utils
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urljoin, urlsplit

import httpx

from composer_mesh.plugins.harbor.containers.port import ContainerError
from composer_mesh.plugins.harbor.images.manifest import INDEXES, MANIFESTS, MOST_JSON_BYTES
from composer_mesh.plugins.harbor.images.reference import RegistryReference, is_loopback

ACCEPT = ", ".join((*INDEXES, *MANIFESTS))
TRIES = 5
FIRST_WAIT_S = 0.5
MOST_REDIRECTS = 5
CHUNK = 1 << 20
MOST_ERROR_BYTES = 1 << 16
SILENCE_S = 30.0
"""Seconds without a byte after which a request is tried again."""
CHALLENGE = re.compile(r'([a-zA-Z]+)="([^"]*)"')
MISSING = ("MANIFEST_UNKNOWN", "NAME_UNKNOWN", "BLOB_UNKNOWN", "NAME_INVALID", "TAG_INVALID")
AGAIN = (408, 425, 429, 500, 502, 503, 504)
T = TypeVar("T")


class _Again(Exception):
    """A request that may succeed later; `wait_s` is what the server requires, or None."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why, wait_s)
        self.why, self.wait_s = why, wait_s


@dataclass
class ImageRegistry:
    """Pulls one image; `until` is the last moment, by the monotonic clock."""

    reference: RegistryReference
    until: float
    client: httpx.Client
    credentials: str | None = None
    pause: Callable[[float], None] = time.sleep
    _token: str | None = field(default=None, repr=False)

    def manifest(self, reference: str) -> tuple[bytes, str]:
        """Return the bytes of a manifest or an index, and its media type."""
        path = f"{self.reference.repository}/manifests/{reference}"
        with self._get(path, {"Accept": ACCEPT}) as pieces:
            content = b"".join(pieces.bounded(MOST_JSON_BYTES))
            return content, pieces.media_type

    @contextmanager
    def blob(self, digest: str, size: int) -> Iterator[Iterator[bytes]]:
        """Yield the pieces of a blob, which end early or late only with an error."""
        path = f"{self.reference.repository}/blobs/{digest}"
        with self._get(path, {"Accept-Encoding": "identity"}) as pieces:
            yield pieces.bounded(size)

    def pull(self, digest: str, size: int, write: Callable[[Iterator[bytes]], None]) -> None:
        """Hand a blob to `write`, from its start again for each attempt."""

        def once() -> None:
            with self.blob(digest, size) as pieces:
                write(pieces)

        self._tried(once)

    def manifest_tried(self, reference: str) -> tuple[bytes, str]:
        """Return `manifest`, tried again where it fails on its way."""
        return self._tried(lambda: self.manifest(reference))

    def _tried(self, once: Callable[[], T]) -> T:
        wait_s = FIRST_WAIT_S
        for attempt in range(1, TRIES + 1):
            try:
                return once()
            except (_Again, httpx.TransportError) as error:
                why = error.why if isinstance(error, _Again) else f"{type(error).__name__}: {error}"
                wanted = error.wait_s if isinstance(error, _Again) else None
                late = time.monotonic() + (wanted or wait_s) >= self.until
                if attempt == TRIES or late:
                    end = ", and there is no more time" if late else f" in {TRIES} attempts"
                    raise ContainerError("registry", f"{self.reference}: {why}{end}") from None
                self.pause(wait_s if wanted is None else wanted)
                wait_s *= 2
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def _get(self, path: str, headers: Mapping[str, str]) -> Iterator[_Pieces]:
        """Open a resource, with a token if one is required, following redirects."""
        url = f"{self.reference.base_url}/{path}"
        for again in (True, False):
            with self._redirected(url, headers) as answer:
                if answer.status_code == 401 and again:
                    self._authorize(answer.headers.get("WWW-Authenticate", ""))
                    continue
                self._check(answer, path)
                yield _Pieces(answer, self.until, str(self.reference))
                return

    @contextmanager
    def _redirected(self, url: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        own = {**headers, **({"Authorization": self._token} if self._token else {})}
        for _ in range(MOST_REDIRECTS):
            with self.client.stream("GET", url, headers=own, timeout=self._patience()) as answer:
                if not answer.is_redirect:
                    yield answer
                    return
                target = urljoin(url, answer.headers["Location"])
            if urlsplit(target)[:2] != urlsplit(url)[:2]:
                own = dict(headers)
            url = _safe(target)
        raise ContainerError("registry", f"{self.reference}: more than {MOST_REDIRECTS} redirects")

    def _patience(self) -> float:
        left = self.until - time.monotonic()
        if left <= 0:
            raise _Again("it was too slow")
        return min(SILENCE_S, left)

    def _authorize(self, challenge: str) -> None:
        """Get what a registry requires: a token, or the user's name and password."""
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and self.credentials is not None:
            self._token = f"Basic {self.credentials}"
            return
        named = {name.lower(): value for name, value in CHALLENGE.findall(rest)}
        if scheme.lower() != "bearer" or "realm" not in named:
            raise ContainerError(
                "registry", f"{self.reference}: it requires {scheme[:40] or 'no known'} credentials"
            )
        wanted = {"scope": f"repository:{self.reference.repository}:pull"}
        wanted |= {name: named[name] for name in ("service", "scope") if name in named}
        headers = {} if self.credentials is None else {"Authorization": f"Basic {self.credentials}"}
        realm, patience = _safe(named["realm"]), self._patience()
        with self.client.stream(
            "GET", realm, params=wanted, headers=headers, timeout=patience
        ) as answer:
            self._check(answer, "a token")
            pieces = _Pieces(answer, self.until, str(self.reference))
            content = b"".join(pieces.bounded(MOST_JSON_BYTES))
        try:
            found = json.loads(content)
            token = found.get("token") or found["access_token"]
        except (ValueError, KeyError, AttributeError):
            raise ContainerError("registry", f"{self.reference}: a token without a text") from None
        self._token = f"Bearer {token}"

    def _check(self, answer: httpx.Response, what: str) -> None:
        """Raise for an answer that is not what was requested."""
        if answer.status_code == 200:
            return
        codes = _codes(next(answer.iter_bytes(MOST_ERROR_BYTES), b""))
        said = f"{what}: status {answer.status_code} {' '.join(codes)}".strip()
        if answer.status_code in AGAIN:
            raise _Again(said, _retry_after(answer.headers.get("Retry-After")))
        if answer.status_code == 404 or set(codes) & set(MISSING):
            raise ContainerError("image_missing", f"{self.reference}: {said}")
        raise ContainerError("registry", f"{self.reference}: {said}")


@dataclass
class _Pieces:
    """The body of an answer; too many or too few bytes, and too much time, are errors."""

    answer: httpx.Response
    until: float
    what: str

    @property
    def media_type(self) -> str:
        return str(self.answer.headers.get("Content-Type", "")).partition(";")[0].strip()

    def bounded(self, most: int) -> Iterator[bytes]:
        read = 0
        for piece in self.answer.iter_bytes(CHUNK):
            read += len(piece)
            if read > most:
                raise ContainerError("registry", f"{self.what}: more than {most:,} bytes arrived")
            if time.monotonic() >= self.until:
                raise _Again(f"{read:,} bytes arrived, which was too slow")
            yield piece


def _safe(url: str) -> str:
    """Return a URL that credentials or images may come from; raises ContainerError."""
    found = urlsplit(url)
    if found.scheme == "https" or (found.scheme == "http" and is_loopback(found.netloc)):
        return url
    raise ContainerError("registry", f"it leads to {url[:200]!r}, which is no https URL")


def _codes(text: bytes) -> list[str]:
    """Return the codes of an answer's errors, such as MANIFEST_UNKNOWN."""
    try:
        errors = json.loads(text).get("errors") or []
        return [str(one["code"])[:100] for one in errors[:5]]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return []


def _retry_after(value: str | None) -> float | None:
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def stored_credentials(registry: str) -> str | None:
    """Return what `podman login` or `docker login` stored for a registry: base64 of user:password.

    Helpers that hold credentials elsewhere are not run.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = os.environ.get("DOCKER_CONFIG")
    places = [
        *([Path(runtime) / "containers/auth.json"] if runtime else []),
        (Path(folder) if folder else Path.home() / ".docker") / "config.json",
    ]
    names = (registry, f"https://{registry}/v1/", f"https://index.{registry}/v1/")
    for place in places:
        try:
            stored = json.loads(place.read_text(encoding="utf-8")).get("auths", {})
            found = [stored[name]["auth"] for name in names if name in stored]
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            continue
        if found and base64.b64decode(found[0], validate=False):
            return str(found[0])
    return None
