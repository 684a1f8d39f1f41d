"""Launchers by kind of cluster, imported on demand."""

from __future__ import annotations

from composer_mesh.configs import plugins
from composer_mesh.services.launch.ports import Launcher


def launcher_of(kind: str) -> Launcher:
    """Return the launcher of a kind; raise RegistrationError if nobody registers it."""
    launcher: Launcher = plugins.load("launchers", kind)()
    return launcher
