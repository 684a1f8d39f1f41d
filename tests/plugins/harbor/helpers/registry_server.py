"""A registry on this machine, with tokens, redirects to another port, and faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tiny_images import Blobs

Answer = tuple[int, dict[str, str], bytes]


@dataclass
class FakeRegistry:
    """Serves the image `team/tiny:v1` to those with a token; blobs come from `storage`."""

    image: Blobs
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    stored: list[tuple[str, str | None]] = field(default_factory=list)
    fault: Callable[[str], Answer | None] = lambda _path: None
    port: int = 0
    storage_port: int = 0
    slow_s: float = 0.0

    @property
    def reference(self) -> str:
        return f"127.0.0.1:{self.port}/team/tiny:v1"

    def answer(self, path: str, authorization: str | None) -> Answer:
        """Answer a request to the registry itself."""
        self.requests.append((path, authorization))
        if path.startswith("/token"):
            return 200, {}, b'{"token": "secret"}'
        if authorization != "Bearer secret":
            realm = f"http://127.0.0.1:{self.port}/token"
            challenge = f'Bearer realm="{realm}",service="s",scope="repository:team/tiny:pull"'
            return 401, {"WWW-Authenticate": challenge}, b""
        if (broken := self.fault(path)) is not None:
            return broken
        _, _, kind, name = path.removeprefix("/v2/").split("/", 3)
        if kind == "blobs":
            return 307, {"Location": f"http://127.0.0.1:{self.storage_port}/{name}"}, b""
        described = self.image.described
        digest = described["digest"] if name == "v1" else name
        if digest not in self.image.blobs:
            return 404, {}, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}'
        return 200, {"Content-Type": described["mediaType"]}, self.image.blobs[digest]

    def answer_stored(self, path: str, authorization: str | None) -> Answer:
        """Answer a request to the storage."""
        self.stored.append((path, authorization))
        return 200, {}, self.image.blobs[path.lstrip("/")]


@contextmanager
def served(registry: FakeRegistry) -> Iterator[FakeRegistry]:
    """Serve a registry and its storage on two ports."""
    servers = [_server(registry, registry.answer), _server(registry, registry.answer_stored)]
    registry.port, registry.storage_port = (one.server_address[1] for one in servers)
    for one in servers:
        threading.Thread(target=one.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield registry
    finally:
        for one in servers:
            one.shutdown()
            one.server_close()


def _server(
    registry: FakeRegistry, answer: Callable[[str, str | None], Answer]
) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answer(self.path, self.headers.get("Authorization"))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            for place in range(0, len(body), 100):
                time.sleep(registry.slow_s)
                self.wfile.write(body[place : place + 100])

        def log_message(self, *_: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)
