"""Checks what the `[[tracking]]` tables need before a run starts, and builds their trackers."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from composer_mesh.configs import plugins
from composer_mesh.configs.tracking import (
    CustomTracking,
    OpentelemetryTracking,
    PrometheusTracking,
    RegisteredTracking,
    TrackerSection,
)
from composer_mesh.services.trackers.port import Tracker, TrackerRefused

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
        if missing := [name for name in NEEDED.get(section.type, ()) if not _is_there(name)]:
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


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent package
        return False


def make_tracker(section: TrackerSection) -> Tracker:
    """Return the tracker of a table. Imports its package, which may take seconds."""
    if isinstance(section, CustomTracking | RegisteredTracking):
        return custom_class(section.import_path)(**section.kwargs)
    tracker: Tracker = plugins.load("trackers", section.type)(section)
    return tracker


def custom_class(import_path: str) -> Callable[..., Tracker]:
    """Import a user's class, as `my_module:MyTracker`; raise TrackerRefused if that fails."""
    try:
        found: Callable[..., Tracker] = pkgutil.resolve_name(import_path)
    except (ImportError, AttributeError, ValueError) as error:
        raise TrackerRefused(
            f"the tracker {import_path!r} cannot be imported ({error}): correct import_path, or "
            "add its folder to run.import_paths"
        ) from error
    if not callable(found):
        raise TrackerRefused(f"{import_path!r} is a {type(found).__name__}: name a class instead")
    return found
