"""Sessions of tasks of packages."""

from __future__ import annotations

import nox
from nox_helpers import install_here, pytest, requirements


@nox.session(venv_backend="none")
def tasks(session: nox.Session) -> None:
    """Install all packages of docs/task-packages.md into .venv, and play their tasks."""
    install_here(session, "-e", ".[reasoning-gym,bfcl,tau2,textarena]")
    install_here(session, "--no-deps", "-r", requirements("tasks-no-deps"))
    pytest(session, "tests/plugins/task_packages/packages", "-rs", COMPOSER_MESH_TEST_TASKS=1)
