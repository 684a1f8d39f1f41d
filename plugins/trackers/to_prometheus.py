"""Prometheus: an endpoint with the last value of each figure as a gauge, read by GET /metrics."""

from __future__ import annotations

import hmac
import os
import re
from http import HTTPStatus

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import choose_encoder

from composer_mesh.configs.tracking import PrometheusTracking
from composer_mesh.mesh.json_server import JsonHandler, JsonServer, Refusal
from composer_mesh.services.trackers.port import TrackedRun, TrackedStep

PREFIX = "composer_mesh_"
PATH = "/metrics"
READ_S = 10.0
"""Seconds in which a reader has to send its request."""
_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]+")


class _Server(JsonServer):
    most_connections = 64

    def __init__(self, registry: CollectorRegistry, token: str, address: tuple[str, int]) -> None:
        self.registry, self.token = registry, token
        super().__init__(_Handler, address)


class _Handler(JsonHandler):
    server: _Server
    server_version = "composer-mesh-figures"
    timeout = body_s = READ_S
    largest_request = 0

    def authorize(self) -> None:
        given = self.headers.get("Authorization", "").encode(errors="replace")
        token = self.server.token
        if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            text = "send the token: Authorization: Bearer TOKEN"
            raise Refusal(HTTPStatus.UNAUTHORIZED, text)

    def respond(self, route: str, body: bytes) -> None:
        del body
        if route != f"GET {PATH}":
            raise Refusal(HTTPStatus.NOT_FOUND, f"no route {route[:80]!r}: GET {PATH}")
        encode, kind = choose_encoder(self.headers.get("Accept", ""))
        self.send_content(HTTPStatus.OK, encode(self.server.registry), kind)


class PrometheusTracker:
    """Serves the figures of one run until the run ends; each has the label `run`."""

    def __init__(self, section: PrometheusTracking) -> None:
        self._section = section
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._name = ""
        self._server: _Server | None = None

    def start(self, run: TrackedRun) -> str:
        self._name = run.name
        variable = self._section.token_env
        token = "" if variable is None else os.environ[variable]
        address = (self._section.host, self._section.port)
        self._server = _Server(self._registry, token, address)
        self._server.start()
        return f"{self._server.origin}{PATH}"

    def log(self, step: TrackedStep) -> None:
        for name, value in {"step": float(step.step), **step.values}.items():
            self._gauge(name).labels(run=self._name).set(value)

    def finish(self, state: str) -> None:  # noqa: ARG002  what ends is no longer served
        assert self._server is not None
        self._server.close()

    def _gauge(self, name: str) -> Gauge:
        known = PREFIX + _NOT_A_NAME.sub("_", name)
        if known not in self._gauges:
            self._gauges[known] = Gauge(known, name, ["run"], registry=self._registry)
        return self._gauges[known]
