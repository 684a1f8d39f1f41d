"""A judge on this machine: rules behind the chat protocol of OpenAI, in place of a model."""

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

QUOTED = re.compile(r"\[text (\w+)\]\n(.*?)\n\[end \1\]", re.DOTALL)


def graded(question: str) -> dict[str, Any]:
    """Grade the quoted conversation by how much of the request is in the answer."""
    _, conversation = QUOTED.findall(question)[0]
    request, offer = (json.loads(line)["content"] for line in conversation.splitlines()[:2])
    wanted, said = request.split(), re.findall(r"\w+", offer)
    missing = [word for word in wanted if word not in said]
    reason = f"misses {', '.join(missing)}" if missing else "all is there"
    return {"reason": reason, "score": round(1 - len(missing) / len(wanted), 2)}


class Handler(BaseHTTPRequestHandler):
    """Answers POST /v1/chat/completions."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = json.dumps(graded(request["messages"][1]["content"]))
        words = sum(len(one["content"].split()) for one in request["messages"])
        body = {
            "model": request["model"],
            "choices": [{"message": {"role": "assistant", "content": text}}],
            "usage": {"prompt_tokens": words, "completion_tokens": len(text.split())},
        }
        raw = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for each request."""


def judge_server(port: int = 0) -> ThreadingHTTPServer:
    """Return a server on a port of this machine, a free one by default."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    return server
