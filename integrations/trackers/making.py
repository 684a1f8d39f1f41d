"""Builds the tracker of a `[[tracking]]` table, ours or one of the user's."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable

from composer_mesh.configs.tracking import (
    CustomTracking,
    MlflowTracking,
    OpentelemetryTracking,
    PrometheusTracking,
    TensorboardTracking,
    TrackerSection,
    TrackioTracking,
    WandbTracking,
)
from composer_mesh.integrations.trackers.port import Tracker, TrackerRefused


def make_tracker(section: TrackerSection) -> Tracker:
    """Return the tracker of a table. Imports its package, which may take seconds."""
    match section:
        case TensorboardTracking():
            from composer_mesh.integrations.trackers.to_tensorboard import TensorboardTracker

            return TensorboardTracker(section)
        case WandbTracking():
            from composer_mesh.integrations.trackers.to_wandb import WandbTracker

            return WandbTracker(section)
        case MlflowTracking():
            from composer_mesh.integrations.trackers.to_mlflow import MlflowTracker

            return MlflowTracker(section)
        case TrackioTracking():
            from composer_mesh.integrations.trackers.to_trackio import TrackioTracker

            return TrackioTracker(section)
        case PrometheusTracking():
            from composer_mesh.integrations.trackers.to_prometheus import PrometheusTracker

            return PrometheusTracker(section)
        case OpentelemetryTracking():
            from composer_mesh.integrations.trackers.to_opentelemetry import OpentelemetryTracker

            return OpentelemetryTracker(section)
        case CustomTracking():
            custom: Tracker = custom_class(section.import_path)(**section.kwargs)
            return custom
    raise AssertionError(f"no tracker of type {section.type!r}")


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
