"""A small HTTP server on threads, with bounded requests and errors in OpenAI's JSON.

The servers of this project that answer OpenAI clients are subclasses of its handler. It does not
use Monarch.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOOPBACK = "127.0.0.1"
IDLE_S = 60.0
PIECE = 2**16


class Refusal(Exception):
    """An error response to a request."""

    def __init__(
        self, status: HTTPStatus, text: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(status, text, code, param)
        self.status, self.text, self.code, self.param = status, text, code, param

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's JSON."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.text, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class JsonServer(ThreadingHTTPServer):
    """Serves on its own port and threads, from `start` to `close`; port 0 is any free one."""

    daemon_threads = False  # so that server_close joins them
    request_queue_size = 256
    most_connections = 2048
    """Connections beyond it are closed unread."""

    def __init__(self, handler: type[JsonHandler], address: tuple[str, int]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(address, handler)
        name = handler.server_version
        serve = self.serve_forever
        self._thread = threading.Thread(target=serve, kwargs={"poll_interval": 0.1}, name=name)
        self._thread.daemon = True

    @property
    def origin(self) -> str:
        """The beginning of the server's URLs."""
        name, port = self.server_name, self.server_port
        return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Close all connections. Waits until the server's threads have ended."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()

    def server_bind(self) -> None:
        """Bind without a DNS lookup of the server's own name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = len(self._open) >= self.most_connections
            self._open.add(request)
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):  # its peer has closed it already
                    connection.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnected; report all other errors."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class JsonHandler(BaseHTTPRequestHandler):
    """Answers the requests of one connection; subclasses authorize and answer."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    disable_nagle_algorithm = True
    wbufsize = PIECE
    largest_request = 4 * 2**20

    def authorize(self) -> None:
        """Raise a Refusal unless the client may ask; the body is not read yet."""
        raise NotImplementedError

    def respond(self, route: str, body: bytes) -> dict[str, Any] | None:
        """Return the answer to a request like "POST /path"; None if it was sent already."""
        raise NotImplementedError

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        try:
            length = self._length() if method == "POST" else 0
            body = self._authorized_body(length)
            reply = self.respond(f"{method} {self.path.partition('?')[0]}", body)
        except Refusal as refusal:
            self.send_json(refusal.status, refusal.body())
        else:
            if reply is not None:
                self.send_json(HTTPStatus.OK, reply)

    def _authorized_body(self, length: int) -> bytes:
        """Read the complete body, which keep-alive requires; a stranger's is not kept."""
        try:
            self.authorize()
        except Refusal:
            while length > 0 and (piece := self.rfile.read(min(length, PIECE))):
                length -= len(piece)
            raise
        return self.rfile.read(length)

    def _length(self) -> int:
        """Return the length of the body; a too long one is refused unread."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self.close_connection = True
            raise Refusal(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length")
        if len(length) > 9 or int(length) > self.largest_request:
            self.close_connection = True
            raise Refusal(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has {length[:20]} bytes, the limit is {self.largest_request}: send less",
            )
        return int(length)

    def send_json(self, status: int, body: dict[str, Any]) -> None:
        """Send a whole response."""
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send the server's own errors (bad request line, unknown method) as JSON too."""
        self.close_connection = True
        text = message or explain or HTTPStatus(code).phrase
        self.send_json(code, Refusal(HTTPStatus(code), text).body())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, to keep a run's output free of server logs."""
