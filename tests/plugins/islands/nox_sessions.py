"""Sessions of islands."""

from __future__ import annotations

import nox
from nox_helpers import environment, install, suite


@nox.session
def islands(session: nox.Session) -> None:
    """All tests of islands, some of which meet in a real S3 server, moto's."""
    install(session, "islands")
    server = environment(session) / "bin" / "moto_server"
    suite(session, "islands", "-rs", COMPOSER_MESH_TEST_S3=server)
