"""Sessions of OpenEnv."""

from __future__ import annotations

import nox
from nox_helpers import environment, install, pytest, python_of, suite


@nox.session
def openenv(session: nox.Session) -> None:
    """All tests of OpenEnv, also with its own package, which requires another MCP."""
    install(session, "openenv")
    suite(session, "openenv")
    variables = {"COMPOSER_MESH_OPENENV_PYTHON": python_of(environment(session))}
    pytest(session, "tests/plugins/openenv/package", "-rs", **variables)
