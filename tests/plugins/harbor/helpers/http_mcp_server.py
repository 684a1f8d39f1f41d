"""An MCP server over HTTP for services of tests, of the standard library alone.

`/mcp` is streamable HTTP, answered as the variable ANSWERS says: `json` or `events`. `/sse` is the
older transport. Each call of the tool `next_word` gives the next word of WORDS.
"""

from __future__ import annotations

import json
import os
import queue
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

WORDS = os.environ.get("WORDS", "").split()
ANSWERS = os.environ.get("ANSWERS", "json")
SCHEMA = {"type": "object", "properties": {}}
TOOL = {"name": "next_word", "description": "Returns the next word.", "inputSchema": SCHEMA}
SESSION = "Mcp-Session-Id"
calls, sessions = count(), {}


def answered(message: dict) -> dict:
    """Return the answer to a request."""
    method = message["method"]
    if method == "initialize":
        about = {"name": "words", "version": "1"}
        result = {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {}},
            "serverInfo": about,
        }
    elif method == "tools/list":
        result = {"tools": [TOOL]}
    else:
        result = {"content": [{"type": "text", "text": WORDS[next(calls) % len(WORDS)]}]}
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def event(data: str, name: str = "message") -> bytes:
    """Return an event after a comment, with line ends of both kinds."""
    return f": comment\r\nevent: {name}\ndata: {data}\n\n".encode()


class Handler(BaseHTTPRequestHandler):
    """Serves one connection."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer a message, here or on its stream."""
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path, _, session = self.path.partition("?")
        if path == "/messages":
            if "id" in message:
                sessions[session].put(answered(message))
            return self.reply(202)
        if message["method"] != "initialize" and self.headers[SESSION] not in sessions:
            return self.reply(404, b"no session")
        if "id" not in message:
            return self.reply(202)
        session = self.headers[SESSION] or f"s{len(sessions)}"
        sessions[session] = queue.Queue()
        text = json.dumps(answered(message))
        if ANSWERS == "json":
            return self.reply(200, text.encode(), "application/json", session)
        other = event(json.dumps({"jsonrpc": "2.0", "method": "notifications/message"}))
        return self.reply(200, other + event(text), "text/event-stream", session)

    def do_GET(self) -> None:
        """Open a stream of events; streamable HTTP has none here."""
        if self.path != "/sse":
            return self.reply(405)
        session = f"s{len(sessions)}"
        sessions[session] = queue.Queue()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(event(f"/messages?{session}", "endpoint"))
        while True:
            self.wfile.write(event(json.dumps(sessions[session].get())))

    def reply(self, status: int, body: bytes = b"", kind: str = "text/plain", s: str = "") -> None:
        """Send a whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if s:
            self.send_header(SESSION, s)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write no log."""


if __name__ == "__main__":
    ThreadingHTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
