"""Checks the trackers of a config before anything is started."""

from composer_mesh.configs import plugins
from composer_mesh.configs.schema import Config
from composer_mesh.configs.tracking import CustomTracking, RegisteredTracking
from composer_mesh.integrations.trackers.checks import check_trackers
from composer_mesh.integrations.trackers.making import custom_class
from composer_mesh.mesh.environment import add_import_paths


def check_run_trackers(config: Config) -> None:
    """Raise TrackerRefused for a tracker that lacks a package, a variable or its class."""
    for section in config.tracking:
        if isinstance(section, CustomTracking | RegisteredTracking):
            add_import_paths(config.run.import_paths)
            custom_class(section.import_path)
        else:
            plugins.require("trackers", section.type)
    check_trackers(config.tracking)
