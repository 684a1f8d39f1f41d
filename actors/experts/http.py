"""HTTP server of the experts: the part of the OpenAI API that a teacher needs.

    GET  /v1/models
    POST /v1/chat/completions      (not streamed, one choice)

It listens on one address, by default 127.0.0.1, and requires the run's bearer token. It does not
use Monarch.
"""

import contextlib
import hmac
import json
import secrets
import socket
import socketserver
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from composer_mesh.actors.experts.panel import ExpertPanel, UnknownExpert
from composer_mesh.rollouts.traces import Message

LOOPBACK = "127.0.0.1"
LARGEST_REQUEST = 4 * 2**20
IDLE_S = 60.0
TOKEN_ENV = "COMPOSER_MESH_EXPERT_TOKEN"
"""The name of the token among the `Keys` of an actor that queries builtin teachers."""


def new_token() -> str:
    """Return a new bearer token for one run."""
    return secrets.token_urlsafe(32)


class Refusal(Exception):
    """An error response to a request."""

    def __init__(self, status: HTTPStatus, text: str, code: str | None = None) -> None:
        super().__init__(status, text, code)
        self.status, self.text, self.code = status, text, code


class ExpertServer:
    """Serves a panel on its own port and threads, from `start` to `close`.

    Port 0 lets the system choose one.
    """

    def __init__(
        self, panel: ExpertPanel, token: str, port: int = 0, address: str = LOOPBACK
    ) -> None:
        if not token:
            raise ValueError("the token is empty: pass new_token()")
        self._http = _Server(panel, token, (address, port))
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.1}, name="experts"
        )
        self._thread.daemon = True

    @property
    def base_url(self) -> str:
        name, port = self._http.server_name, self._http.server_port
        return f"http://[{name}]:{port}/v1" if ":" in name else f"http://{name}:{port}/v1"

    def start(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        """Close all connections. Waits until the server's threads have ended."""
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # so that server_close joins them
    request_queue_size = 256

    def __init__(self, panel: ExpertPanel, token: str, address: tuple[str, int]) -> None:
        self.panel, self.token = panel, token
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without a DNS lookup of the server's own name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
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


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version = "composer-mesh-experts"
    timeout = IDLE_S
    disable_nagle_algorithm = True
    wbufsize = 2**16

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        try:
            body = self._body() if method == "POST" else b""
            self._authorize()
            reply = self._route(method, body)
        except Refusal as refusal:
            self._send(refusal.status, _error_body(refusal))
        else:
            self._send(HTTPStatus.OK, reply)

    def _body(self) -> bytes:
        """Read the complete body, which keep-alive requires; a too long one is refused unread."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self.close_connection = True
            raise Refusal(HTTPStatus.LENGTH_REQUIRED, "send a Content-Length")
        if len(length) > 9 or int(length) > LARGEST_REQUEST:
            self.close_connection = True
            raise Refusal(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has {length[:20]} bytes, the limit is {LARGEST_REQUEST}: send less",
            )
        return self.rfile.read(int(length))

    def _authorize(self) -> None:
        given = self.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            raise Refusal(HTTPStatus.UNAUTHORIZED, "send the run's bearer token", "invalid_api_key")

    def _route(self, method: str, body: bytes) -> dict[str, Any]:
        route = f"{method} {self.path.partition('?')[0]}"
        if route == "GET /v1/models":
            return self.server.panel.models()
        if route == "POST /v1/chat/completions":
            model, messages = _read_request(body)
            return _complete(self.server.panel, model, messages)
        raise Refusal(HTTPStatus.NOT_FOUND, f"no route {route!r}: POST /v1/chat/completions")

    def _send(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send the server's own errors (bad request line, unknown method) as JSON too."""
        self.close_connection = True
        text = message or explain or HTTPStatus(code).phrase
        self._send(code, _error_body(Refusal(HTTPStatus(code), text)))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, to keep a run's output free of server logs."""


def _read_request(body: bytes) -> tuple[str, list[Message]]:
    try:
        request = json.loads(body.decode())
    except (ValueError, RecursionError):
        raise _bad("the body is not JSON: send an object") from None
    if not isinstance(request, dict) or not isinstance(request.get("model"), str):
        raise _bad('send an object with a string "model"')
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _bad('send a list "messages" of at least one message')
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise _bad('each message needs a string "role"')
    if request.get("stream") or request.get("n") not in (None, 1):
        raise _bad("answers are not streamed and come one at a time: leave out stream and n")
    return request["model"], messages


def _complete(panel: ExpertPanel, model: str, messages: list[Message]) -> dict[str, Any]:
    try:
        return panel.completion(model, messages)
    except UnknownExpert as unknown:
        raise Refusal(HTTPStatus.NOT_FOUND, str(unknown), "model_not_found") from None
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration) as problem:
        raise _bad(f"the messages are no episode of this task ({problem}): send one") from None


def _bad(text: str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, text)


def _error_body(refusal: Refusal) -> dict[str, Any]:
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    error = {"message": refusal.text, "type": kind, "param": None, "code": refusal.code}
    return {"error": error}
