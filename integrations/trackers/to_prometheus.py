"""Prometheus: an endpoint with the last value of each figure as a gauge, read by GET /metrics."""

from __future__ import annotations

import hmac
import os
import re
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app

from composer_mesh.configs.tracking import PrometheusTracking
from composer_mesh.integrations.trackers.port import TrackedRun, TrackedStep

PREFIX = "composer_mesh_"
READ_S = 10.0
"""Seconds without a byte after which a reader is hung up on."""
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]+")


class _Handler(WSGIRequestHandler):
    timeout = READ_S

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing of each request."""


class PrometheusTracker:
    """Serves the figures of one run until the run ends; each has the label `run`."""

    def __init__(self, section: PrometheusTracking) -> None:
        self._section = section
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._name = ""
        self._server: WSGIServer | None = None

    def start(self, run: TrackedRun) -> str:
        self._name = run.name
        app = make_wsgi_app(self._registry, disable_compression=True)
        variable = self._section.token_env
        guarded = _with_token(app, "" if variable is None else os.environ[variable])
        host, port = self._section.host, self._section.port
        self._server = make_server(host, port, guarded, handler_class=_Handler)
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()
        return f"http://{host}:{self._server.server_port}/metrics"

    def log(self, step: TrackedStep) -> None:
        for name, value in {"step": float(step.step), **step.values}.items():
            self._gauge(name).labels(run=self._name).set(value)

    def finish(self, state: str) -> None:  # noqa: ARG002  what ends is no longer served
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def _gauge(self, name: str) -> Gauge:
        known = PREFIX + _NOT_A_NAME.sub("_", name)
        if known not in self._gauges:
            self._gauges[known] = Gauge(known, name, ["run"], registry=self._registry)
        return self._gauges[known]


def _with_token(app: Callable[..., Any], token: str) -> Callable[..., Iterable[bytes]]:
    expected = f"Bearer {token}".encode()

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        given = str(environ.get("HTTP_AUTHORIZATION", "")).encode(errors="replace")
        if token and not hmac.compare_digest(given, expected):
            start_response("401 Unauthorized", [("Content-Type", "text/plain")])
            return [b"send the token: Authorization: Bearer TOKEN\n"]
        answer: Iterable[bytes] = app(environ, start_response)
        return answer

    return guarded
