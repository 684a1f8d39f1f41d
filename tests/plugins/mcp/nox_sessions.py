"""Sessions of MCP servers."""

from __future__ import annotations

import nox
from nox_helpers import environment, install, npm, pytest, suite


@nox.session
def mcp(session: nox.Session) -> None:
    """All tests of MCP servers, also with real ones from npm and PyPI. Needs Node.js with npm."""
    install(session, "mcp")
    servers = ("everything", "filesystem")
    npm(session, *(f"@modelcontextprotocol/server-{one}@2026.8.31" for one in servers))
    suite(session, "mcp")
    pytest(session, "tests/plugins/mcp/real", "-rs", COMPOSER_MESH_TEST_MCP=environment(session))
