"""A paid provider that records every question it was paid for.

Speaks the OpenAI chat protocol on 127.0.0.1, in threads of this process, so that it outlives the
runs that query it. It answers as an expert of the task, and charges when it answers.
"""

import hashlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

from composer_mesh.actors.experts.http import Expert, ExpertPanel
from composer_mesh.tasks.toolbox import ToolboxTask

PROMPT_USD, COMPLETION_USD = 1e-6, 1e-5
"""Prices per token."""

ARRIVAL_S = 0.25
"""An answer is in flight until its client has had this long to read and store it."""


@dataclass
class Payment:
    """One answer that was charged; `answered` is when its last byte was sent, None before."""

    usd: float
    began: float
    answered: float | None = None


@dataclass
class Provider:
    """Serves one model per name; `latency_s` is the delay of an answer."""

    task: ToolboxTask
    names: tuple[str, ...]
    latency_s: float = 0.1
    payments: defaultdict[str, list[Payment]] = field(default_factory=lambda: defaultdict(list))
    """Payments by question."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve while the block runs; yields the root URL of the API."""
        server = _Server(("127.0.0.1", 0), _handler(self))
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            server.server_close()

    def charged(self) -> float:
        """Return all charges, in dollars."""
        with self._lock:
            return sum(one.usd for paid in self.payments.values() for one in paid)

    def twice(self, kills: list[tuple[float, float]]) -> tuple[float, float]:
        """Return the dollars of answers to questions that were answered before: in all, and
        those of them whose former answer was in flight when the run was killed. A kill has a
        start and an end."""
        lost = again = 0.0
        with self._lock:
            for paid in self.payments.values():
                for before, one in pairwise(paid):
                    again += one.usd
                    if any(_on_its_way(before, *kill) for kill in kills):
                        lost += one.usd
        return again, lost

    def answer(self, body: bytes) -> tuple[Payment, bytes]:
        """Charge a question and answer it."""
        asked = json.loads(body)
        panel = ExpertPanel(self.task, 0, [Expert(name, 0.02) for name in self.names])
        reply: dict[str, Any] = panel.completion(asked["model"], asked["messages"])
        usage = reply["usage"]
        usd = usage["prompt_tokens"] * PROMPT_USD + usage["completion_tokens"] * COMPLETION_USD
        usage["cost"] = usd
        content = {key: asked.get(key) for key in ("model", "messages", "tools")}
        question = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        payment = Payment(usd, time.monotonic())
        with self._lock:
            self.payments[question].append(payment)
        time.sleep(self.latency_s)
        return payment, json.dumps(reply).encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignore errors: the client was killed."""


def _on_its_way(payment: Payment, kill_began: float, kill_ended: float) -> bool:
    arrived = kill_began if payment.answered is None else payment.answered + ARRIVAL_S
    return payment.began <= kill_ended and kill_began <= arrived


def _handler(provider: Provider) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            payment, reply = provider.answer(body)
            with suppress(OSError):  # the client was killed
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)
                self.wfile.flush()
                payment.answered = time.monotonic()

        def log_message(self, *_: object) -> None:
            return

    return Handler
