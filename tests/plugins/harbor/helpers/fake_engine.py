"""A daemon of containers that holds files in memory and runs no programs."""

from __future__ import annotations

import base64
import io
import json
import socketserver
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass
class FakeEngine:
    """What was requested, and what is answered: `outputs` are frames of (stream, bytes)."""

    calls: list[tuple[str, str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    outputs: list[tuple[int, bytes]] = field(default_factory=list)
    exit_code: int | None = 0
    state: dict[str, bool] = field(default_factory=lambda: {"Running": True, "OOMKilled": False})
    faults: dict[str, tuple[int, str]] = field(default_factory=dict)
    hangs: threading.Event | None = None

    def paths(self) -> list[str]:
        """Return the calls in order, without their bodies."""
        return [f"{method} {path}" for method, path, _ in self.calls]

    def answer(self, method: str, path: str, query: dict[str, str], body: bytes) -> Any:
        """Return a status and a body: bytes, or what becomes JSON."""
        for part, fault in self.faults.items():
            if part in path:
                return fault[0], {"message": fault[1]}
        if path.endswith("/archive"):
            return self._archive(method, query["path"], body)
        if path.endswith("/start") and path.startswith("/exec/"):
            if self.hangs is not None:
                self.hangs.wait(30)
            frames = [
                bytes([one, 0, 0, 0]) + len(text).to_bytes(4, "big") + text
                for one, text in self.outputs
            ]
            return 200, b"".join(frames)
        if path.startswith("/exec/"):
            return 200, {"ExitCode": self.exit_code, "Running": False}
        if path.endswith("/json") and path.startswith("/containers/"):
            return 200, {"State": self.state}
        if path in ("/build", "/images/create", "/images/load"):
            return 200, b'{"stream": "Loaded image: tiny:v1\\n"}\n'
        return 200, {"Id": "id", "Version": "9"}

    def _archive(self, method: str, path: str, body: bytes) -> Any:
        if method == "PUT":
            with tarfile.open(fileobj=io.BytesIO(body)) as archive:
                for one in archive:
                    source = archive.extractfile(one)
                    if source is not None:
                        self.files[f"/{one.name}"] = source.read()
            return 200, b""
        found = {name: one for name, one in self.files.items() if name.startswith(path)}
        if not found:
            return 404, {"message": "no such file"}
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name, content in found.items():
                member = tarfile.TarInfo(name.removeprefix(path.rpartition("/")[0]).lstrip("/"))
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return 200, file.getvalue()


@contextmanager
def serving(engine: FakeEngine, socket: Path) -> Iterator[FakeEngine]:
    """Serve a daemon at a socket."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            where = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(where.query).items()}
            body = self._body()
            engine.calls.append(
                (self.command, where.path, body if body[:1] != b"{" else json.loads(body))
            )
            status, content = engine.answer(self.command, where.path, query, body)
            sent = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            stat = base64.b64encode(b'{"name": "x", "linkTarget": ""}').decode()
            self.send_header("X-Docker-Container-Path-Stat", stat)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(sent)

        do_POST = do_PUT = do_DELETE = do_HEAD = do_GET

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content

        def address_string(self) -> str:
            return ""

        def log_message(self, *_: object) -> None:
            pass

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True

    with Server(str(socket), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield engine
        server.shutdown()
