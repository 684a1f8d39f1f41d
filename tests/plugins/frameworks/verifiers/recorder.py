"""Passes requests on to an endpoint and keeps them."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Recorder(ThreadingHTTPServer):
    """Its `requests` are what came, in order."""

    def __init__(self, origin: str) -> None:
        self.origin, self.requests = origin, list[dict[str, Any]]()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def own(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        session = {"x-session-id": self.headers["X-Session-ID"]}
        self.server.requests.append(
            {"path": self.path, "headers": session, "body": json.loads(body)}
        )
        self._pass_on(body)

    def _pass_on(self, body: bytes | None) -> None:
        names = ("Authorization", "X-Session-ID", "Content-Type")
        headers = {name: self.headers[name] for name in names if name in self.headers}
        request = urllib.request.Request(self.server.origin + self.path, body, headers)
        with urllib.request.urlopen(request) as answer:
            content, kind = answer.read(), answer.headers["Content-Type"]
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def recorder(origin: str) -> Iterator[Recorder]:
    """A recorder in front of an endpoint."""
    with Recorder(origin) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
