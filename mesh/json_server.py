"""A small HTTP server on threads, with bounded requests and errors in OpenAI's JSON.

It bounds connections, the time in which the headers and the body of a request arrive, a body, and
the unfinished bodies of one client and of all together. The servers of this project that answer
OpenAI clients are subclasses of its handler. It does not use Monarch.

Bytes that the clients of a server hold at the same time, bounded for each and for all.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import socket
import socketserver
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from composer_mesh.mesh.tcp_peer import ROOT_USER, tcp_peer_user


class BudgetSpent(Exception):
    """A client holds too many bytes, or all together do; `own` is whether it is the client."""

    def __init__(self, own: bool, bound: int) -> None:
        super().__init__(own, bound)
        self.own, self.bound = own, bound

    def __str__(self) -> str:
        whose = "one client" if self.own else "all clients together"
        return (
            f"unfinished requests of {whose} may hold {self.bound:,} bytes: send fewer at a time, "
            "and this one again later"
        )


class ByteBudget:
    """Counts the bytes that are held, in any thread."""

    def __init__(self, of_one: int, of_all: int) -> None:
        self._of_one, self._of_all = of_one, of_all
        self._held: dict[str, int] = {}
        self._total = 0
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """Bytes that are held now."""
        return self._total

    @contextlib.contextmanager
    def held_by(self, client: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that holds so many bytes more; the end of the block releases them.

        It raises BudgetSpent where they would be too many.
        """
        held = 0

        def hold(count: int) -> None:
            nonlocal held
            self.change(client, count)
            held += count

        try:
            yield hold
        finally:
            self.change(client, -held)

    def change(self, client: str, count: int) -> None:
        """Count bytes more, or less; raise BudgetSpent where they would be too many."""
        with self._lock:
            own = self._held.get(client, 0) + count
            if count > 0 and own > self._of_one:
                raise BudgetSpent(True, self._of_one)
            if count > 0 and self._total + count > self._of_all:
                raise BudgetSpent(False, self._of_all)
            self._total += count
            if own:
                self._held[client] = own
            else:
                self._held.pop(client, None)


LOOPBACK = "127.0.0.1"
IDLE_S, BODY_S = 60.0, 60.0
"""Seconds until the headers of a request are whole, from the answer before; and its body."""
PIECE = 2**16
BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
RETRY_AFTER_S = 1
"""Sent with these; some clients give up at once where nothing says when to try again."""


def most_connections(most: int) -> int:
    """Return how many connections this process has descriptors for, besides files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    return max(1, min(most, soft - max(soft // 4, min(64, soft // 2))))


def for_others(most: int) -> int:
    """Return how many of the connections other users may have; the rest is the owner's."""
    return most - max(1, most // 8)


def _is_owners(connection: socket.socket) -> bool:
    try:
        return tcp_peer_user(connection) in (os.geteuid(), ROOT_USER)
    except OSError:
        return False


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
    """Connections beyond it, or beyond the descriptors there are, are closed unread. An eighth is
    for the user who started the server."""
    client_bytes, all_bytes = 64 * 2**20, 256 * 2**20
    """Of unfinished bodies of one client, and of all."""

    def __init__(self, handler: type[JsonHandler], address: tuple[str, int]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.bodies = ByteBudget(self.client_bytes, self.all_bytes)
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
            count = len(self._open)
            self._open.add(request)
        most = most_connections(self.most_connections)
        if count >= most or (count >= for_others(most) and not _is_owners(request)):
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


class _Reader(io.RawIOBase):
    """Reads a connection until a moment, however slowly bytes come; sending has its own time."""

    def __init__(self, connection: socket.socket, sending_s: float) -> None:
        self._connection, self._sending_s = connection, sending_s
        self.until = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(self._sending_s)


class JsonHandler(BaseHTTPRequestHandler, ABC):
    """Answers the requests of one connection; subclasses authorize and answer."""

    server: Any
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    body_s = BODY_S
    disable_nagle_algorithm = True
    wbufsize = PIECE
    largest_request = 4 * 2**20
    most_values = 1_000_000
    """Commas of a body: a parser of JSON holds up all threads while it builds values."""

    @abstractmethod
    def authorize(self) -> None:
        """Raise a Refusal unless the client may ask; the body is not read yet."""

    @abstractmethod
    def respond(self, route: str, body: bytes) -> dict[str, Any] | None:
        """Return the answer to a request like "POST /path"; None if it was sent already."""

    def client(self) -> str:
        """Return whose body is read: of an authorized request."""
        return ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._reader = _Reader(self.connection, self.timeout)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        self._reader.until = time.monotonic() + self.timeout
        super().handle_one_request()

    def do_GET(self) -> None:
        """Answer a request of either method."""
        try:
            length = self._length() if self.command == "POST" else 0
            body = self._authorized_body(length)
            reply = self.respond(f"{self.command} {self.path.partition('?')[0]}", body)
        except Refusal as refusal:
            self.send_json(refusal.status, self.error_body(refusal))
        else:
            if reply is not None:
                self.send_json(HTTPStatus.OK, reply)

    do_POST = do_GET

    def error_body(self, refusal: Refusal) -> dict[str, Any]:
        """Return the JSON of an error, in the form of the route's protocol."""
        return refusal.body()

    def _authorized_body(self, length: int) -> bytes:
        """Read the complete body, which keep-alive requires; a stranger's is not kept."""
        self._reader.until = time.monotonic() + self.body_s
        try:
            try:
                self.authorize()
            except Refusal:
                for _ in self._pieces(length):
                    pass
                raise
            return self._kept_body(length)
        except TimeoutError:
            self.close_connection = True
            text = f"the body did not arrive in {self.body_s:g} s: send it faster"
            raise Refusal(HTTPStatus.REQUEST_TIMEOUT, text) from None

    def _kept_body(self, length: int) -> bytes:
        found = bytearray()
        try:
            with self.server.bodies.held_by(self.client()) as hold:
                for piece in self._pieces(length):
                    hold(len(piece))
                    found += piece
        except BudgetSpent as spent:
            self.close_connection = True
            busy = HTTPStatus.SERVICE_UNAVAILABLE
            status = HTTPStatus.TOO_MANY_REQUESTS if spent.own else busy
            raise Refusal(status, str(spent)) from None
        if (values := found.count(b",")) > self.most_values:
            text = f"the body has {values:,} values, above {self.most_values:,}: send less"
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
        return bytes(found)

    def _pieces(self, length: int) -> Iterator[bytes]:
        while length > 0 and (piece := self.rfile.read(min(length, PIECE))):
            length -= len(piece)
            yield piece

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
        self.send_content(status, json.dumps(body).encode(), "application/json")

    def send_content(self, status: int, content: bytes, kind: str) -> None:
        """Send a whole response of another type."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if status in BUSY:
            self.send_header("Retry-After", str(RETRY_AFTER_S))
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
