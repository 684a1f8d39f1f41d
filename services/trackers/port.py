"""What a tracker is: the port that ours implement, and that one of yours implements.

A tracker runs on a thread of its own (`delivery`): its methods may block, and what they raise does
not reach the run. They are called one after another, first `start`, last `finish`.

`check_trackers` checks what the `[[tracking]]` tables need before a run starts, `make_tracker`
builds their trackers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from composer_mesh.configs import plugins
from composer_mesh.configs.installed import is_installed
from composer_mesh.configs.tracking import (
    CustomTracking,
    OpentelemetryTracking,
    PrometheusTracking,
    RegisteredTracking,
    TrackerSection,
)
from composer_mesh.configs.user_code import imported


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker starts to follow.

    `folder` is the tracker's own in the run's directory, and is the same one when the run is
    resumed. `config` is the resolved config as plain values; it contains no credentials.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]


@dataclass(frozen=True)
class TrackedStep:
    """The figures after `step` optimizer steps, at `at` seconds since 1970.

    `values` are finite numbers under the names of docs/trackers.md. `metrics` is the object of
    `metrics.jsonl`, empty for an evaluation.
    """

    step: int
    at: float
    values: Mapping[str, float]
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """Receives the figures of one run."""

    def start(self, run: TrackedRun) -> str:
        """Begin, or continue a resumed run; return where people find it, or an empty text."""
        ...

    def log(self, step: TrackedStep) -> None:
        """Take the figures of a step or of an evaluation; steps never decrease."""
        ...

    def finish(self, state: str) -> None:
        """Write what remains. `state` is finished, stopped or failed."""
        ...


class TrackerRefused(Exception):
    """A tracker cannot work as configured; the message says why, and what to do instead."""


NEEDED = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "trackio": ("trackio",),
    "prometheus": ("prometheus_client",),
    "opentelemetry": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}
"""Import packages by type of tracker; each type is also the name of the extra."""
SHORTEST_TOKEN = 16


def check_trackers(trackers: Sequence[TrackerSection]) -> None:
    """Raise TrackerRefused where a package or a variable is missing. Imports none of them."""
    for section in trackers:
        if missing := [name for name in NEEDED.get(section.type, ()) if not is_installed(name)]:
            raise TrackerRefused(
                f"tracking has a table of type {section.type!r} but {', '.join(missing)} is not "
                f"installed: pip install 'composer-mesh[{section.type}]', or remove the table"
            )
        _check_variables(section)


def _check_variables(section: TrackerSection) -> None:
    variable = None
    if isinstance(section, OpentelemetryTracking):
        variable, least = section.headers_env, 1
    elif isinstance(section, PrometheusTracking):
        variable, least = section.token_env, SHORTEST_TOKEN
    if variable is not None and len(os.environ.get(variable, "")) < least:
        raise TrackerRefused(
            f"the tracker {section.title} names the environment variable {variable}, which holds "
            f"{len(os.environ.get(variable, ''))} characters: set it to at least {least}"
        )


def make_tracker(section: TrackerSection) -> Tracker:
    """Return the tracker of a table. Imports its package, which may take seconds."""
    if isinstance(section, CustomTracking | RegisteredTracking):
        return custom_class(section.import_path)(**section.kwargs)
    tracker: Tracker = plugins.load("trackers", section.type)(section)
    return tracker


def custom_class(import_path: str) -> Callable[..., Tracker]:
    """Import a user's class, as `my_module:MyTracker`; raise TrackerRefused if that fails."""
    try:
        found: Callable[..., Tracker] = imported(import_path)
    except (ImportError, AttributeError, ValueError) as error:
        raise TrackerRefused(
            f"the tracker {import_path!r} cannot be imported ({error}): correct import_path, or "
            "add its folder to run.import_paths"
        ) from error
    if not callable(found):
        raise TrackerRefused(f"{import_path!r} is a {type(found).__name__}: name a class instead")
    return found
