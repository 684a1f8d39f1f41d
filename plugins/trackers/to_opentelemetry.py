"""OpenTelemetry: a trace for each step, with spans for what the controller's loop waited for.

step 12 ---------------------------------------------
  wait for rollouts -----  train ------------  sync --
"""

from __future__ import annotations

import os
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import set_span_in_context

from composer_mesh.configs.tracking import OpentelemetryTracking
from composer_mesh.services.trackers.port import TrackedRun, TrackedStep

PARTS = (
    ("wait for rollouts", "time/wait_batch_s"),
    ("train", "time/train_s"),
    ("weight sync", "time/weight_sync_s"),
)
"""Spans of a step in their order, with the metric of their seconds."""
SECOND = 1_000_000_000
SEND_S = 10


class _Ended(SpanProcessor):
    """Collects the spans of a step, so that one request sends them and its failure is seen."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def taken(self) -> list[ReadableSpan]:
        spans, self._spans = self._spans, []
        return spans


class OpentelemetryTracker:
    """Sends the spans of finished steps to a collector."""

    def __init__(
        self, section: OpentelemetryTracking, exporter: SpanExporter | None = None
    ) -> None:
        self._section = section
        self._exporter = exporter or OTLPSpanExporter(
            endpoint=section.endpoint, headers=_headers(section.headers_env), timeout=SEND_S
        )
        self._provider: TracerProvider | None = None
        self._ended = _Ended()
        self._run = ""

    def start(self, run: TrackedRun) -> str:
        about = {"service.name": self._section.service_name, "composer_mesh.run": run.name}
        provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._provider, self._run = provider, run.name
        return self._section.endpoint

    def log(self, step: TrackedStep) -> None:
        """Send a step's spans; evaluations have no duration and are left out.

        Raises ConnectionError if the collector does not take them.
        """
        assert self._provider is not None
        took = step.metrics.get("time/step_s")
        if took is None:
            return
        tracer = self._provider.get_tracer("composer_mesh")
        began, ended = int((step.at - took) * SECOND), int(step.at * SECOND)
        figures: dict[str, Any] = {"step": step.step, "run": self._run, **step.values}
        whole = tracer.start_span(
            f"step {step.step}", context=Context(), start_time=began, attributes=figures
        )
        place = set_span_in_context(whole, Context())
        at = began
        for name, key in PARTS:
            until = min(ended, at + int((step.metrics.get(key) or 0.0) * SECOND))
            tracer.start_span(name, context=place, start_time=at).end(until)
            at = until
        whole.end(ended)
        if self._exporter.export(self._ended.taken()) is not SpanExportResult.SUCCESS:
            raise ConnectionError(f"{self._section.endpoint} takes no spans")

    def finish(self, state: str) -> None:  # noqa: ARG002  a trace ends with its step
        self._exporter.shutdown()


def _headers(variable: str | None) -> dict[str, str]:
    text = "" if variable is None else os.environ.get(variable, "")
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {name.strip(): value.strip() for name, _, value in pairs}
