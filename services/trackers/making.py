"""Builds the tracker of a `[[tracking]]` table, ours or one of the user's."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable

from composer_mesh.configs import plugins
from composer_mesh.configs.tracking import CustomTracking, RegisteredTracking, TrackerSection
from composer_mesh.services.trackers.port import Tracker, TrackerRefused


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
